"""Norms of hidden states in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig


class LocalNorm(nn.Module):
    """RMSNorm or LayerNorm by `config.normalization`; statistics in fp32.

    With `layernorm_zero_centered_gamma` the factor is 1 + weight, as in Transformer Engine.

    Args:
        config: `normalization`, `layernorm_zero_centered_gamma` and `params_dtype` are used.
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
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        weight = self.weight.float()
        if self.zero_centered:
            weight = 1.0 + weight
        if self.bias is None:
            y = F.rms_norm(x.float(), weight.shape, weight, self.eps)
        else:
            y = F.layer_norm(x.float(), weight.shape, weight, self.bias.float(), self.eps)
        return y.to(x.dtype)
