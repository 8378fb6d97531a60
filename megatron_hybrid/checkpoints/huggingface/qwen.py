"""Qwen 2 and 3: attention, in later layers within windows, and an MLP or experts. Qwen3-Next and
Qwen3.5: Gated DeltaNet and gated attention, then experts or an MLP."""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from megatron_hybrid.checkpoints.huggingface import base, fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined, same, transposed, ungrouped
from megatron_hybrid.models.config.hybrid_config import HybridConfig


def _with_window(hf: Mapping[str, Any], **left_out: Any) -> dict[str, Any]:
    """Add to a config.json what it leaves out, and no window where it does not use one."""
    hf = {"sliding_window": 4096, **left_out, **hf}
    return hf if hf.get("use_sliding_window") else {**hf, "sliding_window": None}


def _mixers(hf: Mapping[str, Any]) -> str | None:
    """Choose * or W for each of their layers."""
    if hf.get("layer_types"):
        return fields.windows(hf, "full_attention", 1)
    if hf["sliding_window"] is None:
        return None
    num_layers = fields.required(hf, "num_hidden_layers")
    num_full = min(hf.get("max_window_layers", 28), num_layers)
    return "*" * num_full + "W" * (num_layers - num_full)


class Qwen2(Adapter):
    """`Qwen2ForCausalLM`, also in `Qwen2_5_VLForConditionalGeneration`, and with an MTP head that
    is not read `MiMoForCausalLM`: biases in the projections of queries, keys and values."""

    model_types = ("qwen2", "mimo", "qwen2_5_vl_text")
    composite_types = ("qwen2_5_vl",)
    ignored = (r"model\.mtp_layers\..*", r"(model\.)?visual\..*")

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.text_config`; older files have no object of the language model alone."""
        if hf["model_type"] not in self.composite_types:
            return super().text_config(hf)
        part = base.language_part(hf) or {
            key: hf[key] for key in hf.keys() - {"architectures", "vision_config"}
        }
        part = {**part, "model_type": self.model_types[0]}
        if (part.get("rope_scaling") or {}).get("type") == "mrope":  # of a text it is plain RoPE
            del part["rope_scaling"]
        return super().text_config({**hf, "text_config": part})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = _with_window(hf, num_key_value_heads=32)
        return {**fields.transformer(hf, _mixers(hf)), "add_qkv_bias": True}


class Qwen3(Adapter):
    """`Qwen3ForCausalLM`, also in `Qwen3VLForConditionalGeneration`: norms of queries and keys."""

    model_types = ("qwen3", "qwen3_vl_text")
    composite_types = ("qwen3_vl",)
    ignored = (r"model\.visual\..*",)

    def text_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Adapter.text_config`: the language model is Qwen 3, and written as such."""
        return {**super().text_config(hf), "model_type": self.model_types[0]}

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = _with_window(hf, num_key_value_heads=32, head_dim=128)
        found = fields.transformer(hf, _mixers(hf), attention_bias=hf.get("attention_bias"))
        return {**found, "qk_layernorm": True}


def _experts(hf: Mapping[str, Any], number: int, topk: int, width: int) -> dict[str, Any]:
    hf = {"moe_intermediate_size": width, "norm_topk_prob": False, **hf}
    found = fields.experts(hf, number, topk, "moe_intermediate_size")
    return {**found, "moe_router_pre_softmax": not hf["norm_topk_prob"]}


def _shared_expert(hf: Mapping[str, Any], width: int) -> dict[str, Any]:
    width = hf.get("shared_expert_intermediate_size", width)
    return {"moe_shared_expert_intermediate_size": width, "moe_shared_expert_gate": True}


_SPARSE_PARTS = {
    **tensors.TRANSFORMER,
    "E": ("mlp", partial(tensors.moe, shared="shared_expert")),
}


class Qwen3Moe(Qwen3):
    """`Qwen3MoeForCausalLM`, also in `Qwen3VLMoeForConditionalGeneration`: experts."""

    model_types = ("qwen3_moe", "qwen3_vl_moe_text")
    composite_types = ("qwen3_vl_moe",)

    def spellings(self, tensor_map: TensorMap, config: HybridConfig) -> Iterator[TensorMap]:
        """See `Adapter.spellings`: next to a vision model the experts of a layer lie in two
        tensors, whose rows are inputs."""
        return tensors.experts_in_one(tensor_map, config, transposed())

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = _with_window(hf, num_key_value_heads=4, intermediate_size=6144)
        mixers = fields.windows_everywhere(hf)
        bias = hf.get("attention_bias")
        found = fields.transformer(hf, mixers, fields.sparse_mlps(hf), attention_bias=bias)
        return {**found, "qk_layernorm": True, **_experts(hf, 128, 8, 768)}


class Qwen2Moe(Adapter):
    """`Qwen2MoeForCausalLM`: experts, and one that is shared."""

    model_types = ("qwen2_moe",)
    names = TensorNames(_SPARSE_PARTS)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, use_sliding_window=False)
        hf = _with_window(hf, num_key_value_heads=16, intermediate_size=5632)
        return {
            **fields.transformer(hf, _mixers(hf), fields.sparse_mlps(hf)),
            "add_qkv_bias": hf.get("qkv_bias", True),
            **_experts(hf, 60, 4, 1408),
            **_shared_expert(hf, 5632),
        }


_SYMBOLS = {"linear_attention": "G", "full_attention": "*"}


def _linear_tensors(
    config: HybridConfig, ours: str, theirs: str, by_key_heads: bool
) -> Iterator[TensorMap]:
    """Map Gated DeltaNet. by_key_heads: whether their projection into it goes by key heads, and has
    for each its query, its key, and the values and gates of its value heads."""
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
    linear = partial(_linear_tensors, by_key_heads=by_key_heads)
    return TensorNames({**_SPARSE_PARTS, "G": ("linear_attn", linear)})


class Qwen3Next(Adapter):
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
            **fields.transformer(hf, mixers, mlps, partial=True),
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
            sizes = hf["num_experts"], hf["num_experts_per_tok"], 512
            found |= _experts({"norm_topk_prob": True, **hf}, *sizes) | _shared_expert(hf, 512)
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
        """Choose E or - for each of their layers."""
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

    def spellings(self, tensor_map: TensorMap, config: HybridConfig) -> Iterator[TensorMap]:
        """See `Adapter.spellings`: the released folders have the experts of a layer in two tensors,
        as they are here; transformers writes them one by one."""
        return tensors.experts_in_one(tensor_map, config)
