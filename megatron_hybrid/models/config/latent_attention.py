"""Multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_hybrid.models.config.field_group import LayerFields


@dataclass
class LatentAttentionFields(LayerFields):
    """Fields of multi-head latent attention."""

    if TYPE_CHECKING:
        position_embedding_type: str = "rope"

    q_lora_rank: int | None = 512
    """Rank of an MLA layer's query projection; None: full rank, in one projection."""

    kv_lora_rank: int = 512
    """Width of the latent from which an MLA layer computes keys and values."""

    qk_head_dim: int = 128
    """Width of the part of an MLA head's query and key that RoPE does not rotate."""

    qk_pos_emb_head_dim: int = 64
    """Width of the part of an MLA head's query that RoPE rotates (unless position_embedding_type is
    none), and of the key part that all heads share."""

    v_head_dim: int = 128
    """Width of an MLA head's value."""

    latent_norm: bool = True
    """Norms behind an MLA layer's down projections."""

    latent_norm_epsilon: float | None = None
    """Epsilon of these norms; None: layernorm_epsilon."""

    def check(self) -> None:
        """See `FieldGroup.check`."""
        self._require_positive("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        if self.q_lora_rank is not None:
            self._require_positive("q_lora_rank")
        self._require_divisible("num_attention_heads")
        if self.position_embedding_type == "rope" and self.qk_pos_emb_head_dim % 2:
            raise ValueError(
                f"RoPE rotates qk_pos_emb_head_dim={self.qk_pos_emb_head_dim} dimensions; it needs "
                "an even number. For no rotation use position_embedding_type='none'."
            )
