"""Large models cut down to what a test can train, with their kinds of layers and options."""

from collections.abc import Mapping
from typing import Any

WIDTHS = {
    "hidden_size": 64,
    "vocab_size": 128,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "mamba1_inner_size": 128,
    "mamba1_dt_rank": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
"""Fields of HybridConfig, and what they are cut to."""

SHARES = {
    "num_query_groups": "num_attention_heads",
    "mamba_num_groups": "mamba_num_heads",
    "linear_num_key_heads": "linear_num_value_heads",
}
"""Fields that stay the same part of another one, if not less than 1."""


def cut_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a small model with the options of a large one. Its layers are the first ones that
    are of all kinds; what is already small stays."""
    pattern, cut = fields["layer_pattern"], dict(fields)
    cut["layer_pattern"] = next(
        pattern[:end] for end in range(1, len(pattern) + 1) if set(pattern[:end]) == set(pattern)
    )
    for name, width in WIDTHS.items():
        if name in fields:
            cut[name] = min(fields[name], width)
    for name, whole in SHARES.items():
        if name in fields:
            cut[name] = max(1, fields[name] * cut[whole] // fields[whole])
    return cut
