"""Mamba-1, FalconMamba, which norms dt, B and C, and Mamba-2: nothing but such layers. Jamba,
Bamba and Falcon-H1: such layers and attention, each followed by an MLP or experts."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SILU = ("silu", "swish")
"""The one activation of convolutions: that of MLPs is it, too."""


class Mamba(Adapter):
    """`MambaForCausalLM` and `FalconMambaForCausalLM`."""

    model_types = ("mamba", "falcon_mamba")
    names = TensorNames(
        {"S": ("mixer", tensors.mamba1), "M": ("mixer", tensors.mamba2)},
        norms=("norm",),
        layers="backbone.layers",
        embedding="backbone.embeddings.weight",
        final_norm="backbone.norm_f.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.config`. `residual_in_fp32` is how transformers adds up in half precision;
        here the residual stream has the dtype of the model."""
        hf = {"tie_word_embeddings": True, **hf}
        norm = "weightless" if hf["model_type"] == "falcon_mamba" else "none"
        return {
            **_model(hf, "S"),
            **fields.mamba1(fields.renamed(hf, fields.OF_MAMBA), hf.get("intermediate_size")),
            "mamba1_norm": norm,
            "mamba1_norm_epsilon": hf.get("mixer_rms_eps", 1e-6),
        }


class Mamba2(Mamba):
    model_types = ("mamba2",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        found = _model(hf, "M")
        keys = {"head_dim": "mamba_d_head", **fields.OF_MAMBA}
        sizes = {"head_dim": 64, "n_groups": 8, "state_size": 128}
        hf = {"mamba_n_heads": fields.required(hf, "num_heads"), **sizes, **hf}
        hf = fields.renamed(hf, keys)
        return {**found, **fields.mamba2(hf, found["layernorm_epsilon"])}


def _model(hf: Mapping[str, Any], symbol: str) -> dict[str, Any]:
    """Read a model of one kind of layers."""
    fields.only(hf, hidden_act=_SILU)
    hf = {"layer_norm_epsilon": 1e-5, "initializer_range": 0.1, **hf}
    layers = fields.required(hf, "num_hidden_layers")
    return {**fields.model(hf, "layer_norm_epsilon"), "layer_pattern": symbol * layers}


def _parallel_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    yield from tensors.attention(config, f"{ours}.attention", f"{theirs}.self_attn")
    yield from tensors.mamba2(config, f"{ours}.mamba", f"{theirs}.mamba")


_HYBRID_NAMES = TensorNames(
    {
        "S": ("mamba", tensors.mamba1),
        "M": ("mamba", tensors.mamba2),
        "*": ("self_attn", tensors.attention),
        "H": ("", _parallel_tensors),
        "-": ("feed_forward", tensors.mlp),
        "E": ("feed_forward", partial(tensors.moe, router="router")),
    },
    norms=("input_layernorm", "pre_ff_layernorm"),
    final_norm="model.final_layernorm.weight",
)


class Jamba(Adapter):
    """`JambaForCausalLM`: Mamba-1 and attention layers, each with an MLP or experts."""

    model_types = ("jamba",)
    names = _HYBRID_NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, hidden_act=_SILU, mamba_inner_layernorms=True, sliding_window=None)
        mixers = _periodic(hf, "attn_layer", 8, 4, "S*")
        mlps = _periodic(hf, "expert_layer", 2, 1, "-E" if hf.get("num_experts", 16) > 1 else "--")
        found = {
            **fields.transformer({"num_key_value_heads": 8, **hf}, mixers, mlps),
            "position_embedding_type": "none",
            **fields.mamba1(hf),
            "mamba1_norm": "weighted",
            "mamba1_norm_epsilon": hf.get("rms_norm_eps", 1e-6),
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
        }
        if "E" in mlps:
            found |= {**fields.experts(hf, 16, 2), "moe_router_pre_softmax": True}
        return found


def _periodic(hf: Mapping[str, Any], name: str, period: int, offset: int, symbols: str) -> str:
    """Return the second symbol for layer `<name>_offset` and every `<name>_period`-th after it, the
    first one for others."""
    period, offset = hf.get(f"{name}_period", period), hf.get(f"{name}_offset", offset)
    layers = range(fields.required(hf, "num_hidden_layers"))
    return "".join(symbols[i % period == offset] for i in layers)


class Bamba(Adapter):
    """`BambaForCausalLM`: Mamba-2 and attention layers, each with a gated MLP."""

    model_types = ("bamba",)
    names = _HYBRID_NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"num_key_value_heads": 8, "partial_rotary_factor": 0.5}
        hf = {"rms_norm_eps": 1e-5, **left_out, **hf}
        fields.only(hf, hidden_act=_SILU)
        attention = hf.get("attn_layer_indices") or ()
        numbers = range(fields.required(hf, "num_hidden_layers"))
        mixers = "".join("*" if i in attention else "M" for i in numbers)
        found = {
            **fields.transformer(hf, mixers, partial=True, **fields.biases(hf)),
            **fields.mamba2(hf, hf["rms_norm_eps"]),
        }
        if (rotary_dim := hf.get("attn_rotary_emb")) is not None:
            # The released files' own key; transformers passes over it and rotates half.
            found["rotary_percent"] = rotary_dim / found["kv_channels"]
        return found


class FalconH1(Adapter):
    """`FalconH1ForCausalLM`: attention and Mamba-2 side by side in each layer, then a gated MLP."""

    model_types = ("falcon_h1",)
    names = _HYBRID_NAMES

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "num_key_value_heads": 8, **hf}
        fields.only(hf, hidden_act=_SILU, attn_layer_indices=None, mamba_use_mlp=True)
        # Biases of the projections into and out of the Mamba-2 part.
        fields.only(hf, projectors_bias=hf.get("mamba_proj_bias", False))
        gate, down = hf.get("mlp_multipliers") or (1.0, 1.0)
        form = "norm_first" if hf.get("mamba_norm_before_gate", True) else "gate_first"
        found = fields.transformer(hf, "H" * fields.required(hf, "num_hidden_layers"))
        return {
            **found,
            **fields.mamba2(hf, hf["rms_norm_eps"]),
            "layer_overrides": {"H": {"add_bias_linear": hf.get("attention_bias", False)}},
            "embedding_multiplier": hf.get("embedding_multiplier", 1.0),
            "logits_multiplier": hf.get("lm_head_multiplier", 1.0),
            # A factor of the keys is one of the scores.
            "softmax_scale": hf.get("key_multiplier", 1.0) * found["kv_channels"] ** -0.5,
            "attention_input_multiplier": hf.get("attention_in_multiplier", 1.0),
            "attention_output_multiplier": hf.get("attention_out_multiplier", 1.0),
            "mamba_input_multiplier": hf.get("ssm_in_multiplier", 1.0),
            "mamba_output_multiplier": hf.get("ssm_out_multiplier", 1.0),
            "mamba_section_multipliers": hf.get("ssm_multipliers") or [1.0] * 5,
            "mamba_gated_norm": form if hf.get("mamba_rms_norm", False) else "none",
            "add_bias_linear": hf.get("mlp_bias", False),
            "mlp_gate_multiplier": gate,
            "mlp_output_multiplier": down,
        }
