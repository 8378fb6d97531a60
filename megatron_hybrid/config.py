"""The configuration of a hybrid model: a megatron-core TransformerConfig plus what hybrids add."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from megatron_hybrid.compat import TransformerConfig, have_apex, replace_deprecated_defaults
from megatron_hybrid.models.layer_pattern import layer_symbols, split_stages


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2, the activation of Nemotron-H; core's own one is compiled at its first call."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": squared_relu,
}
"""The activation functions of an MLP, by the names that config.json uses."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What config.json holds: the architecture and its numerics, nothing of a particular run.
_SAVED_FIELDS = (
    "layer_pattern",
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "sliding_window",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "share_embeddings_and_output_weights",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "mamba_expand",
    "mamba_conv_kernel",
    "mamba_chunk_size",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_chunk_size",
    "recurrent_state_dtype",
    "normalization",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "qk_layernorm",
    "softmax_scale",
    "attention_output_gate",
    "add_bias_linear",
    "add_qkv_bias",
    "gated_linear_unit",
    "activation_func",
    "init_method_std",
    "params_dtype",
)

# Fields of TransformerConfig that HybridModel does not act upon: the one value it accepts, and what
# to do instead. Without this table they would be ignored in silence.
_FIXED_FIELDS: dict[str, tuple[Any, str]] = {
    "attention_dropout": (0.0, "use hidden_dropout"),
    "window_size": (None, "use the symbol W in layer_pattern and sliding_window"),
    "window_attn_skip_freq": (None, "place the symbols W and * in layer_pattern"),
    "no_rope_freq": (None, "use position_embedding_type for the whole model"),
    "experimental_attention_variant": (None, "use the symbol G in layer_pattern"),
    "num_layers_in_first_pipeline_stage": (None, "mark the stages with | in layer_pattern"),
    "num_layers_in_last_pipeline_stage": (None, "mark the stages with | in layer_pattern"),
    "pipeline_model_parallel_layout": (None, "mark the stages with | in layer_pattern"),
    "virtual_pipeline_model_parallel_size": (None, "use one stage per pipeline rank"),
    "context_parallel_size": (1, "shard by tensor_model_parallel_size"),
    "sequence_parallel": (False, "shard by tensor_model_parallel_size alone"),
    "expert_model_parallel_size": (1, "shard by tensor_model_parallel_size"),
    "num_moe_experts": (None, "use the symbol - for a dense MLP"),
    "mtp_num_layers": (None, "train without multi-token prediction"),
    "multi_latent_attention": (False, "use the symbol * for attention"),
    "qk_l2_norm": (False, "use qk_layernorm"),
    "qk_clip": (False, "use qk_layernorm"),
    "softmax_type": ("vanilla", "use the ordinary softmax"),
    "rotary_interleaved": (False, "permute the weights to the half-split order"),
    "apply_rope_fusion": (False, "use the unfused RoPE"),
    "apply_residual_connection_post_layernorm": (False, "use pre-norm residuals"),
    "fp32_residual_connection": (False, "use params_dtype=torch.float32"),
    "recompute_granularity": (None, "train with a smaller micro batch"),
    "use_te_activation_func": (False, "use activation_func"),
    "cpu_offloading": (False, "train with a smaller micro batch"),
    "cuda_graph_impl": ("none", "run eagerly"),
    "flash_decode": (False, "use DynamicInferenceEngine"),
    "fp8": (None, "use params_dtype=torch.bfloat16"),
    "fp4": (None, "use params_dtype=torch.bfloat16"),
    "use_mup": (False, "scale the learning rates outside of the model"),
}


