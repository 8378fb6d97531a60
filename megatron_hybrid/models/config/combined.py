"""Layers of several parts: attention next to Mamba-2 (Falcon-H1), and shared blocks (Zamba2)."""

from dataclasses import dataclass
from typing import Annotated

from megatron_hybrid.models.config.field_group import LayerFields
from megatron_hybrid.utils.validation import Range


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


_PLAIN = {
    "norm_placement": "pre",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "attention_output_bias": None,
    "kv_source_layer": None,
    "keys_as_values": False,
    "attention_output_gate": False,
    "value_channels": None,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "mlp_gate_multiplier": 1.0,
    "mlp_output_multiplier": 1.0,
    "activation_sparsity": 0.0,
    "residual_rank": None,
    "query_rank": None,
}
"""Field -> the one value that a shared block supports."""


@dataclass
class SharedBlockFields(LayerFields):
    """Fields of a layer with a shared block."""

    shared_block_adapter_rank: Annotated[int, Range(ge=1)] | None = 16
    """Rank of the adapters that each layer adds to the projections of its shared block; None means
    no adapters."""

    shared_block_attention_adapters: bool = False
    """Adapters for queries, keys and values too, not for the MLP alone."""

    def check(self) -> None:
        if self.shared_block_attention_adapters and self.shared_block_adapter_rank is None:
            raise ValueError(
                "shared_block_attention_adapters is True, but shared_block_adapter_rank is None. "
                "Give a rank."
            )
        for name, value in _PLAIN.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but shared blocks (Z, V in layer_pattern "
                    f"{self.layer_pattern!r}) need {value!r}. Set it for the other layers alone, "
                    "by layer_overrides."
                )
