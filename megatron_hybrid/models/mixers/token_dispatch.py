"""Token dispatchers: which rows come to the experts of this rank, and how their outputs return.

Shape suffixes: as in `ops.experts`; m counts the rows of this rank's experts, p those that came
from all ranks, packed.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.sharding.collectives import all_to_all
from megatron_hybrid.models.sharding.parallel_setup import ExpertGroups
from megatron_hybrid.ops import ExpertPairs
from megatron_hybrid.ops.checks import rows_between
from megatron_hybrid.ops.dispatch import numbers_of


class LocalDispatcher:
    """No token travels: the result is the part of the sums that this rank's experts give.

    Args:
        config: the fields of routing are used.
        experts: numbers of this rank's experts.
        alignment: see `ExpertPairs`.
    """

    def __init__(self, config: HybridConfig, experts: range, alignment: int | None = None):
        self._config = config
        self._experts = experts
        self._alignment = alignment

    def dispatch(
        self, hidden_nh: Tensor, weights_nE: Tensor, chosen_nE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rows [m, h] for this rank's experts, and where each ends: see `expert_mlps`.

        Args:
            hidden_nh: this rank's tokens.
            weights_nE: weight of each of all experts, fp32 or fp64.
            chosen_nE: the chosen experts, bool, at most `moe_router_topk` for each token.
        """
        config = self._config
        self._pairs = ExpertPairs(
            chosen_nE,
            config.moe_router_topk,
            self._experts,
            may_lack=config.moe_expert_capacity_factor is not None,
            alignment=self._alignment,
        )
        x_mh, self._weights_nE = self._pairs.tokens(hidden_nh), weights_nE
        if config.moe_apply_probs_on_input:
            x_mh = (x_mh * self._pairs.weights(weights_nE)).to(x_mh.dtype)
            self._weights_nE = None
        return x_mh, self._pairs.ends_E

    def combine(self, y_mh: Tensor) -> Tensor:
        """Return each token's weighted sum [n, h] of the outputs of its experts, in their dtype."""
        return self._pairs.sum(y_mh, self._weights_nE)


class AllToAllDispatcher:
    """Rows travel to the ranks of their experts, and the outputs back, by a plain all-to-all. It
    has to know on the host how many, so each dispatch waits for the device.

    Args:
        config: the fields of routing are used.
        group: the expert-parallel ranks; the i-th has the i-th part of the experts.
    """

    def __init__(self, config: HybridConfig, group: dist.ProcessGroup):
        self._group = group
        self._local = LocalDispatcher(config, range(config.num_moe_experts), alignment=1)

    def dispatch(
        self, hidden_nh: Tensor, weights_nE: Tensor, chosen_nE: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `LocalDispatcher`."""
        x_mh, ends_E = self._local.dispatch(hidden_nh, weights_nE, chosen_nE)
        # [ranks, experts of each]: the rows for other ranks, and from them.
        for_ranks = ends_E.diff(prepend=ends_E.new_zeros(1)).view(self._group.size(), -1)
        from_ranks = torch.empty_like(for_ranks)
        dist.all_to_all_single(from_ranks, for_ranks, group=self._group)
        evenly = [len(x_mh) // len(for_ranks)] * len(for_ranks)
        self._sent = numbers_of(for_ranks.sum(1), evenly)
        self._received = numbers_of(from_ranks.sum(1), evenly)
        self._num_unsent = len(x_mh) - sum(self._sent)
        x_mh = rows_between(x_mh, 0, sum(self._sent))
        self._pairs = _pairs_of(from_ranks, sum(self._received))
        x_ph = all_to_all(x_mh, self._sent, self._received, self._group)
        return self._pairs.tokens(x_ph), self._pairs.ends_E

    def combine(self, y_mh: Tensor) -> Tensor:
        """See `LocalDispatcher`."""
        y_mh = all_to_all(self._pairs.sum(y_mh), self._received, self._sent, self._group)
        if self._num_unsent:
            y_mh = F.pad(y_mh, (0, 0, 0, self._num_unsent))
        return self._local.combine(y_mh)


def _pairs_of(counts: Tensor, num_rows: int) -> ExpertPairs:
    """Pair each row with its only expert; rows come rank by rank, then expert by expert.

    Args:
        counts: rows, [ranks, E].
        num_rows: their sum.
    """
    experts_E = torch.arange(counts.shape[1], device=counts.device)
    expert_p = experts_E.repeat(len(counts))
    expert_p = expert_p.repeat_interleave(counts.flatten(), output_size=num_rows)
    return ExpertPairs(expert_p.unsqueeze(1) == experts_E, 1)


def build_dispatcher(
    config: HybridConfig, groups: ExpertGroups, same_tokens_on_expert_ranks: bool
) -> LocalDispatcher | AllToAllDispatcher:
    """Build the dispatcher of one forward."""
    if same_tokens_on_expert_ranks or groups.num_parts == 1:
        return LocalDispatcher(config, groups.own(config.num_moe_experts))
    return AllToAllDispatcher(config, groups.ep)