@dataclass
class HybridConfig(TransformerConfig):
    """Configuration of a hybrid model: every field of megatron-core's TransformerConfig, and these.

    `HybridConfig(layer_pattern="MM*-MM*-", hidden_size=64, num_attention_heads=4, vocab_size=256)`
    is complete. `num_layers` follows from the pattern.

    Raises:
        ValueError: a field has no legal value, or contradicts another one; the message names the
            field, the value, the limit and what to do.
    """

    layer_pattern: str = ""
    """One symbol per layer, `|` between pipeline stages; see `models/layer_pattern.py`."""

    vocab_size: int = 0
    """Number of tokens. Inside, padded to a multiple of the tensor-parallel size."""

    sliding_window: int | None = None
    """Positions that a `W` layer sees, its own included: (t - sliding_window, t]."""

    position_embedding_type: Literal["rope", "none"] = "rope"
    """What tells attention where a token is. `none` suits hybrids: recurrent layers keep order."""

    rotary_base: float = 10000.0
    """Base of the RoPE frequencies, base^(-2i/d)."""

    rotary_percent: float = 1.0
    """Leading part of each attention head that RoPE rotates."""

    share_embeddings_and_output_weights: bool = False
    """Use the word embedding as the output layer too."""

    mamba_expand: int = 2
    """Inner width of a Mamba-2 layer in multiples of hidden_size, if mamba_num_heads is None."""

    mamba_num_groups: int = 1
    """Groups of Mamba-2 heads that share B and C; a multiple of the tensor-parallel size."""

    mamba_conv_kernel: int = 4
    """Width of the causal convolution of a Mamba-2 layer."""

    mamba_chunk_size: int = 64
    """Tokens per chunk of the SSD scan: speed only, no effect on the function that is computed."""

    linear_num_key_heads: int | None = None
    """Query and key heads of a Gated DeltaNet layer; None: hidden_size // linear_key_head_dim."""

    linear_num_value_heads: int | None = None
    """Value heads of a Gated DeltaNet layer, a multiple of the key heads; None: twice as many."""

    linear_chunk_size: int = 32
    """Tokens per chunk of the gated delta rule: speed only, as mamba_chunk_size."""

    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """`local`: plain torch. `transformer_engine`: fused norm and projection, on CUDA. `auto`: the
    second where Transformer Engine is installed and the model is built on a CUDA device."""

    recurrent_state_dtype: torch.dtype = torch.float32
    """What recurrent states are stored in between calls; arithmetic on them is always fp32."""

    # TransformerConfig fields with other defaults here: a present-day decoder that runs anywhere.
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of every norm outside of the recurrent mixers."""

    add_bias_linear: bool = False
    """Biases in the projections of attention and MLP."""

    gated_linear_unit: bool = True
    """SwiGLU and its like in the MLP."""

    activation_func: Callable = F.silu
    """Activation of the MLP; one of `ACTIVATIONS`."""

    hidden_dropout: float = 0.0
    """Dropout on the embedding and on each layer's output, in training."""

    attention_dropout: float = 0.0
    """Not supported: stays 0."""

    use_cpu_initialization: bool = True
    """Draw initial weights on the CPU, so that they do not depend on the device."""

    def __post_init__(self):
        symbols = layer_symbols(self.layer_pattern)
        if self.num_layers not in (0, len(symbols)):
            raise ValueError(
                f"num_layers is {self.num_layers}, but layer_pattern {self.layer_pattern!r} has "
                f"{len(symbols)} layers. Leave num_layers out: it follows from the pattern."
            )
        self.num_layers = len(symbols)
        self._require_positive("hidden_size", "vocab_size", "tensor_model_parallel_size")
        split_stages(self.layer_pattern, self.pipeline_model_parallel_size)
        if self.share_embeddings_and_output_weights and self.pipeline_model_parallel_size > 1:
            raise ValueError(
                "share_embeddings_and_output_weights=True needs embedding and output layer on one "
                f"pipeline stage, but there are {self.pipeline_model_parallel_size}. Untie them."
            )
        self._check_fixed_fields()
        self._unify_dtypes()
        if self.has_attention:
            self._require_positive("num_attention_heads")
        else:
            # Core divides by it and shards it, attention or not.
            self.num_attention_heads = self.tensor_model_parallel_size
            self.num_query_groups = self.kv_channels = None
        replace_deprecated_defaults(self)
        super().__post_init__()
        if self.has_attention:
            self._check_attention("W" in symbols)
        if "M" in symbols:
            self._check_mamba()
        if "G" in symbols:
            self._check_gated_delta_net()
        if "-" in symbols:
            self._require_positive("ffn_hidden_size")
            self._require_divisible("ffn_hidden_size")
        if self.layer_spec not in ("auto", "local", "transformer_engine"):
            raise ValueError(
                f"layer_spec is {self.layer_spec!r}; use 'auto', 'local' or 'transformer_engine'."
            )
        if self.gradient_accumulation_fusion and not have_apex("fused_weight_gradient_mlp_cuda"):
            raise ValueError(
                "gradient_accumulation_fusion=True needs NVIDIA's apex with its CUDA extensions "
                "(the `apex` on PyPI is another project), which is not installed. Build it as the "
                "README says, or leave the field at False."
            )
        if self.layernorm_zero_centered_gamma and self.layer_spec != "transformer_engine":
            raise ValueError(
                "layernorm_zero_centered_gamma=True needs layer_spec='transformer_engine', but "
                f"layer_spec is {self.layer_spec!r}. For the others add 1 to the norm weights."
            )

    def to_dict(self) -> dict[str, Any]:
        """The architecture as JSON-able values: what `config.json` of a checkpoint holds."""
        names = {function: name for name, function in ACTIVATIONS.items()}
        values = {name: getattr(self, name) for name in _SAVED_FIELDS}
        values["activation_func"] = names[self.activation_func]
        if not self.has_attention:
            # What __post_init__ put there depends on the tensor-parallel size of this run.
            values.update(num_attention_heads=0, num_query_groups=None, kv_channels=None)
        for field in ("params_dtype", "recurrent_state_dtype"):
            values[field] = str(values[field]).removeprefix("torch.")
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> HybridConfig:
        """The config that `to_dict` described; `overrides` are fields of this run.

        Raises:
            ValueError: an unknown key, or a value that no config takes.
        """
        unknown = sorted(set(values) - set(_SAVED_FIELDS))
        if unknown:
            raise ValueError(
                f"config has the unknown key {unknown[0]!r}. Known: {', '.join(_SAVED_FIELDS)}."
            )
        fields = dict(values)
        for field in ("params_dtype", "recurrent_state_dtype"):
            if field in fields:
                fields[field] = _lookup(_DTYPES, field, fields[field])
        if "activation_func" in fields:
            fields["activation_func"] = _lookup(
                ACTIVATIONS, "activation_func", fields["activation_func"]
            )
        return cls(**{**fields, **overrides})

    def _require_positive(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a whole number of 1 or more.")

    def _require_divisible(self, *fields: str) -> None:
        size = self.tensor_model_parallel_size
        for field in fields:
            value = getattr(self, field)
            if value % size:
                raise ValueError(
                    f"{field} is {value}, which does not divide evenly over "
                    f"tensor_model_parallel_size={size}. Use a multiple of {size}."
                )

    def _check_fixed_fields(self) -> None:
        for field, (accepted, instead) in _FIXED_FIELDS.items():
            value = getattr(self, field, accepted)  # a few exist in one release only
            if value != accepted:
                raise ValueError(
                    f"{field} is {value!r}, which HybridModel does not support: leave it at "
                    f"{accepted!r} and {instead}."
                )
        if self.activation_func not in ACTIVATIONS.values():
            raise ValueError(
                f"activation_func is {self.activation_func!r}; "
                f"use one of config.ACTIVATIONS: {', '.join(ACTIVATIONS)}."
            )
        if self.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(
                f"normalization is {self.normalization!r}; use 'RMSNorm' or 'LayerNorm'."
            )

    def _unify_dtypes(self) -> None:
        """`bf16` / `fp16` and `params_dtype` say one thing, whichever of them the caller set."""
        if self.bf16 or self.fp16:
            named = torch.bfloat16 if self.bf16 else torch.float16
            if self.params_dtype not in (torch.float32, named):
                raise ValueError(
                    f"bf16={self.bf16} and fp16={self.fp16} contradict params_dtype="
                    f"{self.params_dtype}. Set params_dtype alone."
                )
            self.params_dtype = named
        if self.params_dtype not in _DTYPES.values():
            raise ValueError(f"params_dtype is {self.params_dtype}; use one of {list(_DTYPES)}.")
        self.bf16 = self.params_dtype == torch.bfloat16
        self.fp16 = self.params_dtype == torch.float16
        self.pipeline_dtype = self.params_dtype  # of the hidden states between stages
        if self.recurrent_state_dtype == torch.float16:
            raise ValueError(
                "recurrent_state_dtype is torch.float16, whose range ends at 65504: a state that "
                "adds up over a long sequence overflows or underflows in silence. Use "
                "torch.float32, or torch.bfloat16 for half the memory."
            )
        if self.recurrent_state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"recurrent_state_dtype is {self.recurrent_state_dtype}; "
                "use torch.float32 or torch.bfloat16."
            )

    def _check_attention(self, windowed: bool) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, not a multiple of "
                f"num_query_groups={self.num_query_groups}. Each group serves as many heads."
            )
        self._require_divisible("num_query_groups")
        if self.position_embedding_type not in ("rope", "none"):
            raise ValueError(
                f"position_embedding_type is {self.position_embedding_type!r}; "
                "use 'rope' or 'none'."
            )
        if self.position_embedding_type == "rope":
            if not 0.0 < self.rotary_percent <= 1.0:
                raise ValueError(
                    f"rotary_percent is {self.rotary_percent}; it must lie in (0, 1]. "
                    "For no rotation use position_embedding_type='none'."
                )
            if self.rotary_dim % 2 or not self.rotary_dim:
                raise ValueError(
                    f"RoPE rotates {self.rotary_dim} of kv_channels={self.kv_channels} dimensions "
                    f"(rotary_percent={self.rotary_percent}); it needs an even number of 2 or more."
                )
        if windowed and self.sliding_window is None:
            raise ValueError(
                f"layer_pattern {self.layer_pattern!r} has sliding-window layers (W), but "
                "sliding_window is None. Set it to the number of positions that they see."
            )
        if self.sliding_window is not None:
            self._require_positive("sliding_window")

    def _check_mamba(self) -> None:
        self._require_positive(
            "mamba_state_dim",
            "mamba_head_dim",
            "mamba_num_groups",
            "mamba_expand",
            "mamba_chunk_size",
        )
        self._require_conv_kernel("mamba_conv_kernel")
        if self.mamba_num_heads is None:
            width = self.mamba_expand * self.hidden_size
            if width % self.mamba_head_dim:
                raise ValueError(
                    f"the inner width mamba_expand * hidden_size = {width} is not a multiple of "
                    f"mamba_head_dim={self.mamba_head_dim}. Change one, or set mamba_num_heads."
                )
            self.mamba_num_heads = width // self.mamba_head_dim
        self._require_positive("mamba_num_heads")
        if self.mamba_num_heads % self.mamba_num_groups:
            raise ValueError(
                f"mamba_num_heads is {self.mamba_num_heads}, not a multiple of "
                f"mamba_num_groups={self.mamba_num_groups}. Each group serves as many heads."
            )
        self._require_divisible("mamba_num_groups")

    def _check_gated_delta_net(self) -> None:
        self._require_positive("linear_key_head_dim", "linear_value_head_dim", "linear_chunk_size")
        self._require_conv_kernel("linear_conv_kernel_dim")
        if self.linear_num_key_heads is None:
            self.linear_num_key_heads = max(1, self.hidden_size // self.linear_key_head_dim)
        if self.linear_num_value_heads is None:
            self.linear_num_value_heads = 2 * self.linear_num_key_heads
        self._require_positive("linear_num_key_heads", "linear_num_value_heads")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads is {self.linear_num_value_heads}, not a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}. "
                "Each key head serves as many value heads."
            )
        self._require_divisible("linear_num_key_heads")

    def _require_conv_kernel(self, field: str) -> None:
        if getattr(self, field) < 2:
            raise ValueError(
                f"{field} is {getattr(self, field)}; a causal convolution needs a width of 2 "
                "or more (4 is usual)."
            )

    @property
    def has_attention(self) -> bool:
        """Whether any layer attends."""
        return "*" in self.layer_pattern or "W" in self.layer_pattern

    @property
    def rotary_dim(self) -> int:
        """Dimensions of an attention head that RoPE rotates."""
        return int(self.kv_channels * self.rotary_percent)


