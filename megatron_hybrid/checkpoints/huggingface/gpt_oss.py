"""GPT-OSS: attention with sinks, every other layer windowed, and experts with biases."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_hybrid.checkpoints.huggingface import fields, tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap, TensorNames
from megatron_hybrid.checkpoints.huggingface.layouts import (
    SAME,
    alternating,
    chained,
    same,
    transposed,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.ops.activations import ACTIVATIONS

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes where a config says nothing but `rope_theta`."""


def _moe_tensors(config: HybridConfig, ours: str, theirs: str) -> Iterator[TensorMap]:
    yield from tensors.moe(config, ours, theirs, router="router", projections=None)
    for projection, name, layout in (
        ("fc1.weight", "gate_up_proj", chained(transposed(), alternating(1))),
        ("fc1.bias", "gate_up_proj_bias", alternating(1)),
        ("fc2.weight", "down_proj", transposed()),
        ("fc2.bias", "down_proj_bias", SAME),
    ):
        yield same(f"{ours}.experts.linear_{projection}", f"{theirs}.experts.{name}", layout)


class GptOss(Adapter):
    """`GptOssForCausalLM`, with the experts in floating point or, as published, in MXFP4."""

    model_types = ("gpt_oss",)
    stacks_experts = True
    names = TensorNames({**tensors.TRANSFORMER, "E": ("mlp", _moe_tensors)})

    def config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        fields.only(hf, attention_bias=True, hidden_act="silu", swiglu_alpha=1.702)
        heads = {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128}
        hf = {"rms_norm_eps": 1e-5, **heads, **hf}
        mixers = fields.windows(hf, "sliding_attention", 2)
        if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
            hf["rope_parameters"] = _ROPE
        return {
            **fields.transformer(hf, mixers, "E" * len(mixers), base=150000.0),
            "softmax_type": "learnable",
            "add_bias_linear": True,
            **fields.experts(hf, None, 4),
            "activation_func": ACTIVATIONS["quick_gelu"],
            "activation_func_clamp_value": hf.get("swiglu_limit", 7.0),
            "glu_linear_offset": 1.0,
        }

    def spellings(self, tensor_map: TensorMap, config: HybridConfig) -> Iterator[TensorMap]:
        """See `Adapter.spellings`. Of packed experts the rows are outputs, of others inputs."""
        yield from super().spellings(tensor_map, config)
        blocks = f"{tensor_map.theirs[0]}_blocks"
        layout = alternating(1) if blocks.endswith("gate_up_proj_blocks") else SAME
        yield same(tensor_map.ours[0], blocks, layout)
