"""Qwen3.5: Gated DeltaNet and gated attention, text alone or with vision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import only, required
from megatron_hybrid.checkpoints.huggingface.layouts import joined
from megatron_hybrid.checkpoints.huggingface.qwen3_next import Qwen3Next
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class Qwen35(Qwen3Next):
    """`Qwen3_5ForCausalLM`, and the language model of `Qwen3_5ForConditionalGeneration`."""

    model_types = ("qwen3_5_text",)
    composite_types = ("qwen3_5",)
    ignored = (r"model\.visual\..*",)
    key_value_heads = 4
    """Defaults of fields that config.json leaves out."""

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        only(hf, attn_output_gate=True)
        return super().config(hf)

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        return "-" * required(hf, "num_hidden_layers")

    def _mlp_fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {"ffn_hidden_size": required(hf, "intermediate_size")}

    def _linear_input(self, config: HybridConfig, ours: str, theirs: str) -> TensorMap:
        heads = config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = heads * config.linear_value_head_dim
        names = tuple(f"{theirs}.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
        sizes = (2 * keys + values, values, heads, heads)
        return TensorMap((f"{ours}.in_proj.weight",), names, joined(sizes))


ADAPTER = Qwen35()
