"""The output norms of Gated DeltaNet, whose factor core stores as it stores those of all norms.

With `layernorm_zero_centered_gamma` core adds 1 to the weight of each norm. Qwen3-Next and Qwen3.5
do so everywhere but here: their weights lie in a folder of Megatron less 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from megatron_hybrid.checkpoints.huggingface.layouts import Layout
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_FIELD = "linear_norm_zero_centered_gamma"
_KIND = "G"


def with_gammas_of_core(config: HybridConfig) -> HybridConfig:
    """The config of the same model with all norms centered alike."""
    if _KIND not in config.symbols:
        return config
    overrides = {
        layers: {name: value for name, value in fields.items() if name != _FIELD}
        for layers, fields in config.layer_overrides.items()
    }
    return replace(config, layer_overrides=overrides, **{_FIELD: None})


def shifted_gammas(stored: HybridConfig, wanted: HybridConfig) -> dict[str, Layout]:
    """How weights of the same model differ by name, from a stored config to a wanted one."""
    pairs = zip(_centerings(stored), _centerings(wanted), strict=True)
    return {
        name: _shift(float(was) - float(is_now))
        for (name, was), (_, is_now) in pairs
        if was != is_now
    }


def _centerings(config: HybridConfig) -> Iterator[tuple[str, bool]]:
    """Each norm, and whether its factor is 1 + weight."""
    layers = [
        (f"decoder.layers.{i}", symbol, config.for_layer(i + 1))
        for i, symbol in enumerate(config.pattern.symbols)
    ]
    layers += [
        (f"mtp.layers.{part}.mtp_model_layer.layers.{i}", symbol, config.for_prediction(symbol))
        for part, symbols in enumerate(config.pattern.predictions)
        for i, symbol in enumerate(symbols)
    ]
    for path, symbol, layer in layers:
        if symbol == _KIND:
            own = getattr(layer, _FIELD)
            is_centered = layer.layernorm_zero_centered_gamma if own is None else own
            yield f"{path}.self_attention.out_norm.weight", is_centered


def _shift(offset: float) -> Layout:
    """A layout that adds a number, in fp32."""

    def add(weight: Tensor, number: float) -> list[Tensor]:
        return [(weight.float() + number).to(weight.dtype)]

    return Layout(lambda theirs: add(theirs[0], offset), lambda ours: add(ours[0], -offset))
