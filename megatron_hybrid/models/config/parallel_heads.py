"""Attention and Mamba-2 side by side (Falcon-H1)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid.models.config.field_group import LayerFields


@dataclass
class ParallelHeadsFields(LayerFields):
    """Fields of an `H` layer besides those of its two parts."""

    attention_input_multiplier: float = 1.0
    """Factor of the input of the attention of an `H` layer."""

    attention_output_multiplier: float = 1.0
    """Factor of the output of the attention of an `H` layer."""

    mamba_input_multiplier: float = 1.0
    """Factor of the input of the Mamba-2 part of an `H` layer."""

    mamba_output_multiplier: float = 1.0
    """Factor of the output of the Mamba-2 part of an `H` layer."""
