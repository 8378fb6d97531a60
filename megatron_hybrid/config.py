"""The configuration of a hybrid model: a megatron-core TransformerConfig plus what hybrids add."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal

import torch
import torch.nn.functional as F

from megatron_hybrid.compat import TransformerConfig, have_apex, replace_deprecated_defaults
from megatron_hybrid.config_checks import (
    check_fixed_fields,
    check_kind,
    check_overrides,
    check_routing,
    check_types,
    left_out_fields,
    require_positive,
    tell_fields_without_effect,
)
from megatron_hybrid.models.layer_pattern import KINDS, layer_symbols, split_stages
from megatron_hybrid.ops.activations import ACTIVATIONS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# What config.json holds: the architecture and its numerics, nothing of a particular run. First what
# is one for the whole model, then what a layer kind or a single layer may have otherwise.
_MODEL_FIELDS = (
    "layer_pattern",
    "layer_overrides",
    "vocab_size",
    "hidden_size",
    "share_embeddings_and_output_weights",
    "embedding_multiplier",
    "round_embedding_multiplier",
    "logits_multiplier",
    "final_logit_softcap",
    "per_layer_input_size",
    "recurrent_state_dtype",
    "num_shared_blocks",
    "normalization",
    "init_method_std",
    "params_dtype",
    "huggingface_config",
)
_LAYER_FIELDS = (
    # residual stack
    "norm_placement",
    "residual_multiplier",
    "layernorm_epsilon",
    "layernorm_zero_centered_gamma",
    "layer_scalar",
    # attention
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "sliding_window",
    "attention_chunk_size",
    "softmax_scale",
    "softmax_type",
    "attention_logit_softcap",
    "attention_output_gate",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_layernorm_scope",
    "qk_l2_norm",
    "value_l2_norm",
    "keys_as_values",
    "kv_source_layer",
    "attention_temperature_scale",
    "attention_temperature_floor",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_scaling",
    "rotary_interleaved",
    # multi-head latent attention
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "latent_norm_epsilon",
    # Mamba-2
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "mamba_expand",
    "mamba_conv_kernel",
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "mamba_gated_norm",
    "mamba_norm_epsilon",
    "mamba_dt_min",
    "mamba_dt_max",
    "mamba_section_multipliers",
    # Mamba-1
    "mamba1_state_dim",
    "mamba1_inner_size",
    "mamba1_dt_rank",
    "mamba1_conv_kernel",
    "mamba1_chunk_size",
    "mamba1_conv_bias",
    "mamba1_proj_bias",
    "mamba1_norm",
    "mamba1_norm_epsilon",
    # gated short convolution
    "short_conv_kernel",
    "short_conv_bias",
    # shared block
    "shared_block_adapter_rank",
    "shared_block_attention_adapters",
    # parallel attention and Mamba-2
    "attention_input_multiplier",
    "attention_output_multiplier",
    "mamba_input_multiplier",
    "mamba_output_multiplier",
    # Gated DeltaNet and Kimi Delta Attention
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_chunk_size",
    "linear_allow_neg_eigval",
    "linear_norm_epsilon",
    "linear_norm_zero_centered_gamma",
    # MLP
    "ffn_hidden_size",
    "gated_linear_unit",
    "activation_func",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "mlp_gate_multiplier",
    "mlp_output_multiplier",
    "add_bias_linear",
    # mixture of experts
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
    "moe_latent_size",
    "moe_apply_probs_on_input",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_topk_scaling_factor",
    "moe_router_topk_epsilon",
)
_SAVED_FIELDS = _MODEL_FIELDS + _LAYER_FIELDS


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

    layer_overrides: dict[str, dict[str, Any]] = dataclass_field(default_factory=dict)
    """Fields that differ in some layers: by layer symbol, or by layer number (from 1, through the
    whole model; it comes after the symbol): `{"W": {"rotary_base": 1e4}, "7": {"qk_layernorm":
    False}}`. Whatever concerns one layer may be overridden, the shape of the whole may not. Fields
    that are left out and follow from others, such as mamba_num_heads from mamba_head_dim, follow
    from the model's: who overrides the one for a layer has to say the other too."""

    vocab_size: int = 0
    """Number of tokens. Inside, padded to a multiple of the tensor-parallel size."""

    embedding_multiplier: float = 1.0
    """Factor of the word embedding."""

    round_embedding_multiplier: bool = False
    """Round that factor to params_dtype first, as Gemma's is: in bfloat16 that is another one."""

    logits_multiplier: float = 1.0
    """Factor of the logits."""

    final_logit_softcap: float | None = None
    """c: logits become c tanh(logits / c), after their factor."""

    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    """x + f(norm(x)), x + norm(f(x)), or x + norm(f(norm(x)))."""

    residual_multiplier: float = 1.0
    """Factor of what a layer adds to the residual stream."""

    layer_scalar: bool = False
    """Multiply the residual stream behind a layer by a number that comes with the weights."""

    per_layer_input_size: int | None = None
    """Width of what each `P` layer is told of each token; see `models/per_layer_embedding.py`."""

    huggingface_config: dict[str, Any] | None = None
    """config.json of the Hugging Face folder that the weights come from, to write one again."""

    sliding_window: int | None = None
    """Positions that a `W` layer sees, its own included: (t - sliding_window, t]."""

    attention_chunk_size: int | None = None
    """A token of an `L` layer sees its own chunk of so many positions, up to itself."""

    attention_logit_softcap: float | None = None
    """c: attention scores become c tanh(scores / c)."""

    qk_layernorm_scope: Literal["head", "all_heads"] = "head"
    """Whether qk_layernorm norms each head, or all heads of a token as one vector."""

    value_l2_norm: bool = False
    """Give each value head a mean square of 1."""

    keys_as_values: bool = False
    """Values are the projected keys, before norm and RoPE."""

    kv_source_layer: int | None = None
    """Number of the layer before (from 1, through the whole model) whose keys and values this one
    reads, having none of its own; set in layer_overrides."""

    attention_temperature_scale: float | None = None
    """s: queries are multiplied by 1 + s log(1 + floor((position + 1) / floor))."""

    attention_temperature_floor: int = 8192
    """Positions per step of the attention temperature."""

    position_embedding_type: Literal["rope", "none"] = "rope"
    """What tells attention where a token is. `none` suits hybrids: recurrent layers keep order."""

    rotary_base: float = 10000.0
    """Base of the RoPE frequencies, base^(-2i/d)."""

    rotary_percent: float = 1.0
    """Leading part of each attention head that RoPE rotates."""

    rotary_scaling: dict[str, Any] | None = None
    """How RoPE is stretched to longer contexts, in the terms of Hugging Face's `rope_parameters`:
    `rope_type` ("linear", "llama3", "yarn") and its numbers; see `mixers/rotary.py`."""

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

    mamba_conv_bias: bool = True
    """A bias in the convolution of a Mamba-2 layer."""

    mamba_proj_bias: bool = False
    """Biases in the projections into and out of a Mamba-2 layer."""

    mamba_gated_norm: Literal["gate_first", "norm_first", "none"] = "gate_first"
    """How a Mamba-2 layer ends, by group of heads: norm(y SiLU(z)), norm(y) SiLU(z), or y SiLU(z).
    """

    mamba_norm_epsilon: float = 1e-5
    """Epsilon of that norm; megatron-core's, whatever layernorm_epsilon says."""

    mamba_dt_min: float = 0.0
    """Lower limit of the time steps of a Mamba-2 layer, after their softplus."""

    mamba_dt_max: float | None = None
    """Upper limit of the time steps of a Mamba-2 layer."""

    mamba_section_multipliers: list[float] | None = None
    """Factors of z, x, B, C and dt as they come out of a Mamba-2 layer's input projection."""

    mamba1_state_dim: int = 16
    """States of each channel of a Mamba-1 layer."""

    mamba1_inner_size: int | None = None
    """Channels of a Mamba-1 layer; None: 2 * hidden_size."""

    mamba1_dt_rank: int | None = None
    """Width that the time steps of a Mamba-1 layer are squeezed through; None: hidden_size / 16,
    rounded up."""

    mamba1_conv_kernel: int = 4
    """Width of the causal convolution of a Mamba-1 layer."""

    mamba1_chunk_size: int = 64
    """Tokens per chunk of the selective scan in training: memory and speed only."""

    mamba1_conv_bias: bool = True
    """A bias in the convolution of a Mamba-1 layer."""

    mamba1_proj_bias: bool = False
    """Biases in the projections into and out of a Mamba-1 layer."""

    mamba1_norm: Literal["none", "weighted", "weightless"] = "none"
    """RMS norms of dt, B and C of a Mamba-1 layer, with weights (Jamba) or without (FalconMamba).
    """

    mamba1_norm_epsilon: float = 1e-6
    """Epsilon of those norms."""

    short_conv_kernel: int = 3
    """Width of the causal convolution of a gated-short-convolution layer."""

    short_conv_bias: bool = False
    """Biases in the convolution and the projections of a gated-short-convolution layer."""

    num_shared_blocks: int = 1
    """Blocks that the `Z` layers take in turn."""

    shared_block_adapter_rank: int = 16
    """Rank of what each `Z` layer adds to the projections of the block that it shares."""

    shared_block_attention_adapters: bool = False
    """Whether it adds to queries, keys and values too, not to the MLP alone."""

    attention_input_multiplier: float = 1.0
    """Factor of what the attention of an `H` layer takes in."""

    attention_output_multiplier: float = 1.0
    """Factor of what the attention of an `H` layer gives out."""

    mamba_input_multiplier: float = 1.0
    """Factor of what the Mamba-2 part of an `H` layer takes in."""

    mamba_output_multiplier: float = 1.0
    """Factor of what the Mamba-2 part of an `H` layer gives out."""

    mlp_gate_multiplier: float = 1.0
    """Factor of the gate of an MLP, before its activation."""

    mlp_output_multiplier: float = 1.0
    """Factor of what an MLP gives out."""

    q_lora_rank: int | None = 512
    """Width that an MLA layer squeezes its queries through; None: one projection makes them."""

    kv_lora_rank: int = 512
    """Width of the latent that the keys and values of an MLA layer are made of."""

    qk_head_dim: int = 128
    """Width of an MLA head's query and key, without what RoPE rotates."""

    qk_pos_emb_head_dim: int = 64
    """Further width of an MLA head's query, and of the key that all heads share: what RoPE
    rotates, unless position_embedding_type is none."""

    v_head_dim: int = 128
    """Width of an MLA head's value."""

    latent_norm_epsilon: float | None = None
    """Epsilon of the norms behind an MLA layer's down projections; None: layernorm_epsilon."""

    linear_num_key_heads: int | None = None
    """Query and key heads of a Gated DeltaNet layer, all heads of a Kimi Delta Attention layer;
    None: hidden_size // linear_key_head_dim."""

    linear_num_value_heads: int | None = None
    """Value heads of a Gated DeltaNet layer, a multiple of the key heads; None: twice as many."""

    linear_chunk_size: int = 32
    """Tokens per chunk of a delta rule: speed only, as mamba_chunk_size."""

    linear_allow_neg_eigval: bool = False
    """Let beta of a delta rule range over (0, 2) rather than (0, 1), so that a transition
    of the state may have negative eigenvalues (arXiv 2411.12537)."""

    linear_norm_epsilon: float | None = None
    """Epsilon of the output norm of a Gated DeltaNet or Kimi Delta Attention layer; None:
    layernorm_epsilon."""

    linear_norm_zero_centered_gamma: bool | None = None
    """Whether that norm's factor is 1 + weight; None: as layernorm_zero_centered_gamma says for all
    other norms. Qwen3-Next has it False where the others are True."""

    moe_router_topk_epsilon: float = 1e-20
    """Added to the sum of the chosen experts' sigmoid scores before they are divided by it."""

    moe_router_dtype: str = "fp32"
    """Not supported otherwise: experts are chosen in fp32 whatever params_dtype is."""

    layer_spec: Literal["auto", "local", "transformer_engine"] = "auto"
    """`local`: plain torch. `transformer_engine`: fused norm and projection, on CUDA. `auto`: the
    second where Transformer Engine is installed and the model is built on a CUDA device."""

    recurrent_state_dtype: torch.dtype = torch.float32
    """What recurrent states are stored in between calls; arithmetic on them is always fp32. With
    bfloat16 a state is rounded wherever a forward ends, so answers depend on where that is."""

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
        check_types(type(self), {name: getattr(self, name) for name in _SAVED_FIELDS})
        require_positive(self, "hidden_size", "vocab_size", "tensor_model_parallel_size")
        split_stages(self.layer_pattern, self.pipeline_model_parallel_size)
        if self.share_embeddings_and_output_weights and self.pipeline_model_parallel_size > 1:
            raise ValueError(
                "share_embeddings_and_output_weights=True needs embedding and output layer on one "
                f"pipeline stage, but there are {self.pipeline_model_parallel_size}. Untie them."
            )
        check_fixed_fields(self)
        self._unify_dtypes()
        if self.has_attention:
            require_positive(self, "num_attention_heads")
        else:
            # Core divides by it and shards it, attention or not.
            self.num_attention_heads = self.tensor_model_parallel_size
            self.num_query_groups = self.kv_channels = None
        if self.num_moe_experts is not None:
            check_routing(self)  # core's own checks are assertions
        replace_deprecated_defaults(self)
        left_out = left_out_fields(self)
        super().__post_init__()
        check_fixed_fields(self)  # core has derived some of them from others
        for symbol in dict.fromkeys(symbols):
            check_kind(self, symbol)
        check_overrides(self, symbols, _LAYER_FIELDS, left_out)
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
        tell_fields_without_effect(self)

    def for_layer(self, number: int) -> HybridConfig:
        """The config that one layer is built with: its overrides in place.

        Args:
            number: from 1, through the whole model.
        """
        symbol = layer_symbols(self.layer_pattern)[number - 1]
        fields = self.overrides_of(number, symbol)
        if not fields:
            return self
        config = copy.copy(self)
        config.layer_overrides = {}
        for name, value in fields.items():
            setattr(config, name, value)
        check_kind(config, symbol)
        return config

    def overrides_of(self, number: int, symbol: str) -> dict[str, Any]:
        """What `layer_overrides` says of one layer, by its symbol and, first of all, by its number
        (from 1, through the whole model)."""
        return {
            **self.layer_overrides.get(symbol, {}),
            **self.layer_overrides.get(str(number), {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """The architecture as JSON-able values: what `config.json` of a checkpoint holds."""
        values = _encode({name: getattr(self, name) for name in _SAVED_FIELDS})
        values["layer_overrides"] = {
            layers: _encode(fields) for layers, fields in self.layer_overrides.items()
        }
        if not self.has_attention:
            # What __post_init__ put there depends on the tensor-parallel size of this run.
            values.update(num_attention_heads=0, num_query_groups=None, kv_channels=None)
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
        fields = _decode(values)
        if "layer_overrides" in fields:
            fields["layer_overrides"] = {
                layers: _decode(fields) for layers, fields in fields["layer_overrides"].items()
            }
        return cls(**{**fields, **overrides})

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

    @property
    def has_attention(self) -> bool:
        """Whether any layer attends."""
        symbols = layer_symbols(self.layer_pattern)
        groups = {group for symbol in symbols for group in KINDS[symbol].fields}
        return not groups.isdisjoint(("attention", "latent_attention"))

    @property
    def num_kv_projections(self) -> int:
        """Projections of an attention layer beside the queries: of keys and values 2, 1 or 0."""
        return 0 if self.kv_source_layer is not None else 1 if self.keys_as_values else 2

    @property
    def rotary_dim(self) -> int:
        """Dimensions of an attention head that RoPE rotates."""
        return int(self.kv_channels * self.rotary_percent)


_NAMED_VALUES: dict[str, dict[str, Any]] = {
    "params_dtype": _DTYPES,
    "recurrent_state_dtype": _DTYPES,
    "activation_func": ACTIVATIONS,
}
"""Fields whose values have a name in config.json."""


def _encode(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values of config fields as JSON has them."""
    encoded = dict(fields)
    for name in _NAMED_VALUES.keys() & encoded.keys():
        names = {value: key for key, value in _NAMED_VALUES[name].items()}
        encoded[name] = names[encoded[name]]
    return encoded


def _decode(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `_encode`."""
    decoded = dict(fields)
    for name in _NAMED_VALUES.keys() & decoded.keys():
        table = _NAMED_VALUES[name]
        if not isinstance(decoded[name], str) or decoded[name] not in table:
            raise ValueError(
                f"{name} is {decoded[name]!r} in the config; use one of {list(table)}."
            )
        decoded[name] = table[decoded[name]]
    return decoded
