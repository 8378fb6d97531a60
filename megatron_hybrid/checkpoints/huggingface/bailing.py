"""Ling 3: Kimi Delta Attention and gated latent attention, with experts after both; Ling 2.5:
lightning attention and latent attention; Ring linear: lightning and grouped-query attention."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import deepseek_v3, fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_HEAD_NORMS = ("query_layernorm", "key_layernorm")
_attention = partial(
    tensors.attention, joined_qkv="query_key_value", output="dense", norms=_HEAD_NORMS
)


def _lightning(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    """Map lightning attention, whose queries, keys and values are one projection."""
    width = config.linear_num_key_heads * config.linear_key_head_dim
    projections = (f"{theirs}.g_proj.weight", f"{theirs}.query_key_value.weight")
    yield TensorMap((f"{ours}.in_proj.weight",), projections, joined((width, 3 * width)))
    norms = dict(zip(("q_norm", "k_norm"), _HEAD_NORMS))
    yield from tensors.weights(ours, theirs, norms | {"norm": "g_norm", "out_proj": "dense"})


def _lightning_fields(hf: Mapping[str, Any], mixers: str) -> dict[str, Any]:
    """Read lightning attention. mixers: a symbol for each of their layers."""
    fields.only(hf, linear_silu=False, use_qk_norm=True, use_qkv_bias=False, use_bias=False)
    fields.only(hf, rope_scaling=None)
    heads, last = fields.required(hf, "num_attention_heads"), max(len(mixers) - 1, 1)
    if heads & (heads - 1):
        raise ValueError(
            f"config.json has num_attention_heads={heads}, which is no power of 2: the decays of "
            "lightning attention are not supported for it"
        )
    head_dim = hf.get("head_dim") or fields.required(hf, "hidden_size") // heads
    factors = {i: 1 - (i - 1) / last + 1e-5 for i, mixer in enumerate(mixers) if mixer == "A"}
    return {
        **fields.linear_heads(heads, head_dim),
        "lightning_rope": True,
        "lightning_norm_groups": hf.get("group_norm_size", 1),
        "layer_overrides": {
            str(2 * i + 1): {"lightning_decay_factor": factor} for i, factor in factors.items()
        },
    }


class BailingHybrid(deepseek_v3.DeepseekV3):
    """`BailingHybridForCausalLM`. Its MTP head is not read."""

    model_types = ("bailing_hybrid",)
    has_partial_rotary = True
    reads_predictions = False
    names = TensorNames(
        {
            "K": ("attention", partial(deepseek_v3.delta_attention_tensors, output="dense")),
            "A": ("attention", _lightning),
            "+": ("attention", partial(tensors.latent_attention, output="dense")),
            "*": ("attention", _attention),
            "-": ("mlp", tensors.mlp),
            "E": ("mlp", partial(tensors.moe, expert_bias="gate.expert_bias")),
        },
        embedding="model.word_embeddings.weight",
    )
    module_names = (
        (r"\bword_embeddings\b", "embed_tokens"),
        (r"\.attention\.", ".self_attn."),
        (r"self_attn\.f_proj\b", "self_attn.forget_gate.f_proj"),
        (r"self_attn\.dense\b", "self_attn.o_proj"),
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, moe_renormalize=True, rope_interleave=True, hidden_act="silu")
        hf = self._as_deepseek({"num_experts": 512, "moe_intermediate_size": 768, **hf})
        hf = {"rope_theta": 6_000_000.0, "q_lora_rank": None, **hf}
        if self._symbols(hf)["linear_attention"] == "A":
            found = {**super().config(hf), **_lightning_fields(hf, self._mixers(hf))}
            found["layer_overrides"]["A"] = {"rotary_interleaved": False}
            return found
        heads = hf.get("linear_num_heads", fields.required(hf, "num_attention_heads"))
        bound = hf.get("kda_lower_bound", -5.0) if hf.get("kda_safe_gate", True) else None
        return {
            **super().config(hf),
            **fields.linear_heads(heads, hf.get("linear_head_dim", hf.get("head_dim", 128))),
            "latent_output_gate": True,
            "kda_low_rank_gates": False,
            "kda_fp32_conv": True,
            "kda_decay_bound": bound,
            "linear_conv_kernel_dim": hf.get("short_conv_kernel_size", 4),
        }

    def _as_deepseek(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config.json with DeepSeek-V3's keys."""
        width = (None, hf.get("moe_intermediate_size"))
        fields.only(hf, moe_shared_expert_intermediate_size=width)
        return fields.renamed({"num_shared_experts": 1, **hf}, fields.AS_DEEPSEEK)

    def _symbols(self, hf: Mapping[str, Any]) -> dict[str, str]:
        is_ling_2_5 = hf.get("architectures") == ["BailingMoeV2_5ForCausalLM"]
        own = {"linear_attention": "A"} if is_ling_2_5 else {}
        return {**deepseek_v3.MIXERS, **own}

    def _mixers(self, hf: Mapping[str, Any]) -> str:
        number, period = fields.required(hf, "num_hidden_layers"), hf.get("layer_group_size", 6)
        types = list(fields.layer_types(hf, "linear_attention", period))
        if not hf.get("layer_types"):  # what is no whole group attends to all tokens
            types[number // period * period :] = ["full_attention"] * (number % period)
        return fields.symbols_of(types, self._symbols(hf), number)


class BailingLinear(BailingHybrid):
    """`BailingMoeLinearV2ForCausalLM`. Its MTP head is not read."""

    model_types = ("bailing_moe_linear",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, norm_topk_prob=True, score_function="sigmoid", norm_head=False)
        fields.only(hf, rope_traditional=False, moe_router_enable_expert_bias=True)
        hf = self._as_deepseek(hf)
        mixers, mlps = self._mixers(hf), fields.dense_mlps_first(hf, 2)
        return {
            **fields.transformer(hf, mixers, mlps, base=600_000.0, partial=True),
            **self._experts(hf, mlps),
            "qk_layernorm": True,
            **_lightning_fields(hf, mixers),
        }

    def _symbols(self, hf: Mapping[str, Any]) -> dict[str, str]:
        return {"linear_attention": "A", "full_attention": "*"}
