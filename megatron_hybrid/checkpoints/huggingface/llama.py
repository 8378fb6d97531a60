"""Llama 2 and 3, and models that differ from them by biases or experts alone. Llama 4 (text):
attention in chunks with RoPE, in full without; experts, one for each token."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import reshaped, same, transposed
from megatron_hybrid.models.config.hybrid_config import HybridConfig


class Llama(Adapter):
    model_types = ("llama",)
    ignored = (r".*\.rotary_emb\.inv_freq",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        return fields.transformer(hf, **fields.biases(hf))


class SeedOss(Adapter):
    model_types = ("seed_oss",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, **hf}
        fields.only(hf, attention_out_bias=False)
        found = fields.transformer(hf, mlp_bias=hf.get("mlp_bias"))
        return {**found, "add_qkv_bias": hf["attention_bias"]}


class Ernie(Adapter):
    """`Ernie4_5ForCausalLM`."""

    model_types = ("ernie4_5",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
        hf = {**left_out, "tie_word_embeddings": True, **hf}
        biases = dict.fromkeys(("attention_bias", "mlp_bias"), hf.get("use_bias"))
        return {**fields.transformer(hf, base=500000.0, **biases), "rotary_interleaved": True}


def _moe(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    bias = "moe_statics.e_score_correction_bias"
    for each in tensors.moe(config, ours, theirs, expert_bias=bias):
        if each.theirs == (f"{theirs}.{bias}",):
            experts = config.num_moe_experts
            each = same(*each.ours, *each.theirs, reshaped((experts,), (1, experts)))
        yield each


class ErnieMoe(Adapter):
    """`Ernie4_5_MoeForCausalLM`: experts, chosen by their softmax scores and a bias."""

    model_types = ("ernie4_5_moe",)
    names = TensorNames({**tensors.TRANSFORMER, "E": ("mlp", _moe)})
    ignored = (r"model\.mtp_.*",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "intermediate_size": 12288}
        hf = {**left_out, "tie_word_embeddings": True, **hf}
        fields.only(hf, use_bias=False, moe_use_aux_free=(True, None), moe_norm_min=1e-12)
        numbers = range(fields.required(hf, "num_hidden_layers"))
        first, last = hf.get("moe_layer_start_index", 1), hf.get("moe_layer_end_index", -1)
        interval, last = hf.get("moe_layer_interval", 1), len(numbers) - 1 if last == -1 else last
        mlps = ["E" if first <= i <= last and (i + 1) % interval == 0 else "-" for i in numbers]
        width = hf.get("moe_intermediate_size", 1536)
        return {
            **fields.transformer(hf, mlps="".join(mlps), base=500000.0),
            "rotary_interleaved": True,
            "num_moe_experts": hf.get("moe_num_experts", 64),
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": hf.get("moe_num_shared_experts", 2) * width
            or None,
            "moe_router_topk": hf.get("moe_k", 6),
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_epsilon": 1e-12,
        }


class SmolLM3(Adapter):
    """`SmolLM3ForCausalLM`: every fourth layer has no RoPE."""

    model_types = ("smollm3",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"num_key_value_heads": 4, "tie_word_embeddings": True, **hf}
        mixers = None
        if hf.get("layer_types"):
            mixers = fields.windows(hf, "full_attention", 1)
        else:
            fields.only(hf, use_sliding_window=False)
        found = fields.transformer(hf, mixers, base=2000000.0, **fields.biases(hf))
        interval = hf.get("no_rope_layer_interval", 4)
        numbers = range(1, hf["num_hidden_layers"] + 1)
        has_rope = hf.get("no_rope_layers") or [number % interval for number in numbers]
        for number, rotates in zip(numbers, has_rope):
            if not rotates:
                found["layer_overrides"][str(2 * number - 1)] = {"position_embedding_type": "none"}
        return found


def _llama4_moe(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    names = {"router": "router", "shared": "shared_expert"}
    yield from tensors.moe(config, ours, theirs, projections=None, **names)
    for own, name in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
        weight = f"{ours}.experts.linear_{own}.weight"
        yield same(weight, f"{theirs}.experts.{name}", transposed())


class Llama4(Adapter):
    """`Llama4ForCausalLM`, and the language model of `Llama4ForConditionalGeneration`."""

    model_types = ("llama4_text",)
    names = TensorNames(
        {
            **dict.fromkeys("*L", ("self_attn", tensors.attention)),
            "-": ("feed_forward", tensors.mlp),
            "E": ("feed_forward", _llama4_moe),
        }
    )
    composite_types = ("llama4",)
    stacks_experts = True
    ignored = (r".*\.rotary_emb\.inv_freq", r"(vision_model|multi_modal_projector)\..*")

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, attention_bias=False)
        without_rope = {"position_embedding_type": "none", "qk_l2_norm": False}
        if hf.get("attn_temperature_tuning", True):
            without_rope["attention_temperature_scale"] = hf.get("attn_scale", 0.1)
            without_rope["attention_temperature_floor"] = hf.get("floor_scale", 8192)
        mixers, mlps = _llama4_layers(hf)
        hf = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, **hf}
        return {
            **fields.transformer(hf, mixers, mlps, base=500000.0),
            "layer_overrides": {"*": without_rope} if "*" in mixers else {},
            "attention_chunk_size": hf.get("attention_chunk_size", 8192),
            "rotary_interleaved": True,
            "qk_l2_norm": hf.get("use_qk_norm", True),
            "ffn_hidden_size": hf.get("intermediate_size_mlp", 16384),
            **fields.experts(hf, 16, 1),
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_shared_expert_intermediate_size": hf["intermediate_size"],
        }


def _llama4_layers(hf: Mapping[str, Any]) -> tuple[str, str]:
    """Choose chunks where there is RoPE; experts in each `interleave_moe_layer_step`th layer."""
    layers = fields.required(hf, "num_hidden_layers")
    interval, step = hf.get("no_rope_layer_interval", 4), hf.get("interleave_moe_layer_step", 1)
    has_rope = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    experts = hf.get("moe_layers")
    if experts is None:
        experts = range(step - 1, layers, step)
    types = ["chunked_attention" if rope else "full_attention" for rope in has_rope[:layers]]
    if (given := hf.get("layer_types")) and list(given) != types:
        raise ValueError(
            f"config.json has layer_types={given} and no_rope_layers={has_rope}; only layers with "
            "RoPE in chunks and layers without RoPE in full are supported"
        )
    mlps = "".join("E" if i in experts else "-" for i in range(layers))
    return "".join("L" if rope else "*" for rope in has_rope[:layers]), mlps
