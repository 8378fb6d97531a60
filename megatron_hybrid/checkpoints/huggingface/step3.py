"""StepFun's Step 3 (text): queries of low rank over one key/value head, and experts with a shared
one (arXiv 2507.19427; MFA: 2412.19255). transformers has no class for it: names as in vLLM."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined
from megatron_hybrid.models.config.hybrid_config import HybridConfig

KEYS = {
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
        hf = fields.renamed({"num_attention_groups": 1, **left_out, **hf}, KEYS)
        return {
            **fields.transformer(hf, mlps=fields.enumerated_mlps(hf), base=500000.0),
            "query_rank": hf.get("share_q_dim", 2048) or hf["head_dim"],
            **fields.experts(hf, 48, 3, "moe_intermediate_size"),
            "moe_router_pre_softmax": not hf.get("norm_expert_weight", False),
            "moe_shared_expert_intermediate_size": hf.get("share_expert_dim", 5120),
        }
