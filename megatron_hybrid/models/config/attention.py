"""Attention: heads, scores, windows and chunks; multi-head latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megatron_hybrid.models.config.field_group import Epsilon, LayerFields
from megatron_hybrid.utils.validation import Range


@dataclass
class AttentionFields(LayerFields):
    """Fields of every attention layer that keeps keys and values per head."""

    followers: ClassVar = {"num_attention_heads": ("num_query_groups", "kv_channels")}

    num_attention_heads: int = 0
    """Query heads."""

    num_query_groups: int | None = None
    """Key/value heads, a multiple or a divisor of the tensor-parallel size. None means one for each
    query head."""

    kv_channels: int | None = None
    """Width of a head; None means hidden_size / num_attention_heads."""

    value_channels: Annotated[int, Range(ge=1)] | None = None
    """Width of a value head; None means kv_channels."""

    value_multiplier: float = 1.0
    """Factor of the values."""

    query_rank: Annotated[int, Range(ge=1)] | None = None
    """Rank of the projection of queries, in two parts with a norm between them. None means full
    rank, in one projection with keys and values."""

    softmax_scale: Annotated[float, Range(gt=0)] | None = None
    """Factor of attention scores. None means kv_channels^-0.5, and (kv_channels / 2)^-0.5 in
    differential attention."""

    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Sink of each softmax: none, a score of 0, or a learnt score per head."""

    attention_logit_softcap: Annotated[float, Range(gt=0)] | None = None
    """c: attention scores become c tanh(scores / c)."""

    attention_output_gate: bool = False
    """Multiply each head's output by the sigmoid of a gate, projected with the queries."""

    attention_head_gate: bool = False
    """With attention_output_gate: one gate for each head, in place of one for each channel."""

    add_qkv_bias: bool = False
    """Biases in the projections of queries, keys and values, even without add_bias_linear."""

    attention_output_bias: bool | None = None
    """Whether attention's output projection has a bias; None means as add_bias_linear says."""

    qk_layernorm: bool = False
    """Norm queries and keys, before RoPE."""

    qk_layernorm_scope: Literal["head", "all_heads"] = "head"
    """Whether qk_layernorm norms each head, or all heads of a token as one vector."""

    qk_layernorm_after_rope: bool = False
    """Norm queries and keys after RoPE instead."""

    qk_l2_norm: bool = False
    """Give each query and key head a mean square of 1, after RoPE."""

    value_l2_norm: bool = False
    """Give each value head a mean square of 1."""

    keys_as_values: bool = False
    """Values are the projected keys, before norm and RoPE."""

    kv_source_layer: int | None = None
    """Number of an earlier layer (from 1, through the whole model) whose keys and values this one
    reads instead of its own; set it in layer_overrides."""

    differential_lambda: Annotated[float, Range(gt=0, lt=1)] | None = None
    """l of differential attention: the halves of a head's queries and keys have a softmax each, and
    the second output is subtracted, times l plus what is learnt. None means one softmax a head."""

    attention_temperature_scale: Annotated[float, Range(ge=0)] | None = None
    """s: queries are multiplied by 1 + s log(1 + floor((position + offset) / floor))."""

    attention_temperature_floor: Annotated[int, Range(ge=1)] = 8192
    """Positions per step of the attention temperature."""

    attention_temperature_offset: Annotated[int, Range(ge=0)] = 1
    """Added to the position before it is divided: 1 in Llama 4, 0 in Ministral 3."""

    @property
    def num_kv_projections(self) -> int:
        """Number of key and value projections of an attention layer: 2, 1 or 0."""
        return 0 if self.kv_source_layer is not None else 1 if self.keys_as_values else 2

    @property
    def softmaxes_per_head(self) -> int:
        """Softmaxes of an attention head: 2 in differential attention, else 1."""
        return 1 if self.differential_lambda is None else 2

    @property
    def rotary_dim(self) -> int:
        """Dimensions of an attention head that RoPE rotates."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def has_attention_output_bias(self) -> bool:
        """Whether the output projection of attention has a bias."""
        own = self.attention_output_bias
        return self.add_bias_linear if own is None else own

    def check(self) -> None:
        self._require_positive("num_query_groups", "kv_channels")
        each = "Each group serves as many heads."
        self._require_multiple("num_attention_heads", "num_query_groups", each)
        if self.keys_as_values and self.value_channels not in (None, self.kv_channels):
            raise ValueError(
                f"value_channels is {self.value_channels}, but keys_as_values=True makes values of "
                f"keys, {self.kv_channels} wide. Leave it at None."
            )
        has_biases = self.add_bias_linear or self.add_qkv_bias
        is_alone = self.num_query_groups == 1 and self.kv_source_layer is None
        if self.query_rank is not None and (has_biases or not is_alone):
            raise ValueError(
                f"query_rank is {self.query_rank}, which needs num_query_groups=1 with keys and "
                "values of its own, and no biases. Set these, or leave query_rank at None."
            )
        has_form = self.position_embedding_type == "none" and self.softmax_type == "vanilla"
        has_form = has_form and self.kv_channels % 2 == 0 and not self.qk_layernorm
        if self.differential_lambda is not None and not has_form:
            raise ValueError(
                f"differential_lambda is {self.differential_lambda}, which needs an even "
                "kv_channels, position_embedding_type='none', softmax_type='vanilla' and "
                "qk_layernorm=False. Set these, or leave differential_lambda at None."
            )
        self.check_ranks()
        self._require_even_rotation(self.rotary_dim, "kv_channels")

    def check_ranks(self) -> None:
        """Raise ValueError unless heads divide over the ranks. This runs before megatron-core's own
        checks, too."""
        self._require_divisible("num_attention_heads")
        if self.num_query_groups is not None:
            self._require_divisible_or_copied("num_query_groups")

    def check_source(self, number: int, symbols: str, layers: Sequence[AttentionFields]) -> None:
        source = self.kv_source_layer
        if source is None:
            return
        if self.pipeline_model_parallel_size > 1:
            raise ValueError(
                f"layer {number} has kv_source_layer={source}, which needs both layers on one "
                f"pipeline stage, but there are {self.pipeline_model_parallel_size}. Use 1."
            )
        alike = ("num_query_groups", "kv_channels", "value_channels", "sliding_window")
        alike += ("attention_chunk_size",)
        if (
            not 1 <= source < number
            or symbols[source - 1] != symbols[number - 1]
            or layers[source - 1].kv_source_layer is not None
            or any(getattr(layers[source - 1], name) != getattr(self, name) for name in alike)
        ):
            raise ValueError(
                f"layer {number} ({symbols[number - 1]}) has kv_source_layer={source}; it must be "
                "a layer before it of the same symbol, with keys and values of its own and the "
                f"same {', '.join(alike)}."
            )


@dataclass
class WindowFields(LayerFields):
    """Fields of sliding-window attention."""

    sliding_window: int | None = None
    """Tokens in the window of a `W` layer: the token at t sees (t - sliding_window, t]."""

    def check(self) -> None:
        self._require_for_layers(
            "sliding_window",
            "sliding-window attention (W)",
            "the number of positions that they see",
        )


@dataclass
class ChunkFields(LayerFields):
    """Fields of chunked attention."""

    attention_chunk_size: int | None = None
    """Tokens in a chunk of an `L` layer: a token sees its own chunk up to itself."""

    def check(self) -> None:
        self._require_for_layers(
            "attention_chunk_size", "chunked attention (L)", "the number of positions of a chunk"
        )


@dataclass
class LatentAttentionFields(LayerFields):
    """Fields of multi-head latent attention."""

    q_lora_rank: Annotated[int, Range(ge=1)] | None = 512
    """Rank of an MLA layer's query projection; None means full rank, in one projection."""

    kv_lora_rank: Annotated[int, Range(ge=1)] = 512
    """Width of the latent from which an MLA layer computes keys and values."""

    qk_head_dim: Annotated[int, Range(ge=1)] = 128
    """Width of the part of an MLA head's query and key that RoPE does not rotate."""

    qk_pos_emb_head_dim: Annotated[int, Range(ge=1)] = 64
    """Width of the part of an MLA head's query that RoPE rotates (unless position_embedding_type is
    none), and of the key part that all heads share."""

    v_head_dim: Annotated[int, Range(ge=1)] = 128
    """Width of an MLA head's value."""

    latent_output_gate: bool = False
    """Multiply each head's output of an MLA layer by the sigmoid of a gate, projected from its
    input."""

    latent_norm: bool = True
    """Norms after an MLA layer's down projections."""

    latent_norm_epsilon: Epsilon | None = None
    """Epsilon of these norms; None means layernorm_epsilon."""

    def check(self) -> None:
        self._require_divisible("num_attention_heads")
        self._require_even_rotation(self.qk_pos_emb_head_dim, "qk_pos_emb_head_dim")
