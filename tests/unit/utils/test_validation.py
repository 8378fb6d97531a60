"""Fields take what their annotations declare, and nothing else."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams, ThinkingBudget
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
    *(SamplingParams, ThinkingBudget, RequestOptions),
)
LIMITED = [
    (of, field.name, kind)
    for of in CLASSES
    for field in dataclasses.fields(of)
    for kind in kinds_of(type_hints(of)[field.name])
    if get_origin(kind) in (Annotated, Literal, Sequence, Mapping)
]


NO_LIMITS = Range()


def inside_of(kind: Any, limits: Range = NO_LIMITS) -> st.SearchStrategy:
    """What a field of this annotation takes, within its limits."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    below = limits.lt if limits.le is None else limits.le
    above = limits.gt if limits.ge is None else limits.ge
    if origin is Annotated:
        return inside_of(*parts)
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is int:
        return st.integers(above or 0, LARGEST_INT if below is None else below)
    if origin is float:
        least = -LARGEST_FLOAT if above is None else above
        most = LARGEST_FLOAT if below is None else below
        found = st.floats(float(least), float(most), allow_nan=False)
        return found.filter(lambda number: number in limits)
    if origin is str:
        return st.text(min_size=above or 0, max_size=below)
    if origin is Mapping:
        return st.dictionaries(*map(inside_of, parts), min_size=above or 0, max_size=5)
    return st.lists(inside_of(parts[0]), min_size=above or 0, max_size=5)


def outside_of(kind: Any) -> st.SearchStrategy:
    """What it refuses: wrong types, and values next to its limits."""
    origin, parts = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return st.text().filter(lambda text: text not in parts)
    if origin is Mapping:
        of_keys, of_parts = map(outside_of, parts)
        wrong_keys = st.dictionaries(of_keys, inside_of(parts[1]), min_size=1, max_size=2)
        return wrong_keys | st.dictionaries(inside_of(parts[0]), of_parts, min_size=1, max_size=2)
    if origin in (Sequence, tuple):
        return st.lists(outside_of(parts[0]), min_size=1, max_size=2) | st.just("text")
    if origin is Annotated and parts[0] not in (int, float):
        wrong = outside_of(parts[0])
        return wrong | st.just(()) if parts[1].ge else wrong
    if origin is str:
        return st.sampled_from([1, 0.5, b"text", ()])
    limits = parts[1] if parts else Range(ge=0) if origin is int else NO_LIMITS
    bounds = [limit for limit in (limits.gt, limits.lt) if limit is not None]
    bounds += [] if limits.ge is None else [limits.ge - 1]
    bounds += [] if limits.le is None else [limits.le * 2 + 1]
    return st.sampled_from([*bounds, math.nan, math.inf, -math.inf, 10**400, True, "1"])


@pytest.mark.parametrize(("of", "name", "kind"), LIMITED)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_field_takes_what_is_inside_of_its_limits_and_nothing_else(of, name, kind, data):
    hint = type_hints(of)[name]
    check_field(name, data.draw(inside_of(kind)), hint)
    outside = data.draw(outside_of(kind))
    with pytest.raises(ValueError, match=rf"^{name}(: a key|\[.*\])? is .*; (it must be|use) "):
        check_field(name, outside, hint)
