"""Attention and Mamba-2 side by side (Falcon-H1)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid.models.config.field_group import LayerFields


@dataclass
class ParallelHeadsFields(LayerFields):
    """What an `H` layer has beside the fields of its two parts."""

    attention_input_multiplier: float = 1.0
    """Factor of what the attention of an `H` layer takes in."""

    attention_output_multiplier: float = 1.0
    """Factor of what the attention of an `H` layer gives out."""

    mamba_input_multiplier: float = 1.0
    """Factor of what the Mamba-2 part of an `H` layer takes in."""

    mamba_output_multiplier: float = 1.0
    """Factor of what the Mamba-2 part of an `H` layer gives out."""
