"""Output norms of recurrent mixers, and the gate of Mamba's."""

from __future__ import annotations

from copy import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.sharding.collectives import sum_gradient_over_ranks
from megatron_hybrid.models.sharding.tensor_sharding import Cut, mark_tensor_parallel


def build_delta_norm(
    norm: type, config: HybridConfig, head_dim: int, tp_group: dist.ProcessGroup
) -> nn.Module:
    """The norm of a delta rule's outputs, one for all heads.

    Args:
        norm: its class.
        config: the fields `linear_norm_*` are used.
        head_dim: width of a value head.
        tp_group: ranks over which the heads are split.
    """
    norm_config = copy(config)
    if config.linear_norm_zero_centered_gamma is not None:
        norm_config.layernorm_zero_centered_gamma = config.linear_norm_zero_centered_gamma
    eps = config.linear_norm_epsilon or config.layernorm_epsilon
    built = norm(config=norm_config, hidden_size=head_dim, eps=eps)
    for parameter in built.parameters():
        sum_gradient_over_ranks(parameter, tp_group)
    return built


def gated(y_TC: Tensor, z_TC: Tensor) -> Tensor:
    """y SiLU(z) in fp32, in the dtype of y."""
    return (y_TC.float() * F.silu(z_TC.float())).to(y_TC.dtype)


class GatedGroupNorm(nn.Module):
    """RMSNorm(y * SiLU(z)) * weight, the mean square taken over each group of channels; or, with
    the norm before the gate, RMSNorm(y) * weight * SiLU(z).

    Groups never straddle tensor-parallel ranks, so no rank needs another one's channels
    (Mamba-2, arXiv 2405.21060, section 8.2).

    Args:
        channels: channels of all ranks.
        group_size: channels per group.
        tp_size: number of tensor-parallel ranks.
        eps: added to the mean square.
        dtype: dtype of the weight.
        norm_before_gate: the second of the two forms.
    """

    def __init__(
        self,
        channels: int,
        group_size: int,
        tp_size: int,
        eps: float,
        dtype: torch.dtype,
        norm_before_gate: bool = False,
    ):
        super().__init__()
        self.group_size = group_size
        self.eps = eps
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.ones(channels // tp_size, dtype=dtype))
        mark_tensor_parallel(self.weight, Cut(0, (channels,), tp_size))

    def forward(self, y_TC: Tensor, z_TC: Tensor) -> Tensor:
        """Gate and normalise in fp32; returns [T, C] in the dtype of `y_TC`."""
        x, gate = y_TC.float(), F.silu(z_TC.float())
        if not self.norm_before_gate:
            x = x * gate
        groups = x.unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        normed = (groups * scale).flatten(-2) * self.weight.float()
        if self.norm_before_gate:
            normed = normed * gate
        return normed.to(y_TC.dtype)
