"""The classes of a layer's parts: `local` (plain torch) or `transformer_engine` (fused)."""

from dataclasses import dataclass
from pkgutil import resolve_name

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import nn

from megatron_hybrid import compat
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import LAYER_KINDS
from megatron_hybrid.models.mixers.base import Mixer, MixerSubmodules
from megatron_hybrid.models.mixers.projections import LocalColumnLinear, LocalRowLinear
from megatron_hybrid.models.norms import LocalNorm
from megatron_hybrid.utils.registry import check_call, check_class


@dataclass(frozen=True)
class LayerSpec:
    """Classes of a layer's parts. A norm is an identity if `norm_placement` has none there; the
    first one also if the mixer's input projection normalises."""

    norm: type
    mixer: type[Mixer]
    submodules: MixerSubmodules
    post_norm: type


def resolve_layer_spec(config: HybridConfig) -> str:
    """Choose `local` or `transformer_engine` for a config with `auto`.

    Transformer Engine runs on CUDA only, so the device on which the model is built decides.
    """
    if config.layer_spec != "auto":
        return config.layer_spec
    on_cuda = not config.use_cpu_initialization or torch.get_default_device().type == "cuda"
    return "transformer_engine" if on_cuda and compat.have_transformer_engine() else "local"


def get_norm(config: HybridConfig) -> type:
    """Choose the class of every norm of hidden states.

    Raises:
        ImportError: `transformer_engine` is required and not installed.
    """
    if resolve_layer_spec(config) == "transformer_engine" and not _lacks_bias(config):
        return compat.transformer_engine_modules().TENorm
    return LocalNorm


def build_norm(
    config: HybridConfig, size: int | None = None, eps: float | None = None
) -> nn.Module:
    """Build a norm of hidden states. The size of the normed dimension is hidden_size by default,
    and eps the config's."""
    eps = config.layernorm_epsilon if eps is None else eps
    return get_norm(config)(config=config, hidden_size=size or config.hidden_size, eps=eps)


def _lacks_bias(config: HybridConfig) -> bool:
    """Return whether the norms are LayerNorms without a bias, which Transformer Engine has not."""
    return config.normalization == "LayerNorm" and not config.layernorm_bias


def get_mixer(symbol: str) -> type[Mixer]:
    """Import the class of the mixer of a pattern symbol.

    Raises:
        TypeError: it is no mixer, or does not take what a mixer is called with.
    """
    mixer, what = resolve_name(LAYER_KINDS[symbol].mixer), f"the mixer of the layer kind {symbol!r}"
    check_class(what, mixer, Mixer, "config", "place")
    if not issubclass(mixer, Mixer):
        raise TypeError(f"{what} is {mixer}; it must derive from {Mixer}")
    inputs = ("stack_inputs",) if mixer.takes_stack_inputs else ()
    check_call(what, mixer.forward, "self", "hidden_Th", "context", *inputs)
    return mixer


def get_layer_spec(config: HybridConfig, symbol: str) -> LayerSpec:
    """Choose the classes of the layer of a pattern symbol.

    Args:
        config: that of the layer, `HybridConfig.for_layer`.
        symbol: of the layer pattern.

    Raises:
        ImportError: `transformer_engine` is required and not installed.
    """
    mixer, norm = get_mixer(symbol), get_norm(config)
    pre_norm = IdentityOp if config.norm_placement == "post" or mixer.norms_input else norm
    parts = MixerSubmodules(LocalColumnLinear, LocalColumnLinear, LocalRowLinear)
    if resolve_layer_spec(config) == "transformer_engine":
        te = compat.transformer_engine_modules()
        # A projection of all of the layer's input normalises it itself.
        fused = mixer.input_projection is not None and config.norm_placement in ("pre", "sandwich")
        fused = fused and not _lacks_bias(config)
        fused = fused and config.residual_rank is None and config.query_rank is None
        column, row = te.TEColumnParallelLinear, te.TERowParallelLinear
        first = te.TELayerNormColumnParallelLinear if fused else column
        parts = MixerSubmodules(input_projection=first, column=column, row=row)
        pre_norm = IdentityOp if fused else pre_norm
    post_norm = norm if config.norm_placement in ("post", "sandwich") else IdentityOp
    return LayerSpec(pre_norm, mixer, parts, post_norm)
