"""Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention, then experts or an MLP."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, Shapes, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined, same, ungrouped
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SYMBOLS = {"linear_attention": "G", "full_attention": "*"}


def _linear_tensors(
    config: HybridConfig, ours: str, theirs: str, by_key_heads: bool
) -> Iterator[TensorMap]:
    """Gated DeltaNet. by_key_heads: whether their projection into it goes by key heads, and has for
    each its query, its key, and the values and gates of its value heads."""
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, heads // key_heads * config.linear_value_head_dim
    if by_key_heads:
        names = ("qkvz", "ba")
        rows = ((key, key, value, value), (heads // key_heads, heads // key_heads))
        layout = ungrouped(rows, key_heads)
    else:
        names = ("qkv", "z", "b", "a")
        layout = joined((key_heads * (2 * key + value), key_heads * value, heads, heads))
    inputs = tuple(f"{theirs}.in_proj_{name}.weight" for name in names)
    yield TensorMap((f"{ours}.in_proj.weight",), inputs, layout)
    for name in ("conv1d.weight", "A_log", "dt_bias", "out_proj.weight"):
        yield same(f"{ours}.{name}", f"{theirs}.{name}")
    yield same(f"{ours}.out_norm.weight", f"{theirs}.norm.weight")


def _names(by_key_heads: bool) -> TensorNames:
    return TensorNames(
        {
            "G": ("linear_attn", partial(_linear_tensors, by_key_heads=by_key_heads)),
            "*": ("self_attn", tensors.attention),
            "-": ("mlp", tensors.mlp),
            "E": ("mlp", partial(tensors.moe, shared="shared_expert")),
        }
    )


class Qwen3Next(Adapter):
    """`Qwen3NextForCausalLM`."""

    model_types = ("qwen3_next",)
    names = _names(by_key_heads=True)
    prediction_names = (r"mtp\..*",)
    left_out: ClassVar = {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "intermediate_size": 5632,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    }
    """Defaults of fields that config.json leaves out."""

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        # The convolution and the gates are SiLU here, whatever the MLP's activation.
        fields.only(hf, attention_bias=False, hidden_act="silu")
        hf = {**self.left_out, **hf}
        types = fields.layer_types(hf, "linear_attention", hf.get("full_attention_interval", 4))
        mixers = fields.symbols_of(types, _SYMBOLS, hf["num_hidden_layers"])
        mlps = self._mlps(hf)
        found = {
            **fields.transformer(hf, "".join(mixers), mlps, partial=True),
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "linear_norm_zero_centered_gamma": False,
            "linear_num_key_heads": hf.get("linear_num_key_heads", 16),
            "linear_num_value_heads": hf.get("linear_num_value_heads", 32),
            "linear_key_head_dim": hf.get("linear_key_head_dim", 128),
            "linear_value_head_dim": hf.get("linear_value_head_dim", 128),
            "linear_conv_kernel_dim": hf.get("linear_conv_kernel_dim", 4),
        }
        if "E" in mlps:
            width = hf.get("shared_expert_intermediate_size", 512)
            found |= {
                "num_moe_experts": hf["num_experts"],
                "moe_router_topk": hf["num_experts_per_tok"],
                "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),
                "moe_ffn_hidden_size": hf.get("moe_intermediate_size", 512),
                "moe_shared_expert_intermediate_size": width,
                "moe_shared_expert_gate": True,
            }
        return found

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from super().tensors(config)
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        around = [f"mtp.{name}" for name in names]
        yield from self.names.prediction(config, around)

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        if names is None:
            return f"*{self._mlps(hf)[-1]}" if hf.get("mtp_num_hidden_layers") == 1 else ""
        if not tensors.has_tensor(names, "mtp.fc.") or tensors.has_tensor(names, "mtp.layers.1."):
            return ""
        return "*E" if tensors.has_tensor(names, "mtp.layers.0.mlp.experts.") else "*-"

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        """E or - for each of their layers."""
        if {**self.left_out, **hf}["num_experts"]:
            return fields.sparse_mlps(hf)
        return "-" * fields.required(hf, "num_hidden_layers")


class Qwen35(Qwen3Next):
    """`Qwen3_5ForCausalLM`, and the language model of `Qwen3_5ForConditionalGeneration`."""

    model_types = ("qwen3_5_text",)
    names = _names(by_key_heads=False)
    composite_types = ("qwen3_5",)
    ignored = (r"model\.visual\..*",)
    left_out: ClassVar = {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "num_experts": 0,
    }

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, attn_output_gate=True, norm_topk_prob=True)
        fields.only(hf, decoder_sparse_step=1, mlp_only_layers=(None, []))
        return super().config(hf)


class Qwen35Moe(Qwen35):
    """`Qwen3_5MoeForCausalLM`, and the language model of `Qwen3_5MoeForConditionalGeneration`."""

    model_types = ("qwen3_5_moe_text",)
    composite_types = ("qwen3_5_moe",)
    left_out: ClassVar = {
        **Qwen35.left_out,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    }

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
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
