"""Zamba and Zamba2: Mamba layers, some of them after a transformer block that they share."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.layouts import alternating, reshaped, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.layer_pattern import SHARED_BLOCKS


def _mamba1_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    heads, channels = config.mamba1_num_heads, config.mamba1_inner_size
    head_dim, rank, states = channels // heads, config.mamba1_dt_rank, config.mamba1_state_dim
    width = rank + 2 * states
    yield same(f"{ours}.in_proj.weight", f"{theirs}.in_proj.weight", alternating(0))
    names = ["conv1d.weight", "out_proj.weight"]
    for name in [*names, "conv1d.bias"] if config.mamba1_conv_bias else names:
        yield same(f"{ours}.{name}", f"{theirs}.{name}")
    for name, own, given in (
        ("x_proj_weight", (heads * width, head_dim), (heads, width, head_dim)),
        ("dt_proj_weight", (channels, rank), (heads, head_dim, rank)),
        ("dt_proj_bias", (channels,), (heads, head_dim)),
        ("A_log", (channels, states), (heads, head_dim, states)),
        ("D", (channels,), (heads, head_dim)),
    ):
        yield same(f"{ours}.{name}", f"{theirs}.{name}", reshaped(own, given))


class Zamba(Adapter):
    model_types = ("zamba",)
    symbols: ClassVar = {"linear_attention": "S", "mamba": "S", "hybrid": "V"}
    block = "shared_transf"
    """Their name of a shared block."""
    mamba_tensors = staticmethod(_mamba1_tensors)
    mlp_tensors = staticmethod(tensors.mlp)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, mamba_proj_bias=False, hidden_mamba_act=("silu", "swish"))
        hidden = fields.required(hf, "hidden_size")
        fields.only(hf, attention_hidden_size=(2 * hidden, None))
        mamba_heads = hf.get("n_mamba_heads", 2)
        if mamba_heads < 2:
            raise ValueError(f"config.json has n_mamba_heads={mamba_heads}; it takes 2 or more")
        return {
            **self._shared(hf, _types(hf), hf.get("attention_head_dim")),
            "position_embedding_type": "none",
            "ffn_hidden_size": fields.required(hf, "intermediate_size"),
            "shared_block_adapter_rank": None,
            "mamba1_num_heads": mamba_heads,
            **fields.mamba1(hf),
        }

    def _shared(
        self, hf: Mapping[str, Any], types: Sequence[str], head_dim: int | None = None
    ) -> dict[str, Any]:
        """Read what both releases have. head_dim: that of twice the hidden size by default."""
        hf = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, **hf}
        # Without tie_word_embeddings, transformers does not tie the shared blocks either.
        fields.only(hf, tie_word_embeddings=True)
        heads = fields.required(hf, "num_attention_heads")
        head_dim = head_dim or 2 * fields.required(hf, "hidden_size") // heads
        layers = fields.required(hf, "num_hidden_layers")
        return {
            **fields.model(hf),
            "layer_pattern": fields.symbols_of(types, self.symbols, layers),
            "num_attention_heads": heads,
            "num_query_groups": hf.get("num_key_value_heads") or heads,
            "kv_channels": head_dim,
            "softmax_scale": (head_dim / 2) ** -0.5,
            "activation_func": fields.activation(hf, default="gelu"),
        }

    def tensors(self, config: HybridConfig) -> Iterator[TensorMap]:
        yield from tensors.model(config, final_norm="model.final_layernorm.weight")
        blocks: list[str] = []  # where theirs keep each shared block: in its first layer
        number = 0
        for i, symbol in enumerate(config.pattern.symbols):
            ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
            if symbol not in SHARED_BLOCKS:
                yield same(f"{ours}.norm.weight", f"{theirs}.input_layernorm.weight")
                yield from self.mamba_tensors(config, f"{ours}.mixer", f"{theirs}.mamba")
                continue
            if number < config.num_shared_blocks:
                blocks.append(f"{theirs}.{self.block}")
                yield from self._block_tensors(config, f"{ours}.mixer.block", blocks[-1])
            block = blocks[number % config.num_shared_blocks]
            yield from _adapter_tensors(config, f"{ours}.mixer", block, number)
            mamba = f"{theirs}.mamba_decoder"
            yield same(f"{ours}.mixer.linear.weight", f"{theirs}.linear.weight")
            yield same(f"{ours}.mixer.norm.weight", f"{mamba}.input_layernorm.weight")
            yield from self.mamba_tensors(config, f"{ours}.mixer.mamba", f"{mamba}.mamba")
            number += 1

    def _block_tensors(self, config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
        yield same(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight")
        yield from tensors.attention(config, f"{ours}.self_attention", f"{theirs}.self_attn")
        yield same(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.pre_ff_layernorm.weight")
        yield from self.mlp_tensors(config, ours, f"{theirs}.feed_forward")


class Zamba2(Zamba):
    model_types = ("zamba2",)
    symbols: ClassVar = {"linear_attention": "M", "mamba": "M", "hybrid": "Z"}
    block = "shared_transformer"
    mamba_tensors = staticmethod(tensors.mamba2)
    mlp_tensors = staticmethod(tensors.joined_mlp)

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, add_bias_linear=False, use_conv_bias=True)
        # Releases of transformers rescale RoPE for a long context, or do not.
        fields.only(hf, use_long_context=False)
        hidden = fields.required(hf, "hidden_size")
        sizes = {"mamba_n_heads": fields.required(hf, "n_mamba_heads"), "mamba_d_state": 64, **hf}
        mixing = fields.rotary(hf) if hf.get("use_mem_rope", False) else {}
        return {
            **self._shared(hf, fields.required(hf, "layers_block_type")),
            **mixing,
            "position_embedding_type": "rope" if mixing else "none",
            "ffn_hidden_size": hf.get("intermediate_size") or 4 * hidden,
            "num_shared_blocks": hf.get("num_mem_blocks", 1),
            "shared_block_adapter_rank": hf.get("adapter_rank", 128),
            "shared_block_attention_adapters": hf.get("use_shared_attention_adapter", False),
            # transformers clamps by time_step_min. The epsilon is in the code of the model.
            **fields.mamba2(fields.renamed(sizes, fields.OF_MAMBA), 1e-5),
        }


def _types(hf: Mapping[str, Any]) -> list[str]:
    if (types := hf.get("layers_block_type") or hf.get("layer_types")) is not None:
        return types
    period, offset = hf.get("attn_layer_period", 6), hf.get("attn_layer_offset", 4)
    numbers = range(fields.required(hf, "num_hidden_layers") - 3)
    rest = ("hybrid" if i % period == offset else "mamba" for i in numbers)
    return ["mamba", "mamba", "hybrid", *rest]


def _adapter_tensors(
    config: HybridConfig, ours: str, block: str, number: int
) -> Iterator[TensorMap]:
    """Return what the layer `number` of those that share blocks adds to its block."""
    adapters = {}
    if config.shared_block_adapter_rank is not None:
        adapters["mlp_adapter"] = f"{block}.feed_forward.gate_up_proj_adapter_list"
    if config.shared_block_attention_adapters:
        for i, name in enumerate("qkv"):
            adapters[f"qkv_adapters.{i}"] = f"{block}.self_attn.linear_{name}_adapter_list"
    for own, name in adapters.items():
        yield same(f"{ours}.{own}.down.weight", f"{name}.{number}.0.weight")
        yield same(f"{ours}.{own}.up.weight", f"{name}.{number}.1.weight")
