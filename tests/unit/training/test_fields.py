"""Sections of recipes check their names, types and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from megatron_hybrid.training.fields import Fields, check_known
from megatron_hybrid.utils.validation import Range


@dataclass
class Example(Fields):
    path: str
    rate: Annotated[float, Range(gt=0)] = 0.5
    steps: Annotated[int, Range(ge=1)] = 3
    limit: Annotated[int, Range(ge=1)] | None = None
    is_fast: bool = False
    name: Literal["adam", "muon"] = "adam"
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
        ("x", "part is 'x'; it must be a section"),
        ({"path": 3}, "part: path is 3; it must be text"),
        ({"path": "x", "rat": 1}, "part has no field 'rat': did you mean rate?"),
        ({"path": "x", 7: 1}, "part has no field 7: its fields are path, rate"),
        ({"path": "x", "rate": "fast"}, "rate is 'fast'; it must be a number"),
        ({"path": "x", "rate": True}, "rate is True; it must be a number"),
        ({"path": "x", "rate": None}, "rate is None; it must be a number"),
        ({"path": "x", "rate": float("nan")}, "rate is nan; it must be a finite number"),
        ({"path": "x", "rate": -1}, "rate is -1; it must be a number above 0"),
        ({"path": "x", "steps": 2.0}, "steps is 2.0; it must be a whole number"),
        ({"path": "x", "steps": True}, "steps is True; it must be a whole number"),
        ({"path": "x", "limit": "4"}, "limit is '4'; it must be a whole number"),
        ({"path": "x", "limit": 0}, "limit is 0; it must be a whole number from 1"),
        ({"path": "x", "is_fast": 1}, "is_fast is 1; it must be true or false"),
        ({"path": "x", "name": "lion"}, "name is 'lion'; use 'adam' or 'muon'"),
    ],
)
def test_what_is_not_legal_is_refused(values, message):
    with pytest.raises(ValueError) as error:
        Example.of("part", values)
    assert message in str(error.value)


def test_known_names_pass():
    check_known("part", ["a"], iter(["b", "a"]))
