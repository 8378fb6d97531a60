"""FLOPs of a token, with and without its context."""

import math
from collections.abc import Iterable, Iterator

from torch import nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.mixers.base import KVShape
from megatron_hybrid.models.packed_weight import PackedWeight, named_weights
from megatron_hybrid.models.parameter_names import separate_expert
from megatron_hybrid.models.sharding.parallel_setup import ExpertGroups


def token_flops(model: HybridModel) -> tuple[float, float]:
    """Count the FLOPs, in units of 2, of one token in the layers of this rank: (of the token
    itself, per token that it attends to).

    Only matrix products count: each weight applied to a token (of its own experts, where routed),
    and each element of keys and values per query head. Other work of recurrent and local layers is
    a few percent of that.
    """
    layers = layers_with_configs(model)
    weights = sum(size for layer, config in layers for _, size in _matrices(layer, config))
    return weights, _full_attention(model, layers)


def attention_flops(model: HybridModel) -> list[tuple[KVShape, float]]:
    """List the layers of this rank that keep keys with their FLOPs, in units of 2, per pair of
    tokens of which one sees the other."""
    return list(_attention(model, layers_with_configs(model)))


def attention_parity(weights: float, pairs: float) -> float:
    """Compute at how many tokens of context full attention is half of a token's FLOPs
    (`token_flops`); inf without full attention."""
    return weights / pairs if pairs else math.inf


def training_flops(model: HybridModel) -> tuple[float, float]:
    """Count the FLOPs of this rank's forward and backward pass, without what recomputation adds:
    (of a token, of a pair of tokens of which full attention lets one see the other)."""
    layers, groups = layers_with_configs(model), ExpertGroups.of(model.pg_collection)
    # The experts' ranks bring tokens of their own, but for tensor-parallel ones.
    tokens_of_ranks = groups.num_parts * groups.tp.size() / model.pg_collection.tp.size()
    parts = model.mtp.parts if hasattr(model, "mtp") else []
    for part in parts:
        stack = part.mtp_model_layer
        layers += zip(stack.layers, map(model.config.for_prediction, stack.layer_type_list))
    applied = [pair for each in layers for pair in _matrices(*each, tokens_of_ranks)]
    applied += [pair for part in parts for pair in _matrices(part.eh_proj, part.config)]
    if model.post_process:
        weight = model.shared_embedding_or_output_weight()
        applied += [(weight, weight.numel())] * (1 + len(parts))
    pairs = _full_attention(model, layers)
    # A product, the gradient of its input, and that of a weight that learns; of a multiplication
    # and an addition each.
    weights = sum((3 if one.requires_grad else 2) * size for one, size in applied)
    return 2 * weights, 2 * 3 * pairs


def recomputed_flops(model: HybridModel) -> float:
    """Count the FLOPs of a token that this rank's layers compute once more in the backward pass; of
    mixers of which parts are recomputed, none."""
    together = sum(model.decoder.recomputed_layers)
    again = [
        (layer, config)
        for number, (layer, config) in enumerate(layers_with_configs(model))
        if number < together or layer.recomputes_mixer
    ]
    return 2 * sum(size for each in again for _, size in _matrices(*each))


def layer_widths(model: HybridModel) -> list[float]:
    """Estimate the elements of a token's activations in each layer of this rank: of the inputs and
    the outputs of its matrices."""
    return [
        sum(size * sum(1 / side for side in one.shape[-2:]) for one, size in _matrices(*pair))
        for pair in layers_with_configs(model)
    ]


def layers_with_configs(model: HybridModel) -> list[tuple[nn.Module, HybridConfig]]:
    """Pair each layer of this pipeline stage with its config."""
    numbered = enumerate(model.decoder.layers, start=model.layer_offset + 1)
    return [(layer, model.config.for_layer(number)) for number, layer in numbered]


def _matrices(
    module: nn.Module, config: HybridConfig, tokens_of_ranks: float = 1.0
) -> Iterator[tuple[nn.Parameter | PackedWeight, float]]:
    """Yield the weights, and how many of their elements are applied to a token.

    Args:
        tokens_of_ranks: tokens that come to experts, by those of this rank.
    """
    for name, parameter in named_weights(module):
        is_matrix = parameter.dim() == 2
        if is_matrix and separate_expert(name) is None:
            yield parameter, parameter.numel()
        elif is_matrix or (parameter.dim() == 3 and parameter.shape[1] > 1):  # no convolution's
            share = tokens_of_ranks * config.moe_router_topk / config.num_moe_experts
            yield parameter, parameter.numel() * share


def _attention(
    model: HybridModel, layers: Iterable[tuple[nn.Module, HybridConfig]]
) -> Iterator[tuple[KVShape, float]]:
    """See `attention_flops`."""
    for layer, config in layers:
        if (kv := layer.cache_requirements().kv) is not None:
            heads = config.num_attention_heads // model.pg_collection.tp.size()
            heads *= config.softmaxes_per_head
            yield kv, heads * (kv.head_dim + (kv.value_dim or kv.head_dim))


def _full_attention(model: HybridModel, layers: Iterable[tuple[nn.Module, HybridConfig]]) -> float:
    """Count the multiplications of full attention per pair of tokens."""
    return float(sum(size for kv, size in _attention(model, layers) if not kv.is_local))
