"""Matrices of tests: `make test` runs a row of each kind, `make test-matrix` all others."""

from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def matrix_rows(values: Iterable[T], *kept: T) -> list:
    """The parameters of a test, in their order, of which `make test` runs those that are kept."""
    values = list(values)
    if absent := [value for value in kept if value not in values]:
        raise ValueError(f"{absent} are no rows; there are {values}")
    return [value if value in kept else _in_matrix(value) for value in values]


def _in_matrix(value: object) -> object:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.matrix)


def asked(request: pytest.FixtureRequest, argument: str, values: Iterable[T]) -> list[T]:
    """The values of an argument that this session's tests of the fixture's module have."""
    items = [item for item in request.session.items if item.module is request.module]
    found = [item.callspec.params.get(argument) for item in items if hasattr(item, "callspec")]
    return [value for value in values if value in found]
