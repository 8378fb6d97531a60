"""StepFun's Step 3.5, and the language model of Step 3.7: more heads in windows than in full
attention, each with a gate, and limits of activations."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.deepseek_v3 import DeepseekV3
from megatron_hybrid.checkpoints.huggingface.layouts import joined, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_NEWER = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
}
"""Keys of released files -> those of transformers."""
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 288,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
}
_LISTS = ("rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")


def _experts(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    names = {"router": "moe.gate", "expert_bias": "moe.router_bias", "shared": "share_expert"}
    yield from tensors.moe(config, ours, theirs, projections=None, **names)
    width, fc1 = config.moe_ffn_hidden_size, f"{ours}.experts.linear_fc1.weight"
    gate_and_up = f"{theirs}.moe.gate_proj.weight", f"{theirs}.moe.up_proj.weight"
    yield TensorMap((fc1,), gate_and_up, joined((width, width), 1))
    yield same(f"{ours}.experts.linear_fc2.weight", f"{theirs}.moe.down_proj.weight")


class Step3p5(DeepseekV3):
    """`Step3p5ForCausalLM`, and the language model of `Step3p7ForConditionalGeneration`. Their MTP
    layers are not read."""

    model_types = ("step3p5",)
    composite_types = ("step3p7",)
    names = TensorNames({**tensors.TRANSFORMER, "E": ("", _experts)})
    module_names = ((r"\.share_expert\b", ".mlp.shared_experts"), (r"\.moe\b", ".mlp"))
    ignored = (r"(vision_model|vit_large_projector)\..*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {**_DEFAULTS, **hf, **{new: hf[old] for old, new in _NEWER.items() if old in hf}}
        fields.only(hf, attention_bias=False, mlp_bias=False, use_head_wise_attn_gate=True)
        fields.only(hf, moe_router_activation="sigmoid", use_moe_router_bias=True)
        fields.only(hf, norm_expert_weight=True, use_qk_norm=True, use_rope_layers=(None, []))
        fields.only(hf, yarn_only_types=(None, ["full_attention"]))
        bases, factors, limits, shared = (fields.of_each_layer(hf, key) for key in _LISTS)
        kinds = fields.required(hf, "layer_types")[: len(limits)]
        mixers = fields.symbols_of(kinds, fields.WINDOW_SYMBOLS, len(limits))
        mlps = _mlps(hf, len(limits))
        others = hf.get("attention_other_setting") or {}
        fields.only(others, num_attention_groups=hf["num_key_value_heads"], head_dim=hf["head_dim"])
        heads = hf.get("num_sliding_attention_heads") or others.get("num_attention_heads")
        heads = {"num_attention_heads": heads or fields.required(hf, "num_attention_heads")}
        own = {i: heads for i, symbol in enumerate(mixers) if symbol == "W"}
        given = {int(i): each for i, each in (hf.get("per_layer_config") or own).items()}
        fields.only({"per_layer_config": given}, per_layer_config=own)
        overrides = {}
        for i, kind in enumerate(kinds):
            given = {**hf, "rope_theta": bases[i]}, kind, ("rope_theta", 10000.0)
            rotary = fields.rotary_of_type(*given, partial_rotary_factor=factors[i])
            overrides[str(2 * i + 1)] = rotary | own.get(i, {})
            if limits[i] or shared[i]:
                limit = (limits if mlps[i] == "E" else shared)[i]
                overrides[str(2 * i + 2)] = {
                    "activation_func_clamp_value": limit or None,
                    "moe_shared_expert_clamp_value": shared[i] or 0.0,
                }
        found = {
            **fields.transformer({**hf, **fields.WITHOUT_ROPE}, "".join(mixers), mlps),
            "layer_overrides": overrides,
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": True,
            "softmax_scale": (hf.get("query_pre_attn_scalar") or hf["head_dim"]) ** -0.5,
            "attention_output_gate": True,
            "attention_head_gate": True,
            "activation_clamp_after": True,
        }
        if "E" in mlps:
            scale = hf["moe_router_scaling_factor"]
            experts = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": scale}
            found |= self._experts({**hf, **experts}, mlps)
            found["moe_shared_expert_intermediate_size"] = hf["share_expert_dim"]
        return found

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        return ""


def _mlps(hf: Mapping[str, Any], number: int) -> str:
    """- or E for each of their layers."""
    if (types := hf.get("mlp_layer_types")) is not None:
        return fields.dense_mlps_first({**hf, "mlp_layer_types": types[:number]}, 0)
    given = hf.get("moe_layers_enum")  # "3,4,5" or [3, 4, 5]
    sparse = range(3, number) if given is None else [*map(int, re.findall(r"\d+", str(given)))]
    return "".join("E" if i in sparse else "-" for i in range(number))
