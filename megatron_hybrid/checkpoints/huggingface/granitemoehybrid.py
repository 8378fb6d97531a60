"""Granite 4 hybrids: Mamba-2 and attention layers, each followed by an MLP or by experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, Shapes, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.granite import experts, multipliers
from megatron_hybrid.checkpoints.huggingface.layouts import same, stacked
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def _mlp_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Gate and value lie in one tensor, and experts in one, on both sides."""
    shared = ours
    if config.num_moe_experts is not None:
        shared = f"{ours}.shared_experts"
        yield from experts(config, ours, f"{theirs}.block_sparse_moe")
    for own, name in (("linear_fc1", "input_linear"), ("linear_fc2", "output_linear")):
        yield same(f"{shared}.{own}.weight", f"{theirs}.shared_mlp.{name}.weight")


class GraniteMoeHybrid(Adapter):
    """`GraniteMoeHybridForCausalLM`."""

    model_types = ("granitemoehybrid",)
    names = TensorNames(
        {
            "M": ("mamba", tensors.mamba2),
            "*": ("self_attn", tensors.attention),
            **dict.fromkeys("-E", ("", _mlp_tensors)),
        }
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, hidden_act=("silu", "swish"))  # it is that of the convolution, too
        num_layers = fields.required(hf, "num_hidden_layers")
        types = hf.get("layer_types") or hf.get("layers_block_type") or ["mamba"] * num_layers
        symbols = fields.symbols_of(types, fields.MAMBA2_SYMBOLS, num_layers)
        mlp = "E" if hf.get("num_local_experts", 8) else "-"
        position, bias = hf.get("position_embedding_type"), hf.get("attention_bias")
        return {
            **fields.transformer(hf, "".join(symbols), mlp * num_layers, attention_bias=bias),
            **(fields.mamba2(hf, hf.get("rms_norm_eps", 1e-6)) if "M" in symbols else {}),
            **multipliers(hf),
            "position_embedding_type": "rope" if position == "rope" else "none",
            "ffn_hidden_size": hf.get("shared_intermediate_size", 1024),
            **(_moe_fields(hf) if mlp == "E" else {}),
        }

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
        """See `Adapter.as_found`: GPTQModel and llm-compressor write the experts of a tensor one by
        one, the latter with gate and value apart."""
        if ".experts." not in tensor_map.ours[0]:
            return tensor_map
        projection = tensor_map.theirs[0].removesuffix(".weight")
        names = (f"{projection}.{i}.linear.weight" for i in range(config.num_moe_experts))
        whole = TensorMap(tensor_map.ours, tuple(names), stacked())
        stack = f"{projection.rpartition('.')[0]}.experts.weight"
        apart = tensors.experts_one_by_one(same(tensor_map.ours[0], stack), config)
        return next((m for m in (whole, apart) if m.theirs[0] in shapes), tensor_map)


def _moe_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_moe_experts": hf.get("num_local_experts", 8),
        "moe_ffn_hidden_size": fields.required(hf, "intermediate_size"),
        "moe_shared_expert_intermediate_size": hf.get("shared_intermediate_size", 1024),
        "moe_router_topk": hf.get("num_experts_per_tok", 2),
        "moe_router_score_function": "softmax",
    }
