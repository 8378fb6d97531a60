"""Recurrent layers: Mamba-2, Mamba-1, the gated short convolution and the delta rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from megatron_hybrid.models.config.field_group import Epsilon, LayerFields
from megatron_hybrid.utils.validation import Range


@dataclass
class Mamba2Fields(LayerFields):
    """Fields of a Mamba-2 layer."""

    followers: ClassVar = {
        "mamba_expand": ("mamba_num_heads",),
        "mamba_head_dim": ("mamba_num_heads",),
    }

    mamba_state_dim: Annotated[int, Range(ge=1)] = 128
    """States of each channel of a Mamba-2 layer."""

    mamba_head_dim: Annotated[int, Range(ge=1)] = 64
    """Channels of a Mamba-2 head."""

    mamba_num_groups: Annotated[int, Range(ge=1)] = 1
    """Groups of Mamba-2 heads that share B and C; a multiple or a divisor of the tensor-parallel
    size."""

    mamba_num_heads: Annotated[int, Range(ge=1)] | None = None
    """Heads of a Mamba-2 layer; None means mamba_expand * hidden_size / mamba_head_dim."""

    mamba_expand: Annotated[int, Range(ge=1)] = 2
    """Inner width of a Mamba-2 layer in multiples of hidden_size, if mamba_num_heads is None."""

    mamba_conv_kernel: Annotated[int, Range(ge=2)] = 4
    """Width of the causal convolution of a Mamba-2 layer."""

    mamba_chunk_size: Annotated[int, Range(ge=1)] = 64
    """Tokens per chunk of the SSD scan: affects speed only. With 1, token by token, a row has the
    same bits in every cut, in decodes and in training (on a CPU)."""

    mamba_conv_bias: bool = True
    """A bias in the convolution of a Mamba-2 layer."""

    mamba_proj_bias: bool = False
    """Biases in the projections into and out of a Mamba-2 layer."""

    mamba_gated_norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    """How a Mamba-2 layer ends, by group of heads: norm(y SiLU(z)), norm(y) SiLU(z), or y SiLU(z).
    """

    mamba_norm_epsilon: Epsilon = 1e-5
    """Epsilon of the output norm; megatron-core's value, not layernorm_epsilon."""

    mamba_dt_min: Annotated[float, Range(ge=0)] = 0.0
    """Lower limit of the time steps of a Mamba-2 layer, after their softplus."""

    mamba_dt_max: float | None = None
    """Upper limit of the time steps of a Mamba-2 layer."""

    mamba_section_multipliers: list[float] | None = None
    """Factors of z, x, B, C and dt after a Mamba-2 layer's input projection."""

    def check(self) -> None:
        if self.mamba_num_heads is None:
            width = self.mamba_expand * self.hidden_size
            if width % self.mamba_head_dim:
                raise ValueError(
                    f"the inner width mamba_expand * hidden_size = {width} is not a multiple of "
                    f"mamba_head_dim={self.mamba_head_dim}. Change one, or set mamba_num_heads."
                )
            self.mamba_num_heads = width // self.mamba_head_dim
        each = "Each group serves as many heads."
        self._require_multiple("mamba_num_heads", "mamba_num_groups", each)
        self._require_divisible("mamba_num_heads")
        self._require_divisible_or_copied("mamba_num_groups")
        limits = (self.mamba_dt_min, self.mamba_dt_max)
        if limits[1] is not None and limits[1] < limits[0]:
            raise ValueError(
                f"mamba_dt_min and mamba_dt_max are {limits}; time steps are positive, so the "
                "limits need 0 <= mamba_dt_min <= mamba_dt_max (None means no upper limit)."
            )
        multipliers = self.mamba_section_multipliers
        if multipliers is not None and len(multipliers) != 5:
            raise ValueError(
                f"mamba_section_multipliers is {multipliers}; it takes five factors, those of z, "
                "x, B, C and dt."
            )


