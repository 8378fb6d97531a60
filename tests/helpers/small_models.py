"""Small random models for the tests of this folder."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.layer_pattern import LAYER_KINDS
from megatron_hybrid.training.lora import adapters_of

ALL_MIXERS = "MG*-W-"
ONE_OF_EACH = ["SJ" if symbol == "J" else symbol for symbol in LAYER_KINDS]
"""The shortest pattern with each layer kind: a J needs an S to read."""
EVERY_KIND = "MGSC*W-EKL+BHZPZ*QRUVJ"
FIELDS_OF_EVERY_KIND = dict(
    mamba_num_heads=6,
    attention_chunk_size=6,
    num_moe_experts=4,
    moe_ffn_hidden_size=20,
    num_shared_blocks=1,
    shared_block_adapter_rank=6,
    per_layer_input_size=12,
    layer_overrides={"E": {"moe_shared_expert_intermediate_size": 24}},
)


def small_fields(pattern: str = ALL_MIXERS, **fields) -> dict:
    """Every dimension a different number where it can be, so that mix-ups do not cancel."""
    return {
        "layer_pattern": pattern,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 61,
        "ffn_hidden_size": 80,
        "sliding_window": 7,
        "mamba_head_dim": 16,
        "mamba_state_dim": 12,
        "mamba_num_groups": 2,
        "mamba_chunk_size": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_chunk_size": 8,
        "q_lora_rank": 20,
        "kv_lora_rank": 28,
        "qk_head_dim": 10,
        "qk_pos_emb_head_dim": 6,
        "v_head_dim": 14,
        "init_method_std": 0.15,
        **fields,
    }


def small_config(pattern: str = ALL_MIXERS, **fields) -> HybridConfig:
    return HybridConfig(**small_fields(pattern, **fields))


def small_model(pattern: str = ALL_MIXERS, **fields) -> HybridModel:
    """In eval mode."""
    return build_hybrid_model(small_config(pattern, **fields)).eval()


def fill_adapters(model: HybridModel, std: float = 0.1, seed: int = 0) -> None:
    """Give values to all B, which begin at 0."""
    generator = torch.Generator().manual_seed(seed)
    for projection in adapters_of(model).values():
        nn.init.normal_(projection.lora.b, std=std, generator=generator)


def packed_params(*bounds: int, padded: list[int] | None = None) -> PackedSeqParams:
    """Of sequences between these rows."""
    ends = torch.tensor(bounds, dtype=torch.int32)
    more = None if padded is None else torch.tensor(padded, dtype=torch.int32)
    return PackedSeqParams("thd", ends, ends, more, more)


def random_tokens(*shape: int, vocab_size: int = 61) -> torch.Tensor:
    return torch.randint(0, vocab_size, shape)
