"""Per-layer inputs: a further token embedding for single layers (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid.models.config.field_group import ModelFields


@dataclass
class PerLayerInputFields(ModelFields):
    """Fields of the per-layer inputs."""

    per_layer_input_size: int | None = None
    """Width of the token embedding of each `P` layer; see `models/per_layer_embedding.py`."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        self._require_for_layers(
            "per_layer_input_size", "per-layer input (P)", "the width of such an input"
        )
        if self.pipeline_model_parallel_size > 1:
            raise ValueError(
                "per-layer inputs (P) are made of the tokens, which the first pipeline stage alone "
                f"sees, but there are {self.pipeline_model_parallel_size} stages. Use 1."
            )
