"""Token dispatchers: which rows come to the experts of this rank, and how their outputs return.

Shape suffixes: as in `ops.experts`; m counts the rows that this rank's experts take.
"""

from __future__ import annotations

from copy import copy
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.sharding.collectives import all_to_all
from megatron_hybrid.models.sharding.parallel_setup import ExpertGroups
from megatron_hybrid.ops import ExpertPairs


class TokenDispatcher(Protocol):
    """The way of one forward's tokens to their experts and back."""

    def dispatch(
        self, hidden_nh: Tensor, weights_nE: Tensor, chosen_nE: Tensor
    ) -> tuple[Tensor, list[int]]:
        """Rows [m, h] for this rank's experts, expert by expert, and the rows of each.

        Args:
            hidden_nh: this rank's tokens.
            weights_nE: weight of each of all experts, fp32 or fp64.
            chosen_nE: the chosen experts, bool, at most `moe_router_topk` for each token.
        """

    def combine(self, y_mh: Tensor) -> Tensor:
        """Each token's weighted sum [n, h] of the outputs of its experts, in their dtype."""


class LocalDispatcher:
    """No token travels: the result is the part of the sums that this rank's experts give.

    Args:
        config: the fields of routing are used.
        experts: numbers of this rank's experts.
    """

    def __init__(self, config: HybridConfig, experts: range):
        self._config = config
        self._experts = experts

    def dispatch(
        self, hidden_nh: Tensor, weights_nE: Tensor, chosen_nE: Tensor
    ) -> tuple[Tensor, list[int]]:
        """See `TokenDispatcher`."""
        self._pairs = ExpertPairs(chosen_nE, self._config.moe_router_topk, self._experts)
        self._weights_m1 = self._pairs.weights(weights_nE)
        x_mh = self._pairs.tokens(hidden_nh)
        if self._config.moe_apply_probs_on_input:
            x_mh = (x_mh * self._weights_m1).to(x_mh.dtype)
        return x_mh, self._pairs.counts_E.tolist()

    def combine(self, y_mh: Tensor) -> Tensor:
        """See `TokenDispatcher`."""
        weighted_mh = y_mh.to(self._weights_m1.dtype)
        if not self._config.moe_apply_probs_on_input:
            weighted_mh = weighted_mh * self._weights_m1
        return self._pairs.sum(weighted_mh).to(y_mh.dtype)


class AllToAllDispatcher:
    """Rows travel to the ranks of their experts, and the outputs back, by a plain all-to-all.

    Args:
        config: the fields of routing are used.
        group: the expert-parallel ranks; the i-th has the i-th part of the experts.
    """

    def __init__(self, config: HybridConfig, group: dist.ProcessGroup):
        self._group = group
        self._local = LocalDispatcher(config, range(config.num_moe_experts))

    def dispatch(
        self, hidden_nh: Tensor, weights_nE: Tensor, chosen_nE: Tensor
    ) -> tuple[Tensor, list[int]]:
        """See `TokenDispatcher`."""
        x_mh, counts = self._local.dispatch(hidden_nh, weights_nE, chosen_nE)
        # [ranks, experts of each]: the rows for other ranks, and from them.
        for_ranks = torch.tensor(counts, device=x_mh.device).view(self._group.size(), -1)
        from_ranks = torch.empty_like(for_ranks)
        dist.all_to_all_single(from_ranks, for_ranks, group=self._group)
        self._sent, self._received = for_ranks.sum(1).tolist(), from_ranks.sum(1).tolist()
        x_mh = all_to_all(x_mh, self._sent, self._received, self._group)
        # From rank by rank to expert by expert.
        expert = torch.arange(from_ranks.shape[1], device=x_mh.device).repeat(len(from_ranks))
        order_m = expert.repeat_interleave(from_ranks.flatten()).argsort(stable=True)
        self._by_rank_m = order_m.argsort()
        return x_mh[order_m], from_ranks.sum(0).tolist()

    def combine(self, y_mh: Tensor) -> Tensor:
        """See `TokenDispatcher`."""
        y_mh = all_to_all(y_mh[self._by_rank_m], self._received, self._sent, self._group)
        return self._local.combine(y_mh)


class CoreDispatcher:
    """core's all-to-all, which runs on CUDA alone, for experts that are not cut (of others it
    would gather and sum the pieces, as Experts does). It weighs outputs where the experts are.

    Args:
        config: that of the model.
        pg_collection: `ep`, `expt_tp` and `tp_ep` are used.
    """

    def __init__(self, config: HybridConfig, pg_collection: ProcessGroupCollection):
        self._config = config
        own = ExpertGroups.of(pg_collection).own(config.num_moe_experts)
        ragged = copy(config)
        ragged.moe_pad_expert_input_to_capacity = False
        self._core = MoEAlltoAllTokenDispatcher(
            len(own), list(own), config=ragged, pg_collection=pg_collection
        )

    def dispatch(
        self, hidden_nh: Tensor, weights_nE: Tensor, chosen_nE: Tensor
    ) -> tuple[Tensor, list[int]]:
        """See `TokenDispatcher`."""
        rows = self._core.dispatch_preprocess(hidden_nh, chosen_nE, weights_nE)
        x_mh, counts, weights_m = self._core.dispatch_postprocess(*self._core.token_dispatch(*rows))
        self._weights_m1 = weights_m.unsqueeze(-1)
        if self._config.moe_apply_probs_on_input:
            x_mh = (x_mh * self._weights_m1).to(x_mh.dtype)
        return x_mh, counts.tolist()

    def combine(self, y_mh: Tensor) -> Tensor:
        """See `TokenDispatcher`."""
        if not self._config.moe_apply_probs_on_input:
            y_mh = (y_mh * self._weights_m1).to(y_mh.dtype)
        y_mh = self._core.token_combine(self._core.combine_preprocess(y_mh))
        return self._core.combine_postprocess(y_mh)


def build_dispatcher(
    config: HybridConfig,
    pg_collection: ProcessGroupCollection,
    hidden_nh: Tensor,
    same_tokens_on_expert_ranks: bool,
) -> TokenDispatcher:
    """The dispatcher of one forward. core's serves whole experts on CUDA where
    `config.moe_token_dispatcher_type` is "alltoall"."""
    groups = ExpertGroups.of(pg_collection)
    if same_tokens_on_expert_ranks or groups.ep is None or groups.num_parts == 1:
        return LocalDispatcher(config, groups.own(config.num_moe_experts))
    asked = config.moe_token_dispatcher_type == "alltoall" and groups.tp.size() == 1
    if asked and _runs_core(hidden_nh):
        return CoreDispatcher(config, pg_collection)
    return AllToAllDispatcher(config, groups.ep)


def _runs_core(hidden_nh: Tensor) -> bool:
    return hidden_nh.is_cuda
