"""Output norms of recurrent mixers, and the gate of Mamba's."""

from copy import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.norms import HeadNorm
from megatron_hybrid.models.sharding.collectives import sum_over_ranks
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel
from megatron_hybrid.ops import activate, gated_rms_norm
from megatron_hybrid.ops.checks import compute_dtype
from megatron_hybrid.ops.norm.reference import GATES


class GatedHeadNorm(HeadNorm):
    """The norm of a delta rule's outputs, one for all heads, times an activation of the gate.

    Args:
        config: the fields `linear_norm_*` are used, and those of `HeadNorm`.
        head_dim: width of a value head.
        tp_group: ranks over which the heads are split.
        activation: "silu" or "sigmoid".
    """

    def __init__(
        self, config: HybridConfig, head_dim: int, tp_group: dist.ProcessGroup, activation: str
    ):
        config = copy(config)
        if config.linear_norm_zero_centered_gamma is not None:
            config.layernorm_zero_centered_gamma = config.linear_norm_zero_centered_gamma
        eps = config.linear_norm_epsilon or config.layernorm_epsilon
        super().__init__(config, head_dim, eps, tp_group)
        self.activation = activation

    def forward(self, y_THP: Tensor, gate_THP: Tensor) -> Tensor:
        """Normalise and gate in fp32 (float64 for float64); returns [T, H, P] in the dtype of y."""
        if self.bias is None:
            form = dict(norm_first=True, zero_centered=self.zero_centered, rounds_norm=True)
            return gated_rms_norm(y_THP, gate_THP, self.weight, self.eps, self.activation, **form)
        gate_THP = GATES[self.activation](gate_THP.to(compute_dtype(y_THP)))
        return (super().forward(y_THP) * gate_THP).to(y_THP.dtype)


def gated(y_TC: Tensor, z_TC: Tensor) -> Tensor:
    """Return y SiLU(z) in fp32 (float64 for float64), in the dtype of y."""
    return activate(z_TC, F.silu, y_TC, in_fp32=True)


class GatedGroupNorm(nn.Module):
    """RMSNorm(y * a(z)) * weight, the mean square taken over each group of channels; or, with the
    norm before the gate, RMSNorm(y) * weight * a(z).

    With as many groups as tensor-parallel ranks, no rank needs another one's channels (Mamba-2,
    arXiv 2405.21060, section 8.2); else the ranks that share a group sum their squares.

    Args:
        channels: channels of all ranks.
        group_size: channels per group.
        tp_group: tensor-parallel ranks.
        eps: added to the mean square.
        dtype: dtype of the weight.
        norm_before_gate: the second of the two forms.
        activation: a, "silu" or "sigmoid".
    """

    def __init__(
        self,
        channels: int,
        group_size: int,
        tp_group: dist.ProcessGroup,
        eps: float,
        dtype: torch.dtype,
        norm_before_gate: bool = False,
        activation: str = "silu",
    ):
        super().__init__()
        self.group_size = group_size
        self.eps = eps
        self.form = activation, norm_before_gate
        self.tp_group = tp_group
        local = channels // tp_group.size()
        self.spread_groups = channels // group_size if local < group_size else 0
        """Groups of all ranks, if each lies on several ranks."""
        self.weight = nn.Parameter(torch.ones(local, dtype=dtype))
        mark_tensor_parallel(self.weight, Cut(0, (channels,), tp_group.size()))

    def forward(self, y_TC: Tensor, z_TC: Tensor) -> Tensor:
        """Gate and normalise in fp32 (float64 for float64); returns [T, C] in the dtype of y."""
        size = min(self.group_size, y_TC.shape[-1])
        y_TGC, z_TGC = y_TC.unflatten(-1, (-1, size)), z_TC.unflatten(-1, (-1, size))
        inputs = y_TGC, z_TGC, self.weight.view(-1, size), self.eps, *self.form
        mean_square = self._mean_square if self.spread_groups else None
        return gated_rms_norm(*inputs, mean_square=mean_square).flatten(-2)

    def _mean_square(self, y_TGC: Tensor) -> Tensor:
        """Average over the channels of all ranks, [T, 1, channels of this rank] -> [T, 1, 1]."""
        # Each group has a place of its own, so one sum serves all ranks.
        place = self.tp_group.rank() * self.spread_groups // self.tp_group.size()
        own = y_TGC.square().sum(-1) / self.group_size
        of_all = sum_over_ranks(F.pad(own, (place, self.spread_groups - 1 - place)), self.tp_group)
        return of_all[:, place, None, None]