@dataclass
class Mamba1Fields(LayerFields):
    """Fields of a Mamba-1 layer."""

    mamba1_state_dim: Annotated[int, Range(ge=1)] = 16
    """States of each channel of a Mamba-1 layer."""

    mamba1_inner_size: Annotated[int, Range(ge=1)] | None = None
    """Channels of a Mamba-1 layer; None means 2 * hidden_size."""

    mamba1_num_heads: Annotated[int, Range(ge=1)] = 1
    """Heads of a Mamba-1 layer: parts of its channels that have time steps, B and C of their own.
    """

    mamba1_dt_rank: Annotated[int, Range(ge=1)] | None = None
    """Rank of a Mamba-1 layer's time-step projection; None means hidden_size / 16, rounded up."""

    mamba1_conv_kernel: Annotated[int, Range(ge=2)] = 4
    """Width of the causal convolution of a Mamba-1 layer."""

    mamba1_chunk_size: Annotated[int, Range(ge=1)] = 64
    """Tokens per chunk of the selective scan in training: memory and speed only."""

    mamba1_conv_bias: bool = True
    """A bias in the convolution of a Mamba-1 layer."""

    mamba1_proj_bias: bool = False
    """Biases in the projections into and out of a Mamba-1 layer."""

    mamba1_norm: Literal["none", "weighted", "weightless"] = "none"
    """RMS norms of dt, B and C of a Mamba-1 layer, with weights (Jamba) or without (FalconMamba).
    """

    mamba1_norm_epsilon: Epsilon = 1e-6
    """Epsilon of the norms of dt, B and C."""

    def check(self) -> None:
        if self.mamba1_inner_size is None:
            self.mamba1_inner_size = 2 * self.hidden_size
        if self.mamba1_dt_rank is None:
            self.mamba1_dt_rank = -(-self.hidden_size // 16)
        self._require_divisible("mamba1_inner_size")
        if self.mamba1_num_heads == 1:
            return
        self._require_divisible("mamba1_num_heads")
        each = "All heads have as many channels."
        self._require_multiple("mamba1_inner_size", "mamba1_num_heads", each)
        if self.mamba1_norm != "none":
            raise ValueError(
                f"mamba1_norm is {self.mamba1_norm!r}, which layers of "
                f"mamba1_num_heads={self.mamba1_num_heads} do not have. Use 'none'."
            )


@dataclass
class GatedMemoryFields(LayerFields):
    """A gated memory unit has no fields but those of the Mamba-1 layer that it reads."""

    def check_source(self, number: int, symbols: str, layers: Sequence[Mamba1Fields]) -> None:
        source, width = self.pattern.memory_sources[number], self.mamba1_inner_size
        is_alone = self.pipeline_model_parallel_size == 1
        if not (source and is_alone and layers[source - 1].mamba1_inner_size == width):
            raise ValueError(
                f"layer {number} (J) reads the last Mamba-1 layer (S) before it: put one there, "
                f"with the same mamba1_inner_size={width}, and have one pipeline stage, not "
                f"pipeline_model_parallel_size={self.pipeline_model_parallel_size}."
            )


@dataclass
class ShortConvFields(LayerFields):
    """Fields of a gated-short-convolution layer."""

    short_conv_kernel: Annotated[int, Range(ge=2)] = 3
    """Width of the causal convolution of a gated-short-convolution layer."""

    short_conv_bias: bool = False
    """Biases in the convolution and the projections of a gated-short-convolution layer."""

    def check(self) -> None:
        self._require_divisible("hidden_size")


@dataclass
class RGLRUFields(LayerFields):
    """Fields of a layer with a real-gated linear recurrent unit."""

    lru_width: Annotated[int, Range(ge=1)] | None = None
    """Channels of a linear recurrent unit; None means hidden_size."""

    lru_num_blocks: Annotated[int, Range(ge=1)] = 1
    """Blocks of channels that a linear recurrent unit's gates do not mix."""

    lru_conv_kernel: Annotated[int, Range(ge=2)] = 4
    """Width of the causal convolution in front of a linear recurrent unit."""

    def check(self) -> None:
        if self.lru_width is None:
            self.lru_width = self.hidden_size
        each = "All blocks have as many channels."
        self._require_multiple("lru_width", "lru_num_blocks", each)
        self._require_divisible("lru_num_blocks")


@dataclass
class DeltaRuleFields(LayerFields):
    """Fields of a layer with a delta rule."""

    followers: ClassVar = {"linear_key_head_dim": ("linear_num_key_heads",)}

    linear_conv_kernel_dim: Annotated[int, Range(ge=2)] = 4
    """Width of the causal convolutions in front of a delta rule."""

    linear_key_head_dim: Annotated[int, Range(ge=1)] = 128
    """Width of a query and key head."""

    linear_value_head_dim: Annotated[int, Range(ge=1)] = 128
    """Width of a value head."""

    linear_num_key_heads: Annotated[int, Range(ge=1)] | None = None
    """Query and key heads of a Gated DeltaNet layer, all heads of a layer of Kimi Delta Attention
    or lightning attention; None means hidden_size // linear_key_head_dim."""

    linear_chunk_size: Annotated[int, Range(ge=1)] = 32
    """Tokens per chunk of a delta rule: speed only, as mamba_chunk_size."""

    linear_allow_neg_eigval: bool = False
    """Let beta of a delta rule range over (0, 2) rather than (0, 1), so that a transition
    of the state may have negative eigenvalues (arXiv 2411.12537)."""

    linear_norm_epsilon: Epsilon | None = None
    """Epsilon of the output norm of a linear attention layer; None means layernorm_epsilon."""

    linear_norm_zero_centered_gamma: bool | None = None
    """Whether the output norm's factor is 1 + weight. None means layernorm_zero_centered_gamma, as
    for all other norms. Qwen3-Next has False here and True there."""

    def check(self) -> None:
        if self.linear_num_key_heads is None:
            self.linear_num_key_heads = max(1, self.hidden_size // self.linear_key_head_dim)
        self._require_divisible_or_copied("linear_num_key_heads")


@dataclass
class KimiDeltaAttentionFields(LayerFields):
    """Fields of a Kimi Delta Attention layer besides those of every delta rule."""

    kda_low_rank_gates: bool = True
    """Project a Kimi Delta Attention layer's decays and output gates by two matrices, with
    linear_value_head_dim values between them; if False, by one."""

    kda_decay_bound: Annotated[float, Range(lt=0)] | None = None
    """b: a Kimi Delta Attention layer's log decays are b sigmoid(exp(A) (f(x) + dt_bias)), and so
    none is below b. None means -exp(A) softplus(f(x) + dt_bias)."""

    kda_fp32_conv: bool = False
    """Keep the weights of a Kimi Delta Attention layer's convolution in fp32."""

    def check(self) -> None:
        """See `FieldGroup.check`. It comes after that of `DeltaRuleFields`."""
        self._require_divisible("linear_num_key_heads")


@dataclass
class LightningAttentionFields(LayerFields):
    """Fields of a lightning attention layer besides the heads of a delta rule."""

    lightning_decay_factor: Annotated[float, Range(ge=0)] = 1.0
    """f: head h of H of a lightning attention layer decays by exp(-f 2^(-8 h / H)) per token."""

    lightning_rope: bool = False
    """Norm queries and keys of a lightning attention layer by head, turn them by RoPE and scale
    scores by linear_key_head_dim^-0.5, in the place of SiLU over queries, keys and values."""

    lightning_norm_groups: Annotated[int, Range(ge=1)] = 1
    """Groups of channels of a lightning attention layer's output norm."""

    def check(self) -> None:
        """See `FieldGroup.check`. It comes after that of `DeltaRuleFields`."""
        self._require_divisible("linear_num_key_heads")
        each = "Groups have as many heads."
        self._require_multiple("linear_num_key_heads", "lightning_norm_groups", each)
        self._require_divisible_or_copied("lightning_norm_groups")
        if self.lightning_rope:
            dims = int(self.linear_key_head_dim * self.rotary_percent)
            self._require_even_rotation(dims, "linear_key_head_dim")


@dataclass
class GatedDeltaNetFields(LayerFields):
    """Fields of a Gated DeltaNet layer besides those of every delta rule."""

    followers: ClassVar = {"linear_num_key_heads": ("linear_num_value_heads",)}

    linear_num_value_heads: Annotated[int, Range(ge=1)] | None = None
    """Value heads of a Gated DeltaNet layer, a multiple of the key heads; twice as many if None."""

    def check(self) -> None:
        """See `FieldGroup.check`. It comes after that of `DeltaRuleFields`."""
        if self.linear_num_value_heads is None:
            self.linear_num_value_heads = 2 * self.linear_num_key_heads
        each = "Each key head serves as many value heads."
        self._require_multiple("linear_num_value_heads", "linear_num_key_heads", each)
        self._require_divisible("linear_num_value_heads")
