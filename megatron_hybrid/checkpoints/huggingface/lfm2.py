"""LFM2: gated short convolutions and attention, each followed by a gated MLP, or by experts."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SYMBOLS = {"conv": "C", "full_attention": "*"}
_PROJECTIONS = ("w1", "w3", "w2")


def _conv_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    for kind in ("weight", "bias") if config.short_conv_bias else ("weight",):
        for own, name in (("in_proj", "in_proj"), ("conv1d", "conv"), ("out_proj", "out_proj")):
            yield same(f"{ours}.{own}.{kind}", f"{theirs}.{name}.{kind}")


class Lfm2(Adapter):
    model_types = ("lfm2",)
    names = TensorNames(
        {
            "C": ("conv", _conv_tensors),
            "*": (
                "self_attn",
                partial(tensors.attention, output="out_proj", norms=("q_layernorm", "k_layernorm")),
            ),
            "-": ("feed_forward", partial(tensors.mlp, projections=_PROJECTIONS)),
            "E": (
                "feed_forward",
                partial(tensors.moe, expert_bias="expert_bias", projections=_PROJECTIONS),
            ),
        },
        norms=("operator_norm", "ffn_norm"),
        final_norm="model.embedding_norm.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, block_use_swiglu=True)
        if hf.get("layer_types") is None:
            layers = range(fields.required(hf, "num_hidden_layers"))
            attention = hf.get("full_attn_idxs")
            attention = layers if attention is None else attention
            types = ["full_attention" if each in attention else "conv" for each in layers]
            hf = {**hf, "layer_types": types}
        return _decoder_fields({**hf, "intermediate_size": _mlp_width(hf)}, 0)


class Lfm2Moe(Lfm2):
    """`Lfm2MoeForCausalLM`: the MLPs of all but the first layers are mixtures of experts."""

    model_types = ("lfm2_moe",)
    ignored = (r"model\.pos_emb\.inv_freq",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, norm_topk_prob=True)
        layers = fields.required(hf, "num_hidden_layers")
        found = _decoder_fields(hf, layers - hf.get("num_dense_layers", 2))
        if "E" in found["layer_pattern"]:
            topk = hf.get("num_experts_per_tok", 4)
            fields.check_sigmoid_topk(topk)
            found |= {
                **fields.experts(hf, None, topk, "moe_intermediate_size"),
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": hf.get("use_expert_bias", True),
                "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0),
                "moe_router_topk_epsilon": 1e-6,
            }
        return found


def _decoder_fields(hf: Mapping[str, Any], num_sparse: int) -> dict[str, Any]:
    """Read all but experts, which the last `num_sparse` layers have, and the width of MLPs."""
    fields.only(hf, use_pos_enc=True)
    tied = hf.get("tie_embedding", hf.get("tie_word_embeddings", True))
    hf = {"norm_eps": 1e-5, "num_key_value_heads": 8, **hf, "tie_word_embeddings": tied}
    layers = fields.required(hf, "num_hidden_layers")
    mixers = fields.symbols_of(fields.required(hf, "layer_types"), _SYMBOLS, layers)
    mlps = "".join("-" if i < layers - num_sparse else "E" for i in range(layers))
    return {
        **fields.transformer({**hf, "rms_norm_eps": hf["norm_eps"]}, mixers, mlps, base=1e6),
        "qk_layernorm": True,
        "short_conv_kernel": hf.get("conv_L_cache", 3),
        "short_conv_bias": hf.get("conv_bias", False),
    }


def _mlp_width(hf: Mapping[str, Any]) -> int:
    """Compute the width that transformers gives the MLP."""
    width = hf.get("block_ff_dim") or fields.required(hf, "intermediate_size")
    if not hf.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(hf.get("block_ffn_dim_multiplier", 1.0) * (2 * width // 3))
    multiple = hf.get("block_multiple_of", 256)
    return -(-width // multiple) * multiple
