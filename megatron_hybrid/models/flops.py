"""FLOPs of a token, with and without its context."""

from __future__ import annotations

import math

from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.parameter_names import separate_expert


def token_flops(model: HybridModel) -> tuple[float, float]:
    """FLOPs, in units of 2, of one token in the layers of this rank: (of the token itself, per
    token that it attends to).

    Only matrix products count: each weight applied to a token (of its own experts, where routed),
    and each element of keys and values per query head. Other work of recurrent and local layers is
    a few percent of that.
    """
    weights = pairs = 0.0
    for number, layer in enumerate(model.decoder.layers, start=1):
        config = model.config.for_layer(model.layer_offset + number)
        for name, parameter in layer.named_parameters():
            is_matrix = parameter.dim() == 2
            if is_matrix and separate_expert(name) is None:
                weights += parameter.numel()
            elif is_matrix or (parameter.dim() == 3 and parameter.shape[1] > 1):  # no convolution's
                weights += parameter.numel() * config.moe_router_topk / config.num_moe_experts
        kv = layer.cache_requirements().kv
        if kv is not None and not kv.is_local:
            heads = config.num_attention_heads // model.pg_collection.tp.size()
            pairs += heads * (kv.head_dim + (kv.value_dim or kv.head_dim))
    return weights, pairs


def attention_parity(weights: float, pairs: float) -> float:
    """Tokens of context at which full attention is half of a token's FLOPs (`token_flops`); inf
    without full attention."""
    return weights / pairs if pairs else math.inf
