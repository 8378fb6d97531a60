"""Llama 4 (text): attention in chunks with RoPE, in full without; experts, one for each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import same, transposed
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def _moe_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    names = {"router": "router", "shared": "shared_expert"}
    yield from tensors.moe(config, ours, theirs, projections=None, **names)
    for own, name in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
        weight = f"{ours}.experts.linear_{own}.weight"
        yield same(weight, f"{theirs}.experts.{name}", transposed())


class Llama4(Adapter):
    """`Llama4ForCausalLM`, and the language model of `Llama4ForConditionalGeneration`."""

    model_types = ("llama4_text",)
    names = TensorNames(
        {
            **dict.fromkeys("*L", ("self_attn", tensors.attention)),
            "-": ("feed_forward", tensors.mlp),
            "E": ("feed_forward", _moe_tensors),
        }
    )
    composite_types = ("llama4",)
    stacks_experts = True
    ignored = (r".*\.rotary_emb\.inv_freq", r"(vision_model|multi_modal_projector)\..*")

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, attention_bias=False)
        without_rope = {"position_embedding_type": "none", "qk_l2_norm": False}
        if hf.get("attn_temperature_tuning", True):
            without_rope["attention_temperature_scale"] = hf.get("attn_scale", 0.1)
            without_rope["attention_temperature_floor"] = hf.get("floor_scale", 8192)
        width = fields.required(hf, "intermediate_size")
        mixers, mlps = _layers(hf)
        hf = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, **hf}
        return {
            **fields.transformer(hf, mixers, mlps, base=500000.0),
            "layer_overrides": {"*": without_rope} if "*" in mixers else {},
            "attention_chunk_size": hf.get("attention_chunk_size", 8192),
            "rotary_interleaved": True,
            "qk_l2_norm": hf.get("use_qk_norm", True),
            "ffn_hidden_size": hf.get("intermediate_size_mlp", 16384),
            "num_moe_experts": hf.get("num_local_experts", 16),
            "moe_router_topk": hf.get("num_experts_per_tok", 1),
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width,
        }


def _layers(hf: Mapping[str, Any]) -> tuple[str, str]:
    """Chunks where there is RoPE, and experts in every `interleave_moe_layer_step`th layer."""
    layers = fields.required(hf, "num_hidden_layers")
    interval, step = hf.get("no_rope_layer_interval", 4), hf.get("interleave_moe_layer_step", 1)
    has_rope = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    experts = hf.get("moe_layers")
    if experts is None:
        experts = range(step - 1, layers, step)
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope[:layers]]
    if (given := hf.get("layer_types")) and list(given) != types:
        raise ValueError(
            f"config.json has layer_types={given} and no_rope_layers={has_rope}; only layers with "
            "RoPE in chunks and layers without RoPE in full are supported"
        )
    mlps = "".join("E" if i in experts else "-" for i in range(layers))
    return "".join("L" if rope else "*" for rope in has_rope[:layers]), mlps
