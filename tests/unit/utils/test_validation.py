"""Fields take what their annotations declare, and nothing else."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal, get_args, get_origin

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.training.checkpoints import CheckpointFields
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.lora import LoraFields
from megatron_hybrid.training.optimizer import OptimizerFields
from megatron_hybrid.training.recipe import RunFields
from megatron_hybrid.training.reports import ReportFields
from megatron_hybrid.utils.validation import (
    LARGEST_FLOAT,
    LARGEST_INT,
    Range,
    check_field,
    kinds_of,
    type_hints,
)

CLASSES = (
    *(InferenceConfig, ServingConfig, HybridConfig, RunFields, OptimizerFields, DataFields),
    *(LoraFields, CheckpointFields, ReportFields),
)
LIMITED = [
    (of, field.name, kind)
    for of in CLASSES
    for field in dataclasses.fields(of)
    for kind in kinds_of(type_hints(of)[field.name])
    if get_origin(kind) in (Annotated, Literal)
]


def numbers(kind: type, limits: Range):
    """Those that a field takes."""
    below = limits.lt if limits.le is None else limits.le
    above = limits.gt if limits.ge is None else limits.ge
    if kind is int:
        return st.integers(above, LARGEST_INT if below is None else below)
    most = LARGEST_FLOAT if below is None else below
    found = st.floats(float(above), float(most), allow_nan=False)
    return found.filter(lambda number: number in limits)


@pytest.mark.parametrize(("of", "name", "kind"), LIMITED)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_field_takes_what_is_inside_of_its_limits_and_nothing_else(of, name, kind, data):
    hint = type_hints(of)[name]
    if get_origin(kind) is Literal:
        check_field(name, data.draw(st.sampled_from(get_args(kind))), hint)
        outside = data.draw(st.text().filter(lambda text: text not in get_args(kind)))
    else:
        base, limits = get_args(kind)
        check_field(name, data.draw(numbers(base, limits)), hint)
        bounds = [limit for limit in (limits.gt, limits.lt) if limit is not None]
        bounds += [] if limits.ge is None else [limits.ge - 1]
        bounds += [] if limits.le is None else [limits.le + 1]
        outside = data.draw(st.sampled_from([*bounds, math.nan, math.inf, True, "1"]))
    with pytest.raises(ValueError, match=rf"^{name} is .*; (it must be|use) "):
        check_field(name, outside, hint)
