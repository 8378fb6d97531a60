"""HybridConfig: all groups of fields together, on top of megatron-core's TransformerConfig."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.compat import TransformerConfig, replace_deprecated_defaults
from megatron_hybrid.models.config.architecture import ArchitectureFields, PerLayerInputFields
from megatron_hybrid.models.config.attention import (
    AttentionFields,
    ChunkFields,
    LatentAttentionFields,
    WindowFields,
)
from megatron_hybrid.models.config.combined import ParallelHeadsFields, SharedBlockFields
from megatron_hybrid.models.config.common import CommonFields
from megatron_hybrid.models.config.field_group import (
    FieldGroup,
    LayerFields,
    ModelFields,
    check_types,
    set_fields,
)
from megatron_hybrid.models.config.mlp import MLPFields
from megatron_hybrid.models.config.moe import MoEFields, MoERunFields
from megatron_hybrid.models.config.position import PositionFields, comparable_scaling
from megatron_hybrid.models.config.precision import DTYPES, PrecisionFields
from megatron_hybrid.models.config.recurrent import (
    DeltaRuleFields,
    GatedDeltaNetFields,
    KimiDeltaAttentionFields,
    LightningAttentionFields,
    Mamba1Fields,
    Mamba2Fields,
    RGLRUFields,
    ShortConvFields,
)
from megatron_hybrid.models.config.run import RunFields
from megatron_hybrid.models.config.unsupported import check_unsupported, warn_fields_without_effect
from megatron_hybrid.models.layer_pattern import LAYER_KINDS, LayerPattern
from megatron_hybrid.ops.activations import ACTIVATIONS
from megatron_hybrid.utils.core_errors import core_refusals
from megatron_hybrid.utils.other_names import names_arguments


@names_arguments()
@dataclass
class HybridConfig(
    ArchitectureFields,
    PrecisionFields,
    PerLayerInputFields,
    CommonFields,
    AttentionFields,
    WindowFields,
    ChunkFields,
    PositionFields,
    LatentAttentionFields,
    Mamba2Fields,
    Mamba1Fields,
    ShortConvFields,
    RGLRUFields,
    DeltaRuleFields,
    GatedDeltaNetFields,
    KimiDeltaAttentionFields,
    LightningAttentionFields,
    SharedBlockFields,
    ParallelHeadsFields,
    MLPFields,
    MoEFields,
    MoERunFields,
    RunFields,
    TransformerConfig,
):
    """Configuration of a hybrid model: every field of megatron-core's TransformerConfig, and these.

    `HybridConfig(layer_pattern="MM*-MM*-", hidden_size=64, num_attention_heads=4, vocab_size=256)`
    is complete. `num_layers` follows from the pattern.

    Raises:
        ValueError: a field has no legal value, or contradicts another one; the message names the
            field, the value, the limit and what to do.
    """

    def __post_init__(self) -> None:
        symbols = self.pattern.symbols
        if self.num_layers not in (0, len(symbols)):
            raise ValueError(
                f"num_layers is {self.num_layers}, but layer_pattern {self.layer_pattern!r} has "
                f"{len(symbols)} layers. Leave num_layers out: it follows from the pattern."
            )
        self.num_layers = len(symbols)
        given = set_fields(self)
        check_types(type(self), given)
        ArchitectureFields.check(self)
        self.pattern.stages(self.pipeline_model_parallel_size)
        check_unsupported(self)
        PrecisionFields.check(self)
        if self.has_attention:
            self._require_positive("num_attention_heads")
            AttentionFields.check_ranks(self)
        else:
            # Core divides by it and shards it, attention or not.
            self.num_attention_heads = self.tensor_model_parallel_size
            self.num_query_groups = self.kv_channels = None
        if self.num_moe_experts is not None:
            self.check_routing()
        replace_deprecated_defaults(self)
        left_out = {name for name in _FOLLOWERS if getattr(self, name) is None}
        self._check_predictions()
        self.check_recompute()
        hidden = {"recompute_granularity": None}  # ours does what core would refuse
        if self.moe_router_enable_expert_bias:
            hidden["moe_router_score_function"] = "sigmoid"
        own = {name: getattr(self, name) for name in hidden}
        vars(self).update(hidden)
        with core_refusals("this model", given):
            super().__post_init__()
        vars(self).update(own)
        check_unsupported(self)  # core has derived some of them from others
        self.check()
        self._check_overrides(left_out)
        RunFields.check(self)
        warn_fields_without_effect(self)

    def check(self) -> None:
        """Check the groups of all layer kinds in the pattern; see `FieldGroup.check`."""
        for symbol in self.symbols:
            self._check_layer(symbol)

    @property
    def pattern(self) -> LayerPattern:
        """`layer_pattern`, parsed."""
        return LayerPattern.parse(self.layer_pattern)

    @property
    def symbols(self) -> dict[str, None]:
        """The symbols of the layers, those of multi-token prediction included."""
        return dict.fromkeys(self.pattern.symbols + "".join(self.pattern.predictions))

    def _check_predictions(self) -> None:
        """Set `mtp_num_layers` to the number of parts after `/`."""
        parts = len(self.pattern.predictions)
        if self.mtp_num_layers not in (None, parts):
            raise ValueError(
                f"mtp_num_layers is {self.mtp_num_layers}, but layer_pattern "
                f"{self.layer_pattern!r} has {parts} parts after '/'. Leave mtp_num_layers out: "
                "it follows from the pattern."
            )
        if parts and self.pipeline_model_parallel_size > 1:
            raise ValueError(
                f"layer_pattern {self.layer_pattern!r} has MTP heads, which "
                "embed tokens again, and pipeline_model_parallel_size is "
                f"{self.pipeline_model_parallel_size}: the stage after the last layer has no "
                "embedding. Use one stage, or leave out what stands after '/'."
            )
        self.mtp_num_layers = parts or None

    def _check_layer(self, symbol: str) -> None:
        for group in (CommonFields, *LAYER_KINDS[symbol].fields):
            group.check(self)

    def _check_overrides(self, left_out: set[str]) -> None:
        """Raise ValueError unless overrides name existing layers and fields of a layer, and each
        layer is legal with its own. `left_out` are fields whose defaults depended on others."""
        symbols = self.pattern.symbols
        for layers, fields in self.layer_overrides.items():
            is_number = isinstance(layers, str) and layers.isdecimal()
            if layers not in list(symbols) and not (is_number and 1 <= int(layers) <= len(symbols)):
                raise ValueError(
                    f"layer_overrides has the key {layers!r}, but keys are symbols of the "
                    f"layer_pattern {self.layer_pattern!r} or layer numbers from '1' to "
                    f"'{len(symbols)}'."
                )
            unknown = sorted(set(fields) - set(_LAYER_FIELDS))
            if unknown:
                raise ValueError(
                    f"layer_overrides[{layers!r}] sets {unknown[0]!r}, which is no field of a "
                    f"single layer. Such fields: {', '.join(_LAYER_FIELDS)}."
                )
            check_types(type(self), fields)
        for number, symbol in enumerate(symbols, start=1):
            self._check_followers(number, symbol, left_out)
        layers = [self.for_layer(number) for number in range(1, len(symbols) + 1)]
        for number, (symbol, layer) in enumerate(zip(symbols, layers), start=1):
            for group in LAYER_KINDS[symbol].fields:
                group.check_source(layer, number, symbols, layers)

    def _check_followers(self, number: int, symbol: str, left_out: set[str]) -> None:
        """Refuse an override that would leave a dependent default as the model's."""
        fields = self.overrides_of(number, symbol)
        for group in LAYER_KINDS[symbol].fields:
            for name, followers in group.followers.items():
                stale = [one for one in followers if one in left_out and one not in fields]
                if stale and fields.get(name, getattr(self, name)) != getattr(self, name):
                    raise ValueError(
                        f"layer_overrides sets {name}={fields[name]!r} for layer {number} "
                        f"({symbol}), but not {' and '.join(stale)}, which would stay as for the "
                        "other layers. Set all of them."
                    )

    def for_layer(self, number: int) -> HybridConfig:
        """Return the config that one layer is built with, its overrides in place.

        Args:
            number: from 1, through the whole model.
        """
        symbol = self.pattern.symbols[number - 1]
        return self._with(symbol, self.overrides_of(number, symbol))

    def for_prediction(self, symbol: str) -> HybridConfig:
        """Return the config that a layer for multi-token prediction is built with, the overrides of
        its symbol in place."""
        return self._with(symbol, self.layer_overrides.get(symbol, {}))

    def _with(self, symbol: str, fields: Mapping[str, Any]) -> HybridConfig:
        """Return the config of a layer with these overrides."""
        if not fields:
            return self
        config = copy.copy(self)
        config.layer_overrides = {}
        for name, value in fields.items():
            setattr(config, name, value)
        config._check_layer(symbol)
        return config

    def with_all_rows(self) -> HybridConfig:
        """Return the config of parts that take and give the rows of all tensor-parallel ranks under
        sequence parallelism."""
        if not self.sequence_parallel:
            return self
        config = copy.copy(self)
        config.sequence_parallel = False
        return config

    def overrides_of(self, number: int, symbol: str) -> dict[str, Any]:
        """Return the `layer_overrides` of one layer: those of its symbol and those of its number
        (from 1, through the whole model). The latter win."""
        return {
            **self.layer_overrides.get(symbol, {}),
            **self.layer_overrides.get(str(number), {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the architecture as JSON-able values, as a checkpoint's `config.json` holds it."""
        values = _encode({name: getattr(self, name) for name in SAVED_FIELDS})
        values["layer_overrides"] = {
            layers: _encode(fields) for layers, fields in self.layer_overrides.items()
        }
        if not self.has_attention:
            # __post_init__ set them from the tensor-parallel size of this run.
            values.update(num_attention_heads=0, num_query_groups=None, kv_channels=None)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **overrides: Any) -> HybridConfig:
        """Build the config that `to_dict` described; `overrides` are fields of this run.

        Raises:
            ValueError: an unknown key, or a value that no config takes.
        """
        unknown = sorted(set(values) - set(SAVED_FIELDS))
        if unknown:
            raise ValueError(
                f"config has the unknown key {unknown[0]!r}. Known: {', '.join(SAVED_FIELDS)}."
            )
        return cls(**{**decode_fields(values), **overrides})

    def differences(self, other: HybridConfig) -> list[str]:
        """Name the fields by which two configs describe models that compute different things.

        Of layer fields, those that a layer of its kind reads are compared, overrides in place.
        """
        symbols = self.pattern.symbols
        if symbols != other.pattern.symbols:
            return ["layer_pattern"]
        names = set(_fields_of(ModelFields)) - _NOT_COMPARED
        found = [name for name in names if getattr(self, name) != getattr(other, name)]
        for number, symbol in enumerate(symbols, start=1):
            groups = {CommonFields, *LAYER_KINDS[symbol].fields}
            names = {field.name for group in groups for field in dataclasses.fields(group)}
            is_latent = LatentAttentionFields in groups
            if is_latent:  # it reads these of AttentionFields
                names |= {"num_attention_heads", "softmax_scale", "attention_logit_softcap"}
            if groups.isdisjoint((MLPFields, MoEFields)):
                names.remove("activation_func")
            one, two = self.for_layer(number), other.for_layer(number)
            found += [
                name if getattr(self, name) != getattr(other, name) else "layer_overrides"
                for name in names - _NOT_COMPARED
                if _value(one, name, is_latent) != _value(two, name, is_latent)
            ]
        return sorted(set(found))

    @property
    def has_attention(self) -> bool:
        """Whether any layer attends."""
        groups = {group for symbol in self.symbols for group in LAYER_KINDS[symbol].fields}
        return not groups.isdisjoint((AttentionFields, LatentAttentionFields))


def _fields_of(kind: type[FieldGroup]) -> tuple[str, ...]:
    """Return the names of the fields of all groups of one kind."""
    groups = [group for group in HybridConfig.__bases__ if issubclass(group, kind)]
    return tuple(field.name for group in groups for field in dataclasses.fields(group))


_LAYER_FIELDS = _fields_of(LayerFields)
"""Keys that `layer_overrides` accepts."""

SAVED_FIELDS = _fields_of(ModelFields) + _LAYER_FIELDS
"""Keys of config.json: the architecture and its numerics, nothing of a particular run."""

_FOLLOWERS = {
    name
    for group in HybridConfig.__bases__
    if issubclass(group, FieldGroup)
    for names in group.followers.values()
    for name in names
}
"""Fields with defaults that depend on other fields of their layer."""

_NOT_COMPARED = {
    "layer_pattern",  # its layers are compared, and the values of each
    "layer_overrides",
    "huggingface_config",
    "init_method_std",
    "is_gpt_model",
    "params_dtype",
    "recurrent_state_dtype",
    "mamba_chunk_size",
    "linear_chunk_size",
    "mamba_expand",  # mamba_num_heads follows from it
}
"""Fields that do not change what a model computes, rounding aside."""


_DEFAULTS_OF_NORMS = {
    "latent_norm_epsilon": "layernorm_epsilon",
    "linear_norm_epsilon": "layernorm_epsilon",
    "linear_norm_zero_centered_gamma": "layernorm_zero_centered_gamma",
}
"""Fields of single norms -> those of all norms, which hold where they are None."""


def _value(layer: HybridConfig, name: str, is_latent: bool) -> Any:
    """Return a layer field's value for comparison, a default in place of None."""
    value = getattr(layer, name)
    if name == "rotary_scaling":
        return comparable_scaling(value)
    if value is None and name in _DEFAULTS_OF_NORMS:
        return getattr(layer, _DEFAULTS_OF_NORMS[name])
    if name != "softmax_scale":
        return value
    if is_latent:
        width = layer.qk_head_dim + layer.qk_pos_emb_head_dim
    else:
        width = layer.kv_channels // layer.softmaxes_per_head
    return round(value or width**-0.5, 9)  # however it was computed


_NAMED_VALUES: dict[str, dict[str, Any]] = {
    "params_dtype": DTYPES,
    "recurrent_state_dtype": DTYPES,
    "activation_func": ACTIVATIONS,
}
"""Field -> names of its values in config.json."""


def _encode(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of config fields as JSON has them."""
    encoded = dict(fields)
    for name in _NAMED_VALUES.keys() & encoded.keys():
        names = {value: key for key, value in _NAMED_VALUES[name].items()}
        encoded[name] = names[encoded[name]]
    return encoded


def decode_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of config fields, of which config.json has some by name.

    Raises:
        ValueError: a name that stands for nothing.
    """
    decoded = dict(fields)
    if isinstance(overrides := decoded.get("layer_overrides"), Mapping):
        decoded["layer_overrides"] = {
            layers: decode_fields(fields) if isinstance(fields, Mapping) else fields
            for layers, fields in overrides.items()
        }
    for name in _NAMED_VALUES.keys() & decoded.keys():
        table = _NAMED_VALUES[name]
        if not isinstance(decoded[name], str) or decoded[name] not in table:
            raise ValueError(
                f"{name} is {decoded[name]!r} in the config; use one of {list(table)}."
            )
        decoded[name] = table[decoded[name]]
    return decoded
