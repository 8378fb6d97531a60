"""MiniMax-M2: full attention and experts, chosen by sigmoid scores and a bias that only selects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, Shapes, TensorMap, TensorNames
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class MiniMaxM2(Adapter):
    """`MiniMaxM2ForCausalLM`."""

    model_types = ("minimax_m2",)
    names = TensorNames(
        {
            "*": ("self_attn", tensors.attention),
            "E": (
                "block_sparse_moe",
                partial(
                    tensors.moe,
                    expert_bias="e_score_correction_bias",
                    projections=("w1", "w3", "w2"),
                ),
            ),
        }
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(
            hf,
            scoring_func="sigmoid",
            use_routing_bias=True,
            use_qk_norm=True,
            qk_norm_type="per_layer",
            shared_intermediate_size=0,
            router_jitter_noise=0.0,
            sliding_window=None,
            layernorm_full_attention_beta=1,
            layernorm_mlp_beta=1,
        )
        for kind in hf.get("attn_type_list") or ():
            fields.only({"attn_type_list": kind}, attn_type_list=1)  # 0 is linear attention
        topk = hf.get("num_experts_per_tok", 8)
        fields.check_sigmoid_topk(topk)
        hf = {"head_dim": 128, "num_key_value_heads": 8, **hf}
        if (rotary_dim := hf.get("rotary_dim")) is not None:
            width = fields.attention(hf)["kv_channels"]
            hf = {"partial_rotary_factor": rotary_dim / width, **hf}
        mlps = "E" * fields.required(hf, "num_hidden_layers")
        return {
            **fields.transformer(hf, mlps=mlps, base=5000000.0, partial=True),
            "qk_layernorm": True,
            "qk_layernorm_scope": "all_heads",
            "num_moe_experts": hf.get("num_local_experts", 256),
            "moe_router_topk": topk,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_ffn_hidden_size": fields.required(hf, "intermediate_size"),
        }

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
        """See `Adapter.as_found`: of what packages of quantization write, some has the names of
        transformers' modules, for the block, for the projections, or for both."""
        if tensor_map.theirs[0] in shapes:
            return tensor_map
        for block, projections in product(_BLOCKS, (_PROJECTIONS, {})):
            theirs = tuple(
                ".".join(projections.get(part, part) for part in name.split("."))
                for name in (each.replace(_BLOCKS[0], block) for each in tensor_map.theirs)
            )
            if theirs[0] in shapes:
                return TensorMap(tensor_map.ours, theirs, tensor_map.layout)
        return tensor_map


_BLOCKS = (".block_sparse_moe.", ".mlp.")
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
