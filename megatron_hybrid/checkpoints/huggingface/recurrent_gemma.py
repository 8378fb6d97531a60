"""RecurrentGemma: Griffin's recurrent blocks, and sliding windows between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import joined, reshaped, same
from megatron_hybrid.models.config.hybrid_config import HybridConfig

_SYMBOLS = {"recurrent": "U", "attention": "W"}


def _recurrent_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    width, blocks = config.lru_width, config.lru_num_blocks
    block = width // blocks
    for kind in ("weight", "bias"):
        yield TensorMap(
            (f"{ours}.in_proj.{kind}",),
            (f"{theirs}.linear_y.{kind}", f"{theirs}.linear_x.{kind}"),
            joined((width, width)),
        )
        yield same(f"{ours}.conv1d.{kind}", f"{theirs}.conv_1d.{kind}")
        yield same(f"{ours}.out_proj.{kind}", f"{theirs}.linear_out.{kind}")
        shapes = ((width, block), (blocks, block, block))
        shapes = shapes if kind == "weight" else ((width,), (blocks, block))
        for gate in ("input_gate", "recurrent_gate"):
            name = f"{gate}_{kind}"
            yield same(f"{ours}.{name}", f"{theirs}.rg_lru.{name}", reshaped(*shapes))
    yield same(f"{ours}.recurrent_param", f"{theirs}.rg_lru.recurrent_param")


class RecurrentGemma(Adapter):
    """`RecurrentGemmaForCausalLM`."""

    model_types = ("recurrent_gemma",)
    names = TensorNames(
        {
            "U": ("temporal_block", _recurrent_tensors),
            "W": ("temporal_block", tensors.attention),
            "-": ("mlp_block", tensors.mlp),
        },
        norms=("temporal_pre_norm", "channel_pre_norm"),
        final_norm="model.final_norm.weight",
    )

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        hf = {"tie_word_embeddings": True, "partial_rotary_factor": 0.5, **hf}
        hf["sliding_window"] = hf.get("attention_window_size", 2048)
        layers = fields.required(hf, "num_hidden_layers")
        blocks = hf.get("block_types") or ("recurrent", "recurrent", "attention")
        mixers = fields.symbols_of([*blocks] * layers, _SYMBOLS, layers * len(blocks))[:layers]
        width = fields.required(hf, "hidden_size")
        heads = fields.required(hf, "num_attention_heads")
        fields.only(hf, head_dim=(width // heads, None))
        attention = {"add_qkv_bias": hf.get("attention_bias", False), "attention_output_bias": True}
        overrides = {"-": {"add_bias_linear": True}}
        return {
            **fields.transformer(hf, "".join(mixers), partial=True),
            "layer_overrides": overrides | ({"W": attention} if "W" in mixers else {}),
            "lru_width": hf.get("lru_width") or width,
            "lru_num_blocks": heads,
            "lru_conv_kernel": hf.get("conv1d_width", 4),
            "ffn_hidden_size": fields.required(hf, "intermediate_size") // 2,
            "activation_func": fields.activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
            "layernorm_zero_centered_gamma": True,
            # In bfloat16 in models of any dtype.
            "embedding_multiplier": torch.tensor(width**0.5).bfloat16().item(),
            "final_logit_softcap": hf.get("logits_soft_cap", 30.0),
        }
