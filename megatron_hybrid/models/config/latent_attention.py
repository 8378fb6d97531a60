"""Multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from megatron_hybrid.models.config.field_group import Epsilon, LayerFields
from megatron_hybrid.utils.validation import Range


@dataclass
class LatentAttentionFields(LayerFields):
    """Fields of multi-head latent attention."""

    if TYPE_CHECKING:
        position_embedding_type: str = "rope"

    q_lora_rank: Annotated[int, Range(ge=1)] | None = 512
    """Rank of an MLA layer's query projection; None: full rank, in one projection."""

    kv_lora_rank: Annotated[int, Range(ge=1)] = 512
    """Width of the latent from which an MLA layer computes keys and values."""

    qk_head_dim: Annotated[int, Range(ge=1)] = 128
    """Width of the part of an MLA head's query and key that RoPE does not rotate."""

    qk_pos_emb_head_dim: Annotated[int, Range(ge=1)] = 64
    """Width of the part of an MLA head's query that RoPE rotates (unless position_embedding_type is
    none), and of the key part that all heads share."""

    v_head_dim: Annotated[int, Range(ge=1)] = 128
    """Width of an MLA head's value."""

    latent_norm: bool = True
    """Norms after an MLA layer's down projections."""

    latent_norm_epsilon: Epsilon | None = None
    """Epsilon of these norms; None: layernorm_epsilon."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        self._require_divisible("num_attention_heads")
        if self.position_embedding_type == "rope" and self.qk_pos_emb_head_dim % 2:
            raise ValueError(
                f"RoPE rotates qk_pos_emb_head_dim={self.qk_pos_emb_head_dim} dimensions; it needs "
                "an even number. For no rotation use position_embedding_type='none'."
            )
