"""Granite 3: Llama, or its attention and experts, with factors (MuP). Granite 4: also Mamba-2
layers, each layer with an MLP or experts."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import same, stacked
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def _multipliers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Read the factors of embeddings, residuals, scores and logits."""
    return {
        "embedding_multiplier": hf.get("embedding_multiplier", 1.0),
        "logits_multiplier": 1.0 / hf.get("logits_scaling", 1.0),
        "residual_multiplier": hf.get("residual_multiplier", 1.0),
        "softmax_scale": hf.get("attention_multiplier", 1.0),
    }


_MLP = {"linear_fc1": "input_linear", "linear_fc2": "output_linear"}
_experts = tensors.modules(
    router="router.layer", **{f"experts.{own}": name for own, name in _MLP.items()}
)
"""Gate and value lie in one tensor, and experts in one, on both sides; so in the shared MLP."""


def _mlp_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    shared = ours
    if config.num_moe_experts is not None:
        shared = f"{ours}.shared_experts"
        yield from _experts(config, ours, f"{theirs}.block_sparse_moe")
    yield from tensors.weights(shared, f"{theirs}.shared_mlp", _MLP)


class Granite(Adapter):
    model_types = ("granite",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return {**fields.transformer(hf, **fields.biases(hf)), **_multipliers(hf)}


class GraniteMoe(Adapter):
    model_types = ("granitemoe",)
    names = TensorNames({**tensors.TRANSFORMER, "E": ("block_sparse_moe", _experts)})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        mlps = "E" * fields.required(hf, "num_hidden_layers")
        return {
            **fields.transformer(hf, mlps=mlps, attention_bias=hf.get("attention_bias")),
            **_multipliers(hf),
            **fields.experts(hf, 8, 2),
        }


class GraniteMoeHybrid(Adapter):
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
        width = hf.get("shared_intermediate_size", 1024)
        types = hf.get("layer_types") or hf.get("layers_block_type") or ["mamba"] * num_layers
        mixers = fields.symbols_of(types, fields.MAMBA2_SYMBOLS, num_layers)
        has_experts = bool(hf.get("num_local_experts", 8))
        mlps, bias = ("E" if has_experts else "-") * num_layers, hf.get("attention_bias")
        found = {
            **fields.transformer(hf, mixers, mlps, attention_bias=bias),
            **(fields.mamba2(hf, hf.get("rms_norm_eps", 1e-6)) if "M" in mixers else {}),
            **_multipliers(hf),
            "ffn_hidden_size": width,
        }
        if hf.get("position_embedding_type") != "rope":
            found["position_embedding_type"] = "none"
        if has_experts:
            found |= {**fields.experts(hf, 8, 2), "moe_shared_expert_intermediate_size": width}
        return found

    def spellings(self, tensor_map: TensorMap, config: HybridConfig) -> Iterator[TensorMap]:
        """See `Adapter.spellings`: GPTQModel and llm-compressor write the experts of a tensor one
        by one, the latter with gate and value apart."""
        if ".experts." not in tensor_map.ours[0]:
            return
        projection = tensor_map.theirs[0].removesuffix(".weight")
        names = (f"{projection}.{i}.linear.weight" for i in range(config.num_moe_experts))
        yield TensorMap(tensor_map.ours, tuple(names), stacked())
        stack = f"{projection.rpartition('.')[0]}.experts.weight"
        yield tensors.experts_one_by_one(same(tensor_map.ours[0], stack), config)
