"""Norms of hidden states."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.derived_weights import from_weights
from megatron_hybrid.models.sharding.collectives import sum_gradient_over_ranks, sum_over_ranks
from megatron_hybrid.models.sharding.tensor_sharding import Cut
from megatron_hybrid.ops import rms_norm, rms_norm_of_sum
from megatron_hybrid.ops.checks import compute_dtype


class LocalNorm(nn.Module):
    """RMSNorm or LayerNorm by `config.normalization`; statistics in fp32 (float64 for float64).

    With `layernorm_zero_centered_gamma` the factor is 1 + weight, as in Transformer Engine.

    Args:
        config: `normalization`, `layernorm_bias`, `layernorm_zero_centered_gamma`,
            `params_dtype` and `sequence_parallel` are used.
        hidden_size: of the normed dimension, the last one.
        eps: added to the variance.
    """

    def __init__(self, config: HybridConfig, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = 0.0 if self.zero_centered else 1.0
        weight = torch.full((hidden_size,), start, dtype=config.params_dtype)
        self.weight = nn.Parameter(weight)
        self.subtracts_mean = config.normalization == "LayerNorm"
        if self.subtracts_mean and config.layernorm_bias:
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        else:
            self.register_parameter("bias", None)
        for parameter in self.parameters():
            # core's finalize_model_grads sums the gradients of all ranks' rows.
            parameter.sequence_parallel = config.sequence_parallel

    def factor(self, dtype: torch.dtype) -> Tensor:
        """Return the factor of the normed values, [hidden_size]."""
        weight = self.weight
        if weight.dtype == dtype and not self.zero_centered:
            return weight

        def make() -> Tensor:
            return 1.0 + weight.to(dtype) if self.zero_centered else weight.to(dtype)

        return from_weights(self, str(dtype), make)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., hidden_size] -> the same shape and dtype."""
        weight = self.factor(compute_dtype(x))
        if not self.subtracts_mean:
            return rms_norm(x, weight, self.eps)
        dtype = weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        y = F.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps)
        return y.to(x.dtype)

    def of_sum(self, x_Th: Tensor, added_Th: Tensor) -> tuple[Tensor, Tensor]:
        """Return the RMSNorm of x + added, and x + added; a GPU needs one launch."""
        return rms_norm_of_sum(x_Th, added_Th, self.factor(compute_dtype(x_Th)), self.eps)


class HeadNorm(LocalNorm):
    """The norm of each head, one for all heads. It sees all rows of the heads of this rank.

    Args:
        config, hidden_size, eps: see `LocalNorm`; the size is that of a head.
        tp_group: ranks over which the heads are split.
    """

    def __init__(
        self, config: HybridConfig, hidden_size: int, eps: float, tp_group: dist.ProcessGroup
    ):
        super().__init__(config.with_all_rows(), hidden_size, eps)
        for parameter in self.parameters():
            sum_gradient_over_ranks(parameter, tp_group)


class SplitNorm(LocalNorm):
    """The norm of a vector that is split over the tensor-parallel ranks.

    Each rank has the whole weight and uses its own part: core's `finalize_model_grads` sums the
    gradients of the query and key norms over the ranks.

    Args:
        config, hidden_size, eps: see `LocalNorm`; the size is that of the whole vector.
        tp_group: tensor-parallel ranks.
        copies: number of neighbouring ranks that hold the same part.
    """

    def __init__(
        self,
        config: HybridConfig,
        hidden_size: int,
        eps: float,
        tp_group: dist.ProcessGroup,
        copies: int,
    ):
        super().__init__(config, hidden_size, eps)
        self.tp_group = tp_group
        self.size_of_all = hidden_size * copies
        cut = Cut(0, (hidden_size,), tp_group.size(), copies=(copies,))
        self.part = slice(*cut.ranges(tp_group.rank())[0])

    def forward(self, x: Tensor) -> Tensor:
        """Norm this rank's part, [..., hidden_size * copies / ranks], in the same dtype."""
        y = x.to(compute_dtype(x))
        if self.subtracts_mean:
            y = y - self._mean(y)
        y = y * torch.rsqrt(self._mean(y.square()) + self.eps) * self.factor(y.dtype)[self.part]
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)[self.part]
        return y.to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """Compute the mean over the parts of all ranks, [..., 1]."""
        return sum_over_ranks(x.sum(-1, keepdim=True) / self.size_of_all, self.tp_group)


def is_plain(norm: nn.Module | None) -> bool:
    """Return whether this is our RMSNorm without hooks: then another kernel may do its part."""
    return (
        type(norm) is LocalNorm
        and not norm.subtracts_mean
        and not (norm._forward_hooks or norm._forward_pre_hooks)
    )