def _lookup(table: dict[str, Any], field: str, name: Any) -> Any:
    try:
        return table[name]
    except (KeyError, TypeError):
        raise ValueError(f"{field} is {name!r} in the config; use one of {list(table)}.") from None


PREFIX_CACHING_MODES = ("off", "memory_only", "restore")


@dataclass
class InferenceConfig:
    """How a model is served: sizes, and the prefix-caching mode.

    Raises:
        ValueError, TypeError: a field has no legal value; the message names it and the limit.
    """

    prefix_caching: str = "restore"
    """"off": nothing is shared. "memory_only": KV blocks are shared, every prompt token is
    computed. "restore": recurrent state is restored too, so that prefill starts where the match
    ends."""

    block_size_tokens: int = 16
    """Tokens of one KV block: a power of two from 16 to 256."""

    cache_bytes: int = 256 << 20
    """Bytes of the page pool on each rank: KV of running requests and everything that is cached."""

    max_requests: int = 64
    """Requests that run at a time; each has a live slot outside of the pool."""

    max_tokens: int = 2048
    """Token budget of one forward pass, decodes and prefill chunks together."""

    max_sequence_length: int = 8192
    """Tokens of one request, prompt and answer together."""

    kv_cache_dtype: torch.dtype | None = None
    """dtype of K and V in the pool; None: that of the model's parameters."""

    random_seed: int = 0
    """Where the seeds of requests come from that bring none."""

    verify_ranks: bool = False
    """Debugging: compare the decisions of all ranks of the model at every step."""

    def __post_init__(self):
        if self.prefix_caching not in PREFIX_CACHING_MODES:
            raise ValueError(
                f"prefix_caching is {self.prefix_caching!r}; use one of {PREFIX_CACHING_MODES}."
            )
        for field in (
            "block_size_tokens",
            "cache_bytes",
            "max_requests",
            "max_tokens",
            "max_sequence_length",
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a whole number of 1 or more.")
        if not isinstance(self.random_seed, int):
            raise ValueError(f"random_seed is {self.random_seed!r}; it must be a whole number.")
        block = self.block_size_tokens
        if not 16 <= block <= 256 or block & (block - 1):
            raise ValueError(f"block_size_tokens is {block}; use a power of two from 16 to 256.")
        if self.kv_cache_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"kv_cache_dtype is {self.kv_cache_dtype}; use torch.float32, torch.bfloat16, "
                "torch.float16 or None (that of the parameters)."
            )
