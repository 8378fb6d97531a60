"""Qwen3-Next: Gated DeltaNet and gated attention, each followed by experts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import (
    activation,
    attention_fields,
    model_fields,
    only,
    required,
    rotary_fields,
    symbols_of,
)
from megatron_hybrid.checkpoints.huggingface.layouts import ungrouped
from megatron_hybrid.checkpoints.huggingface.tensors import (
    attention_tensors,
    has_tensor,
    layer_tensors,
    mlp_tensors,
    model_tensors,
    moe_tensors,
    prediction_tensors,
    same,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SYMBOLS = {"linear_attention": "G", "full_attention": "*"}


class Qwen3Next(Adapter):
    """`Qwen3NextForCausalLM`."""

    model_types = ("qwen3_next",)
    prediction_names = (r"mtp\..*",)
    key_value_heads = 2
    """Defaults of fields that config.json leaves out."""

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        # The convolution and the gates are SiLU here, whatever the MLP's activation.
        only(hf, attention_bias=False, hidden_act="silu")
        key_heads = hf.get("linear_num_key_heads", 16)
        return {
            **model_fields(hf),
            **attention_fields(
                {"head_dim": 256, "num_key_value_heads": self.key_value_heads, **hf}
            ),
            **rotary_fields({"partial_rotary_factor": 0.25, **hf}, partial=True),
            **self._mlp_fields(hf),
            "layer_pattern": "".join(map("".join, zip(_mixers(hf), self._mlps(hf)))),
            "layernorm_zero_centered_gamma": True,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "linear_norm_zero_centered_gamma": False,
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": hf.get("linear_num_value_heads", 32),
            "linear_key_head_dim": hf.get("linear_key_head_dim", 128),
            "linear_value_head_dim": hf.get("linear_value_head_dim", 128),
            "linear_conv_kernel_dim": hf.get("linear_conv_kernel_dim", 4),
            "activation_func": activation(hf),
        }

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from model_tensors(config)
        parts = {
            "G": ("linear_attn", self._linear_tensors),
            "*": ("self_attn", attention_tensors),
            "-": ("mlp", mlp_tensors),
            "E": ("mlp", partial(moe_tensors, shared="shared_expert")),
        }
        yield from layer_tensors(config, parts)
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        yield from prediction_tensors(config, parts, [f"mtp.{name}" for name in names])

    def prediction_layers(self, hf: Mapping[str, Any], names: Collection[str] | None) -> str:
        if names is None:
            return f"*{self._mlps(hf)[-1]}" if hf.get("mtp_num_hidden_layers") == 1 else ""
        if not has_tensor(names, "mtp.fc.") or has_tensor(names, "mtp.layers.1."):
            return ""
        return "*E" if has_tensor(names, "mtp.layers.0.mlp.experts.") else "*-"

    def _mlps(self, hf: Mapping[str, Any]) -> str:
        """E or - for each of their layers."""
        step = hf.get("decoder_sparse_step", 1)
        dense = hf.get("mlp_only_layers") or ()
        if not hf.get("num_experts", 512):
            return "-" * required(hf, "num_hidden_layers")
        return "".join(
            "E" if i not in dense and (i + 1) % step == 0 else "-"
            for i in range(required(hf, "num_hidden_layers"))
        )

    def _mlp_fields(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields = {"ffn_hidden_size": hf.get("intermediate_size", 5632)}
        if "E" not in self._mlps(hf):
            return fields
        return {
            **fields,
            "num_moe_experts": hf.get("num_experts", 512),
            "moe_router_topk": hf.get("num_experts_per_tok", 10),
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", True),
            "moe_ffn_hidden_size": hf.get("moe_intermediate_size", 512),
            "moe_shared_expert_intermediate_size": hf.get("shared_expert_intermediate_size", 512),
            "moe_shared_expert_gate": True,
        }

    def _linear_tensors(self, config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
        yield self._linear_input(config, ours, theirs)
        for name in ("conv1d.weight", "A_log", "dt_bias", "out_proj.weight"):
            yield same(f"{ours}.{name}", f"{theirs}.{name}")
        yield same(f"{ours}.out_norm.weight", f"{theirs}.norm.weight")

    def _linear_input(self, config: HybridConfig, ours: str, theirs: str) -> TensorMap:
        """The projection into a Gated DeltaNet layer: theirs goes by key heads, and has for each
        its query, its key, and the values and gates of its value heads."""
        heads = config.linear_num_key_heads
        key, value_heads = config.linear_key_head_dim, config.linear_num_value_heads // heads
        value = value_heads * config.linear_value_head_dim
        rows = ((key, key, value, value), (value_heads, value_heads))
        names = (f"{theirs}.in_proj_qkvz.weight", f"{theirs}.in_proj_ba.weight")
        return TensorMap((f"{ours}.in_proj.weight",), names, ungrouped(rows, heads))


def _mixers(hf: Mapping[str, Any]) -> list[str]:
    """G or * for each of their layers."""
    num_layers = required(hf, "num_hidden_layers")
    types = hf.get("layer_types")
    if types is None:
        interval = hf.get("full_attention_interval", 4)
        types = [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(num_layers)
        ]
    return symbols_of(types, _SYMBOLS, num_layers)


ADAPTER = Qwen3Next()
