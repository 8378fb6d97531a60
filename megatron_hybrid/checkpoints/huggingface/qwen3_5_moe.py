"""Qwen3.5 with experts; else as `qwen3_5`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import required
from megatron_hybrid.checkpoints.huggingface.qwen3_5 import Qwen35
from megatron_hybrid.checkpoints.huggingface.tensors import same
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class Qwen35Moe(Qwen35):
    """`Qwen3_5MoeForCausalLM`, and the language model of `Qwen3_5MoeForConditionalGeneration`."""

    model_types = ("qwen3_5_moe_text",)
    composite_types = ("qwen3_5_moe",)
    key_value_heads = 2
    """Defaults of fields that config.json leaves out."""

    def as_found(
        self, tensor_map: TensorMap, config: HybridConfig, shapes: Mapping[str, tuple[int, ...]]
    ) -> TensorMap:
        """See `Adapter.as_found`: the released folders have the experts of a layer in two tensors,
        as they are here; transformers writes them one by one."""
        experts, found, _ = tensor_map.theirs[0].partition(".experts.0.")
        if found:
            kind = (
                "gate_up_proj" if len(tensor_map.theirs) > config.num_moe_experts else "down_proj"
            )
            if (stacked := f"{experts}.experts.{kind}") in shapes:
                return same(tensor_map.ours[0], stacked)
        return tensor_map

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        return "E" * required(hf, "num_hidden_layers")

    def _mlp_fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "num_moe_experts": hf.get("num_experts", 256),
            "moe_router_topk": hf.get("num_experts_per_tok", 8),
            "moe_ffn_hidden_size": hf.get("moe_intermediate_size", 512),
            "moe_shared_expert_intermediate_size": hf.get("shared_expert_intermediate_size", 512),
            "moe_shared_expert_gate": True,
        }


ADAPTER = Qwen35Moe()
