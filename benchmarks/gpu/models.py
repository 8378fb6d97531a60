"""Published models with random weights, cut to what one GPU holds, or to toy size for a CPU."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.bench import Bench
from megatron_hybrid import HybridConfig, HybridModel, build_hybrid_model
from megatron_hybrid.checkpoints.folder import config_of

CONFIGS = Path(__file__).parents[2] / "tests" / "functional" / "huggingface" / "hub_configs"
"""config.json as published."""


@dataclass(frozen=True)
class Shape:
    """A published model."""

    name: str
    num_symbols: int | None
    """Of its layer pattern, counted from the front, for one GPU; None: all."""
    num_toy_symbols: int
    """The same with a layer of each kind."""


SHAPES = {
    "nemotron_h_8b": Shape("Nemotron-H-8B", None, 9),
    "qwen3_5_4b": Shape("Qwen3.5-4B", None, 8),
    "qwen3_next_80b_a3b": Shape("Qwen3-Next, 12 of 48 layers", 24, 8),
    "jamba_1_5_mini": Shape("Jamba-1.5-Mini, 8 of 32 layers", 16, 12),
    "gemma_3_4b": Shape("Gemma-3-4B", None, 12),
}
TOY = {
    "params_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "sliding_window": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
    "mamba_chunk_size": 16,
    "mamba1_inner_size": 128,
    "mamba1_dt_rank": 8,
    "mamba1_state_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
"""Fields in the place of published ones, where a model has them."""


def cut_config(name: str, toy: bool, pattern: str | None = None, few: bool = False) -> HybridConfig:
    """The configuration of a published model, cut.

    Args:
        name: of a file of `CONFIGS` and a key of `SHAPES`.
        toy: toy size, and a layer of each kind.
        few: a layer of each kind, of whatever size.
        pattern: symbols of its layers; None: as its `Shape` says.
    """
    values = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    whole = config_of(values, name).to_dict()
    shape = SHAPES[name]
    if pattern is None:
        pattern = whole["layer_pattern"][
            : shape.num_toy_symbols if toy or few else shape.num_symbols
        ]
    fields = {"layer_pattern": pattern, "huggingface_config": None}
    if toy:
        fields |= {key: value for key, value in TOY.items() if whole.get(key) is not None}
    return HybridConfig.from_dict(whole | fields)


def cut_model(name: str, bench: Bench) -> HybridModel:
    """Build the model with random weights on the bench's device, of few layers where each call is
    made once."""
    torch.manual_seed(0)
    with torch.device(bench.device):
        return build_hybrid_model(cut_config(name, bench.toy, few=bench.once)).eval()
