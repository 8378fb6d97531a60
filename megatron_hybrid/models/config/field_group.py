"""Base of the config's field groups, with shared checks."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

from megatron_hybrid.utils.validation import Range, check_field

Epsilon = Annotated[float, Range(ge=0, le=1)]

_Factor = Annotated[float, Range(ge=0)]
_FIELDS_OF_CORE = {
    "embedding_init_method_std": _Factor | None,
    "mtp_loss_scaling_factor": _Factor | None,
    "moe_aux_loss_coeff": _Factor | list[_Factor],
    "moe_z_loss_coeff": _Factor | None,
    "moe_input_jitter_eps": Epsilon | None,
    "moe_expert_capacity_factor": Annotated[float, Range(gt=0)] | None,
    "moe_router_bias_update_rate": _Factor,
}
"""Annotations, with limits, of fields that megatron-core declares."""


class FieldGroup:
    """Base of all groups. Each is a dataclass and a base of `HybridConfig`, so `self` is the whole
    config. Fields of TransformerConfig that belong to a group are declared in it again. Those of
    it that a group only reads are declared for type checkers, with defaults: else callers seem to
    have to give them."""

    if TYPE_CHECKING:
        tensor_model_parallel_size: int
        pipeline_model_parallel_size: int
        expert_model_parallel_size: int
        expert_tensor_parallel_size: int | None
        layer_options: dict[str, Any]

    followers: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Field -> the fields whose defaults depend on it; they are None until `check`."""

    def check(self) -> None:
        """Fill in the defaults that depend on other fields.

        Raises:
            ValueError: a field has no legal value, or contradicts another one; the message names
                the field, the value, the limit and what to do.
        """

    def check_source(self, number: int, symbols: str, layers: Sequence[Any]) -> None:
        """Raise ValueError unless the layer `number` can read what it reads of another one.

        Args:
            number: from 1, through the whole model.
            symbols, layers: those of the whole model, overrides in place.
        """

    def _require_positive(self, *fields: str) -> None:
        """Raise ValueError unless these fields are whole numbers of 1 or more."""
        for field in fields:
            check_field(field, getattr(self, field), Annotated[int, Range(ge=1)])

    def _require_multiple(self, field: str, step: str, why: str) -> None:
        """Raise ValueError unless a field is a multiple of another one; `why` says why it must."""
        value, size = getattr(self, field), getattr(self, step)
        if value % size:
            raise ValueError(f"{field} is {value}, not a multiple of {step}={size}. {why}")

    def _require_even_rotation(self, dims: int, of: str) -> None:
        """Raise ValueError if RoPE rotates an odd number of dimensions, or none. `of` is a field
        with the width of a head."""
        if self.position_embedding_type == "rope" and (dims % 2 or not dims):
            raise ValueError(
                f"RoPE rotates {dims} of {of}={getattr(self, of)} dimensions (rotary_percent="
                f"{self.rotary_percent}); it needs an even number of 2 or more. For no rotation "
                "use position_embedding_type='none'."
            )

    def _require_divisible(
        self, *fields: str, parallel_size: str = "tensor_model_parallel_size"
    ) -> None:
        """Raise ValueError unless these fields are multiples of a number of ranks."""
        size = getattr(self, parallel_size)
        for field in fields:
            value = getattr(self, field)
            if value % size:
                raise ValueError(
                    f"{field} is {value}, which does not divide evenly over "
                    f"{parallel_size}={size}. Use a multiple of {size}, or fewer ranks."
                )

    def _require_divisible_or_copied(self, *fields: str) -> None:
        """Raise ValueError unless these fields are multiples or divisors of the tensor-parallel
        size."""
        size = self.tensor_model_parallel_size
        for field in fields:
            value = getattr(self, field)
            if value % size and size % value:
                raise ValueError(
                    f"{field} is {value}, neither a multiple nor a divisor of "
                    f"tensor_model_parallel_size={size}. Use a multiple, of which each rank holds "
                    "an equal part, or a divisor, of which each rank holds a copy of one."
                )

    def _require_for_layers(self, field: str, layers: str, value: str) -> None:
        """Raise ValueError unless a field that the pattern's `layers` require is set."""
        if getattr(self, field) is None:
            raise ValueError(
                f"layer_pattern {self.layer_pattern!r} has layers of {layers}, but {field} is "
                f"None. Set it to {value}."
            )
        self._require_positive(field)


class ModelFields(FieldGroup):
    """Base of the groups with one value for the whole model."""


class LayerFields(FieldGroup):
    """Base of the groups that `layer_overrides` may set for single layers."""


def check_types(config_class: type[FieldGroup], fields: Mapping[str, Any]) -> None:
    """Check values against the annotations of their fields.

    Raises:
        ValueError: another value; names the field, the value and what it must be.
    """
    hints = _hints(config_class)
    for name, value in fields.items():
        check_field(name, value, hints[name])


def set_fields(config: FieldGroup) -> dict[str, Any]:
    """Return the fields whose values are not their defaults; of core's, some defaults do not fit
    their annotations."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in vars(config).items() if value is not defaults[name]}


@cache
def _hints(config_class: type[FieldGroup]) -> dict[str, Any]:
    """Return the annotation of each field, with its limits."""
    return get_type_hints(config_class, include_extras=True) | _FIELDS_OF_CORE
