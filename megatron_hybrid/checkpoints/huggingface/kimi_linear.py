"""Kimi Linear: Kimi Delta Attention and latent attention without RoPE, with experts after both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, Shapes, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined, reshaped, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

MIXERS = {"linear_attention": "K", "full_attention": "+"}


def delta_attention_tensors(
    config: HybridConfig, ours: str, theirs: str, output: str = "o_proj"
) -> Iterator[TensorMap]:
    """Kimi Delta Attention (arguments: see `tensors.attention`)."""
    heads = config.linear_num_key_heads
    width = heads * config.linear_key_head_dim
    yield TensorMap(
        (f"{ours}.in_proj.weight",),
        tuple(f"{theirs}.{name}_proj.weight" for name in "qkvb"),
        joined((width, width, width, heads)),
    )
    yield TensorMap(
        (f"{ours}.conv1d.weight",),
        tuple(f"{theirs}.{name}_conv1d.weight" for name in "qkv"),
        joined((width, width, width)),
    )
    low_rank = config.kda_low_rank_gates
    for name in ("f_a", "f_b", "g_a", "g_b") if low_rank else "fg":
        yield same(f"{ours}.{name}_proj.weight", f"{theirs}.{name}_proj.weight")
    shape = (1, 1, heads, 1) if low_rank else (heads,)
    yield same(f"{ours}.A_log", f"{theirs}.A_log", reshaped((heads,), shape))
    yield same(f"{ours}.dt_bias", f"{theirs}.dt_bias")
    yield same(f"{ours}.out_norm.weight", f"{theirs}.o_norm.weight")
    yield same(f"{ours}.out_proj.weight", f"{theirs}.{output}.weight")


class KimiLinear(Adapter):
    """`KimiLinearForCausalLM`."""

    model_types = ("kimi_linear",)
    names = TensorNames(
        {
            "K": ("self_attn", delta_attention_tensors),
            "+": ("self_attn", tensors.latent_attention),
            "-": ("mlp", tensors.mlp),
            "E": ("block_sparse_moe", partial(tensors.moe, projections=("w1", "w3", "w2"))),
        }
    )
    module_names = (
        (r"self_attn\.(f_[ab]_proj)", r"self_attn.forget_gate.\1"),
        (r"\.block_sparse_moe\b", ".mlp"),
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, hidden_act="silu", tie_word_embeddings=False, mla_use_nope=True)
        fields.only(
            hf, moe_renormalize=True, moe_router_activation_func="sigmoid", moe_layer_freq=1
        )
        fields.only(hf, num_nextn_predict_layers=(0, None))
        # Of later models with this model_type.
        fields.only(hf, mla_use_output_gate=(False, None), routed_expert_hidden_size=None)
        fields.only(hf, attn_res_block_size=None)
        linear = hf.get("linear_attn_config") or {}
        head_dim = linear.get("head_dim", hf.get("linear_head_dim", 128))
        num_layers = fields.required(hf, "num_hidden_layers")
        mixers = fields.symbols_of(_types(hf, num_layers), MIXERS, num_layers)
        mlps = fields.dense_mlps_first(hf, 1)
        found = {
            **fields.model({"rms_norm_eps": 1e-5, **hf}),
            **fields.latent_attention(hf),
            "position_embedding_type": "none",
            "layer_pattern": "".join(mixer + mlp for mixer, mlp in zip(mixers, mlps)),
            "linear_num_key_heads": linear.get("num_heads", hf.get("linear_num_heads", 32)),
            "linear_key_head_dim": head_dim,
            "linear_value_head_dim": head_dim,
            "linear_conv_kernel_dim": linear.get(
                "short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4)
            ),
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "activation_func": fields.activation(hf),
        }
        if "E" in mlps:
            found |= fields.grouped_experts(
                num_experts=hf.get("num_experts", 256),
                topk=hf.get("num_experts_per_token", 8),
                width=hf.get("moe_intermediate_size", 1024),
                num_shared=fields.num_shared_experts(hf, "num_shared_experts"),
                groups=hf.get("num_expert_group", 1),
                chosen_groups=hf.get("topk_group", 1),
                scaling_factor=hf.get("routed_scaling_factor", 2.446),
            )
        return found

    def as_found(self, tensor_map: TensorMap, config: HybridConfig, shapes: Shapes) -> TensorMap:
        """See `Adapter.as_found`: transformers writes the names of experts for dense MLPs too."""
        others = tuple(name.replace(".mlp.", ".block_sparse_moe.") for name in tensor_map.theirs)
        if tensor_map.theirs[0] not in shapes and all(name in shapes for name in others):
            return replace(tensor_map, theirs=others)
        return tensor_map


def _types(hf: Mapping[str, Any], num_layers: int) -> list[str | None]:
    """ "linear_attention" or "full_attention" for each layer; None for one that has no entry."""
    linear = hf.get("linear_attn_config") or {}
    types = hf.get("layer_types")
    if types is None and {"full_attn_layers", "kda_layers"} <= linear.keys():
        kinds = {number: "full_attention" for number in linear["full_attn_layers"]}
        kinds |= {number: "linear_attention" for number in linear["kda_layers"]}
        types = [kinds.get(number) for number in range(1, num_layers + 1)]
    elif types is None:
        types = [
            "full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(num_layers)
        ]
    return types
