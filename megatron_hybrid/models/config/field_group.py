"""Base of the config's field groups, with shared checks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

_NUMBERS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}


class FieldGroup:
    """Base of all groups. Each is a dataclass and a base of `HybridConfig`, so `self` is the whole
    config. Fields of TransformerConfig that belong to a group are declared in it again. Those that
    a group only reads are declared for type checkers, with defaults: else callers seem to have to
    give them."""

    if TYPE_CHECKING:
        layer_pattern: str
        hidden_size: int
        tensor_model_parallel_size: int
        pipeline_model_parallel_size: int
        expert_model_parallel_size: int
        expert_tensor_parallel_size: int | None

    followers: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Field -> the fields whose defaults depend on it; they are None until `check`."""

    def check(self) -> None:
        """Fills in the defaults that depend on other fields.

        Raises:
            ValueError: a field has no legal value, or contradicts another one; the message names
                the field, the value, the limit and what to do.
        """

    def _require_positive(self, *fields: str) -> None:
        """Raises ValueError unless these fields are whole numbers of 1 or more."""
        for field in fields:
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a whole number of 1 or more.")

    def _require_divisible(
        self, *fields: str, parallel_size: str = "tensor_model_parallel_size"
    ) -> None:
        """Raises ValueError unless these fields are multiples of a number of ranks."""
        size = getattr(self, parallel_size)
        for field in fields:
            value = getattr(self, field)
            if value % size:
                raise ValueError(
                    f"{field} is {value}, which does not divide evenly over "
                    f"{parallel_size}={size}. Use a multiple of {size}, or fewer ranks."
                )

    def _require_divisible_or_copied(self, *fields: str) -> None:
        """Raises ValueError unless these fields are multiples or divisors of the tensor-parallel
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

    def _require_one_of(self, field: str, *choices: str) -> None:
        """Raises ValueError unless a field is one of several names."""
        value = getattr(self, field)
        if value not in choices:
            names = ", ".join(map(repr, choices[:-1]))
            raise ValueError(f"{field} is {value!r}; use {names} or {choices[-1]!r}.")

    def _require_for_layers(self, field: str, layers: str, value: str) -> None:
        """Raises ValueError unless a field that the pattern's `layers` require is set."""
        if getattr(self, field) is None:
            raise ValueError(
                f"layer_pattern {self.layer_pattern!r} has layers of {layers}, but {field} is "
                f"None. Set it to {value}."
            )
        self._require_positive(field)

    def _require_conv_kernel(self, field: str) -> None:
        """Raises ValueError unless a field can be the width of a causal convolution."""
        if getattr(self, field) < 2:
            raise ValueError(
                f"{field} is {getattr(self, field)}; a causal convolution needs a width of 2 "
                "or more (4 is usual)."
            )


class ModelFields(FieldGroup):
    """Base of the groups with one value for the whole model."""


class LayerFields(FieldGroup):
    """Base of the groups that `layer_overrides` may set for single layers."""


def check_types(config_class: type[FieldGroup], fields: Mapping[str, Any]) -> None:
    """Checks the values of fields annotated as numbers or booleans.

    Raises:
        ValueError: a value of another type; names the field, the value and the type.
    """
    hints = _type_hints(config_class)
    for name, value in fields.items():
        kinds = get_args(hints[name]) or (hints[name],)
        accepted = [kind for kind in _NUMBERS if kind in kinds]
        if not accepted or (value is None and type(None) in kinds):
            continue
        numeric = (int, float) if float in kinds else (int,) if int in kinds else ()
        fits = bool in kinds if isinstance(value, bool) else isinstance(value, numeric)
        if not fits:
            known = " or ".join(_NUMBERS[kind] for kind in accepted)
            raise ValueError(f"{name} is {value!r}; it must be {known}.")


_type_hints = cache(get_type_hints)
