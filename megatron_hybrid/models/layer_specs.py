"""Which classes a layer is built of: `local` (plain torch) or `transformer_engine` (fused)."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from megatron_hybrid import compat
from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.hybrid_stack import HybridLayer, HybridLayerSubmodules
from megatron_hybrid.models.mixers.attention import AttentionMixer, AttentionSubmodules
from megatron_hybrid.models.mixers.gated_delta_net import (
    GatedDeltaNetMixer,
    GatedDeltaNetSubmodules,
)
from megatron_hybrid.models.mixers.mamba2 import Mamba2Mixer, Mamba2Submodules
from megatron_hybrid.models.mixers.mlp import MLPMixer


class LocalNorm:
    """megatron-core's torch norm, with its weights in `params_dtype` (core leaves them in fp32)."""

    def __new__(cls, config: HybridConfig, hidden_size: int, eps: float) -> nn.Module:
        norm = WrappedTorchNorm(config=config, hidden_size=hidden_size, eps=eps)
        return norm.to(config.params_dtype)


def resolve_layer_spec(config: HybridConfig) -> str:
    """`local` or `transformer_engine`, where the config says `auto`.

    Transformer Engine runs on CUDA alone, so what counts is where the model is being built.
    """
    if config.layer_spec != "auto":
        return config.layer_spec
    on_cuda = not config.use_cpu_initialization or torch.get_default_device().type == "cuda"
    return "transformer_engine" if on_cuda and compat.have_transformer_engine() else "local"


def get_hybrid_layer_specs(config: HybridConfig) -> dict[str, ModuleSpec]:
    """The layer of each pattern symbol, and under `norm` the class of the final norm.

    Raises:
        ImportError: `transformer_engine` is asked for and not installed.
    """
    if resolve_layer_spec(config) == "transformer_engine":
        te = compat.transformer_engine_modules()
        # The projection normalises its own input, so the layer has no norm of its own.
        return _specs(
            config,
            layer_norm=IdentityOp,
            norm=te.TENorm,
            column=te.TELayerNormColumnParallelLinear,
            row=te.TERowParallelLinear,
        )
    return _specs(
        config,
        layer_norm=LocalNorm,
        norm=LocalNorm,
        column=ColumnParallelLinear,
        row=RowParallelLinear,
    )


def _specs(
    config: HybridConfig, layer_norm: type, norm: type, column: type, row: type
) -> dict[str, ModuleSpec]:
    head_norm = norm if config.qk_layernorm else None
    attention_modules = AttentionSubmodules(
        linear_qkv=column, linear_proj=row, q_layernorm=head_norm, k_layernorm=head_norm
    )

    def layer(norm_name: str, mixer_name: str, mixer: ModuleSpec) -> ModuleSpec:
        # The names are those that the layer kinds have in megatron-core.
        return ModuleSpec(
            module=HybridLayer,
            params={"norm_name": norm_name, "mixer_name": mixer_name},
            submodules=HybridLayerSubmodules(norm=layer_norm, mixer=mixer),
        )

    def attention(windowed: bool) -> ModuleSpec:
        return layer(
            "input_layernorm",
            "self_attention",
            ModuleSpec(
                module=AttentionMixer,
                params={"windowed": windowed},
                submodules=attention_modules,
            ),
        )

    return {
        "M": layer(
            "norm",
            "mixer",
            ModuleSpec(
                module=Mamba2Mixer, submodules=Mamba2Submodules(in_proj=column, out_proj=row)
            ),
        ),
        "G": layer(
            "input_layernorm",
            "self_attention",
            ModuleSpec(
                module=GatedDeltaNetMixer,
                submodules=GatedDeltaNetSubmodules(in_proj=column, out_norm=norm, out_proj=row),
            ),
        ),
        "*": attention(windowed=False),
        "W": attention(windowed=True),
        "-": layer(
            "pre_mlp_layernorm",
            "mlp",
            ModuleSpec(
                module=MLPMixer, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)
            ),
        ),
        "norm": ModuleSpec(module=norm),
    }
