"""Differential attention (arXiv 2410.05258): two softmaxes of a head, one subtracted."""

from copy import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.derived_weights import from_weights
from megatron_hybrid.models.norms import HeadNorm
from megatron_hybrid.models.sharding.collectives import sum_gradient_over_ranks
from megatron_hybrid.ops.checks import compute_dtype


class DifferentialMaps(nn.Module):
    """(1 - l) RMSNorm(o_1 - (l + exp(q_1 k_1) - exp(q_2 k_2)) o_2), o_i being attention over one
    head's values by the i-th half of its queries and keys, and l `config.differential_lambda`.

    The half that a softmax leaves out is zero in its queries: so both see the same keys and values,
    which lie in the cache as those of one head.

    Args:
        config: that of the layer.
        value_dim: width of a value.
        tp_group: ranks over which the heads are split.
    """

    def __init__(self, config: HybridConfig, value_dim: int, tp_group: dist.ProcessGroup):
        super().__init__()
        self.start, half = config.differential_lambda, config.kv_channels // 2
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            drawn = torch.empty(half, dtype=config.params_dtype).normal_(0.0, 0.1)
            self.register_parameter(name, nn.Parameter(drawn))
        for parameter in self.parameters():
            sum_gradient_over_ranks(parameter, tp_group)
        config = copy(config)
        config.normalization, config.layernorm_zero_centered_gamma = "RMSNorm", False
        self.subln = HeadNorm(config, value_dim, config.layernorm_epsilon, tp_group)

    def split(self, q_THD: Tensor) -> Tensor:
        """Make two heads of each, [T, 2 H, D], by zeros in place of either half of its queries."""
        first, second = q_THD.chunk(2, -1)
        half = first.shape[-1]
        return torch.stack((F.pad(first, (0, half)), F.pad(second, (half, 0))), 2).flatten(1, 2)

    def subtract(self, o_THP: Tensor) -> Tensor:
        """Subtract the second head's outputs of each pair, [T, 2 H, P] -> [T, H, P]."""
        dtype = compute_dtype(o_THP)
        first, second = o_THP.to(dtype).unflatten(1, (-1, 2)).unbind(2)
        factor = from_weights(self, str(dtype), lambda: self._factor(dtype))
        return (self.subln(first - factor * second) * (1.0 - self.start)).to(o_THP.dtype)

    def _factor(self, dtype: torch.dtype) -> Tensor:
        first = self.lambda_q1.to(dtype) @ self.lambda_k1.to(dtype)
        second = self.lambda_q2.to(dtype) @ self.lambda_k2.to(dtype)
        return first.exp() - second.exp() + self.start
