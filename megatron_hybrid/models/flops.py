"""How the work of a token grows with its context."""

from __future__ import annotations

import math

from megatron_hybrid.models.hybrid_model import HybridModel


def token_flops(model: HybridModel) -> tuple[float, float]:
    """FLOPs, in units of 2, of one token in the layers of this rank: (of the token itself, for each
    token that it attends to).

    Counted are matrix products: each weight that a token meets (of routed experts those that it is
    sent to), and each element of a key and of a value that a query head meets. What recurrent and
    local layers do beside their projections is a few percent of these.
    """
    weights = pairs = 0.0
    for number, layer in enumerate(model.decoder.layers, start=1):
        config = model.config.for_layer(number)
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                weights += parameter.numel()
            elif parameter.dim() == 3 and parameter.shape[1] > 1:  # not a convolution's
                weights += parameter.numel() * config.moe_router_topk / config.num_moe_experts
        kv = layer.cache_requirements().kv
        if kv is not None and not kv.is_local:
            heads = config.num_attention_heads // model.pg_collection.tp.size()
            pairs += heads * (kv.head_dim + (kv.value_dim or kv.head_dim))
    return weights, pairs


def attention_parity(weights: float, pairs: float) -> float:
    """Tokens of context at which full attention costs a token as many FLOPs as the rest of its way
    through the layers (`token_flops`); inf where nothing attends to everything."""
    return weights / pairs if pairs else math.inf
