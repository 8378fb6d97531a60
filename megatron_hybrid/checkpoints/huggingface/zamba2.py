"""Zamba2: Mamba-2 layers, some of them after a transformer block that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.layouts import same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SYMBOLS = {"linear_attention": "M", "mamba": "M", "hybrid": "Z"}


class Zamba2(Adapter):
    """`Zamba2ForCausalLM`."""

    model_types = ("zamba2",)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, **hf}
        # Without tie_word_embeddings, transformers does not tie the shared blocks either.
        fields.only(hf, add_bias_linear=False, use_conv_bias=True, tie_word_embeddings=True)
        # Releases of transformers rescale RoPE for a long context, or do not.
        fields.only(hf, use_long_context=False)
        hidden = fields.required(hf, "hidden_size")
        heads = fields.required(hf, "num_attention_heads")
        head_dim = 2 * hidden // heads
        mamba_heads = fields.required(hf, "n_mamba_heads")
        types = fields.required(hf, "layers_block_type")
        layers = fields.required(hf, "num_hidden_layers")
        mixing = fields.rotary(hf) if hf.get("use_mem_rope", False) else {}
        return {
            **fields.model(hf),
            **mixing,
            "position_embedding_type": "rope" if mixing else "none",
            "layer_pattern": "".join(fields.symbols_of(types, _SYMBOLS, layers)),
            "num_attention_heads": heads,
            "num_query_groups": hf.get("num_key_value_heads") or heads,
            "kv_channels": head_dim,
            "softmax_scale": (head_dim / 2) ** -0.5,
            "ffn_hidden_size": hf.get("intermediate_size") or 4 * hidden,
            "activation_func": fields.activation(hf, default="gelu"),
            "num_shared_blocks": hf.get("num_mem_blocks", 1),
            "shared_block_adapter_rank": hf.get("adapter_rank", 128),
            "shared_block_attention_adapters": hf.get("use_shared_attention_adapter", False),
            "mamba_num_heads": mamba_heads,
            "mamba_head_dim": hf.get("mamba_expand", 2) * hidden // mamba_heads,
            "mamba_num_groups": hf.get("mamba_ngroups", 1),
            "mamba_state_dim": hf.get("mamba_d_state", 64),
            "mamba_conv_kernel": hf.get("mamba_d_conv", 4),
            "mamba_chunk_size": hf.get("chunk_size", 256),
            # The norm in the mixer has an epsilon of 1e-5, whatever rms_norm_eps says.
            **fields.time_steps(hf),  # transformers clamps by time_step_min
        }

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from tensors.model(config, final_norm="model.final_layernorm.weight")
        blocks: list[str] = []  # where theirs keep each shared block: in its first layer
        number = 0
        for i, symbol in enumerate(config.pattern.symbols):
            ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
            if symbol == "M":
                yield same(f"{ours}.norm.weight", f"{theirs}.input_layernorm.weight")
                yield from tensors.mamba2(config, f"{ours}.mixer", f"{theirs}.mamba")
                continue
            if number < config.num_shared_blocks:
                blocks.append(f"{theirs}.shared_transformer")
                yield from _block_tensors(config, f"{ours}.mixer.block", blocks[-1])
            block = blocks[number % config.num_shared_blocks]
            yield from _adapter_tensors(config, f"{ours}.mixer", block, number)
            mamba = f"{theirs}.mamba_decoder"
            yield same(f"{ours}.mixer.linear.weight", f"{theirs}.linear.weight")
            yield same(f"{ours}.mixer.norm.weight", f"{mamba}.input_layernorm.weight")
            yield from tensors.mamba2(config, f"{ours}.mixer.mamba", f"{mamba}.mamba")
            number += 1


def _block_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    yield same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight")
    yield from tensors.attention(config, f"{ours}.self_attention", f"{theirs}.self_attn")
    yield same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.pre_ff_layernorm.weight")
    yield same(f"{ours}.linear_fc1.weight", f"{theirs}.feed_forward.gate_up_proj.weight")
    yield same(f"{ours}.linear_fc2.weight", f"{theirs}.feed_forward.down_proj.weight")


def _adapter_tensors(
    config: HybridConfig, ours: str, block: str, number: int
) -> Iterator[TensorMap]:
    """Return what the layer `number` of those that share blocks adds to its block."""
    adapters = {"mlp_adapter": f"{block}.feed_forward.gate_up_proj_adapter_list"}
    if config.shared_block_attention_adapters:
        for i, name in enumerate("qkv"):
            adapters[f"qkv_adapters.{i}"] = f"{block}.self_attn.linear_{name}_adapter_list"
    for own, name in adapters.items():
        yield same(f"{ours}.{own}.down.weight", f"{name}.{number}.0.weight")
        yield same(f"{ours}.{own}.up.weight", f"{name}.{number}.1.weight")
