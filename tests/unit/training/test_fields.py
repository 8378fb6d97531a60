"""Sections of recipes check their names, types and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from megatron_hybrid.training.fields import Fields
from megatron_hybrid.utils.validation import Range


@dataclass
class Example(Fields):
    path: str
    rate: Annotated[float, Range(gt=0)] = 0.5
    limit: Annotated[int, Range(ge=1)] | None = None
    parts: list = field(default_factory=list)


def test_values_are_taken_and_others_have_their_defaults():
    values = {"path": "x", "rate": 1, "limit": 4, "parts": [1]}
    assert Example.of("part", values) == Example("x", rate=1, limit=4, parts=[1])
    assert values == {"path": "x", "rate": 1, "limit": 4, "parts": [1]}


@pytest.mark.parametrize("text", ["1e-3", "1E-3", ".001"])
def test_numbers_that_yaml_reads_as_text_become_numbers(text):
    assert Example.of("part", {"path": "x", "rate": text}).rate == 1e-3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "part needs the field 'path'"),
        ([1], "part is [1]; it must be a section with fields"),
        ({"path": 3}, "part: path is 3; it must be text"),
        ({"path": "x", "rat": 1}, "part has no field 'rat': did you mean rate?"),
        ({"path": "x", 7: 1}, "part has no field 7: its fields are path, rate"),
        ({"path": "x", "rate": "fast"}, "rate is 'fast'; it must be a number"),
    ],
)
def test_what_is_not_legal_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        Example.of("part", values)
    assert message in str(error.value)
