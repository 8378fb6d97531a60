"""StepFun's Step 3 (text): queries of low rank over one key/value head, and experts with a shared
one (arXiv 2507.19427; MFA: 2412.19255). transformers has no class for it: names as in vLLM. Step
3.5 and 3.7 (text): more heads in windows, a gate for each, and limits of activations."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.deepseek_v3 import DeepseekV3
from megatron_hybrid.checkpoints.huggingface.layouts import joined
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_KEYS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "moe_router_scaling_factor": "routed_scaling_factor",
}
"""Keys of StepFun's files -> those of transformers, or of DeepSeek-V3."""
_QUERIES = {"linear_q_down_proj": "q_proj", "latent_norm": "inter_norm", "linear_q_up_proj": "wq"}


def _attention(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    keys_values = f"{theirs}.k_proj.weight", f"{theirs}.v_proj.weight"
    yield TensorMap((f"{ours}.linear_qkv.weight",), keys_values, joined((config.kv_channels,) * 2))
    yield from tensors.weights(ours, theirs, {**_QUERIES, "linear_proj": "o_proj"})


class Step3(Adapter):
    """`Step3TextForCausalLM`, and the language model of `Step3VLForConditionalGeneration`."""

    model_types = ("step3_text",)
    composite_types = ("step3_vl",)
    names = TensorNames(
        {
            **tensors.TRANSFORMER,
            "*": ("self_attn", _attention),
            "E": ("", tensors.moe_by_projection),
        }
    )
    ignored = (r"(vision_model|vit_downsampler2?|vit_large_projector)\..*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, num_attention_groups=1)
        left_out = {"head_dim": 256, "rms_norm_eps": 1e-5, "moe_layers_enum": [*range(4, 60)]}
        hf = fields.renamed({"num_attention_groups": 1, **left_out, **hf}, _KEYS)
        return {
            **fields.transformer(hf, mlps=fields.enumerated_mlps(hf), base=500000.0),
            "query_rank": hf.get("share_q_dim", 2048) or hf["head_dim"],
            **fields.experts(hf, 48, 3, "moe_intermediate_size"),
            "moe_router_pre_softmax": not hf.get("norm_expert_weight", False),
            "moe_shared_expert_intermediate_size": hf.get("share_expert_dim", 5120),
        }


_LEFT_OUT = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_LEFT_OUT |= {"n_routed_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 1280}
_LISTS = ("rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")
_FORM = dict.fromkeys(("attention_output_gate", "attention_head_gate", "qk_layernorm"), True)
_FORM |= {"layernorm_zero_centered_gamma": True, "activation_clamp_after": True}


class Step3p5(DeepseekV3):
    """`Step3p5ForCausalLM`, and in `Step3p7ForConditionalGeneration`. MTP layers are not read."""

    model_types = ("step3p5",)
    composite_types = ("step3p7",)
    reads_predictions = False
    names = TensorNames({**tensors.TRANSFORMER, "E": ("", tensors.moe_by_projection)})
    module_names = ((r"\.share_expert\b", ".mlp.shared_experts"), (r"\.moe\b", ".mlp"))
    ignored = (r"(vision_model|vit_large_projector)\..*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = fields.renamed({**_LEFT_OUT, **hf}, _KEYS)
        fields.only(hf, attention_bias=False, mlp_bias=False, use_head_wise_attn_gate=True)
        fields.only(hf, moe_router_activation="sigmoid", use_moe_router_bias=True)
        fields.only(hf, norm_expert_weight=True, use_qk_norm=True, use_rope_layers=(None, []))
        fields.only(hf, yarn_only_types=(None, ["full_attention"]))
        bases, factors, limits, shared = (fields.of_each_layer(hf, key) for key in _LISTS)
        kinds, mlps = fields.required(hf, "layer_types")[: len(limits)], fields.enumerated_mlps(hf)
        mixers = fields.symbols_of(kinds, fields.WINDOW_SYMBOLS, len(limits))
        others = hf.get("attention_other_setting") or {}
        fields.only(others, num_attention_groups=hf["num_key_value_heads"], head_dim=hf["head_dim"])
        found = fields.transformer({**hf, **fields.WITHOUT_ROPE}, mixers, mlps)
        heads = hf.get("num_sliding_attention_heads") or others.get("num_attention_heads")
        heads = {"num_attention_heads": heads or hf["num_attention_heads"]}
        own = {i: heads for i, symbol in enumerate(mixers) if symbol == "W"}
        given = {int(i): each for i, each in (hf.get("per_layer_config") or own).items()}
        fields.only({"per_layer_config": given}, per_layer_config=own)
        overrides = found["layer_overrides"]
        for i, (kind, base) in enumerate(zip(kinds, bases)):
            rope = {**hf, "rope_theta": base}, kind, ("rope_theta", 10000.0)
            rotary = fields.rotary_of_type(*rope, partial_rotary_factor=factors[i])
            overrides[str(2 * i + 1)] = rotary | own.get(i, {})
            limit = (limits if mlps[i] == "E" else shared)[i] or None
            clamps = {"moe_shared_expert_clamp_value": shared[i] or 0.0}
            if limits[i] or shared[i]:
                overrides[str(2 * i + 2)] = {"activation_func_clamp_value": limit, **clamps}
        if "E" in mlps:
            found |= fields.grouped_experts(hf)
            found["moe_shared_expert_intermediate_size"] = hf.get("share_expert_dim", 1280)
        scale = hf.get("query_pre_attn_scalar") or hf["head_dim"]
        return {**found, **_FORM, "softmax_scale": scale**-0.5}
