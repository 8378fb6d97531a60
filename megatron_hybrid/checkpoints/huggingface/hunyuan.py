"""Hunyuan: Llama with norms of queries and keys after RoPE; an MLP, or experts and a shared one."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorNames

_attention = partial(tensors.attention, norms=("query_layernorm", "key_layernorm"))
_moe = partial(tensors.moe, router="gate.wg", shared="shared_mlp")


def _alike(hf: Mapping[str, Any], key: str, default: int) -> int:
    """Return a number, which a file may say again for each layer."""
    given = hf.get(key, default)
    numbers = set(given if isinstance(given, list) else [given])
    if len(numbers) != 1:
        raise ValueError(f"config.json has {key}={given!r}; all layers must have the same number")
    return numbers.pop()


class Hunyuan(Adapter):
    """`HunYuanDenseV1ForCausalLM` and `HunYuanMoEV1ForCausalLM`."""

    model_types = ("hunyuan_v1_dense", "hunyuan_v1_moe")
    names = TensorNames(
        {"*": ("self_attn", _attention), "-": ("mlp", tensors.mlp), "E": ("mlp", _moe)}
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, use_qk_norm=True, use_cla=False, mlp_bias=False, moe_layer_num_skipped=0)
        hf = {"rms_norm_eps": 1e-5, **hf}
        rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        if rope.get("alpha") and "dynamic" in (rope.get("type"), rope.get("rope_type")):
            # NTK-aware scaling with a fixed factor: the base alone is another one.
            dim = fields.attention(hf)["kv_channels"]
            base = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
            hf = {**hf, "rope_theta": base * rope["alpha"] ** (dim / (dim - 2))}
            hf |= {"rope_scaling": None, "rope_parameters": None}
        has_experts = hf["model_type"] == "hunyuan_v1_moe"
        mlps = "E" * fields.required(hf, "num_hidden_layers") if has_experts else None
        bias = hf.get("attention_bias")
        found = fields.transformer(hf, mlps=mlps, attention_bias=bias)
        found |= {"qk_layernorm": True, "qk_layernorm_after_rope": True}
        if not has_experts:
            return found
        width = fields.required(hf, "intermediate_size")
        fields.only({"width": _alike(hf, "moe_intermediate_size", width)}, width=width)
        return {
            **found,
            "num_moe_experts": hf.get("num_experts", 1),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": _alike(hf, "num_shared_expert", 1) * width,
            "moe_router_topk": _alike(hf, "moe_topk", 1),
        }
