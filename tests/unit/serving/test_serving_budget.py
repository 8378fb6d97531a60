"""A body is measured before anything is made of it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid.serving.errors import ApiError
from megatron_hybrid.serving.json_body import RequestBudget, values_of

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,:[{}]\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\,:['), inner),
    max_leaves=12,
)


def counts(value) -> tuple[int, int]:
    """Objects, lists and members, and commas, of a value."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [counts(each) for each in (value.values() if isinstance(value, dict) else value)]
    members = 1 + (len(value) if isinstance(value, dict) else 0) + sum(each[0] for each in inner)
    return members, max(0, len(value) - 1) + sum(each[1] for each in inner)


@settings(max_examples=60)
@given(VALUES)
def test_the_values_of_a_body_are_those_that_python_reads(value):
    body = json.dumps(value)
    assert values_of(body.encode()) == counts(json.loads(body))


def test_a_body_of_more_values_than_can_be_answered_is_refused():
    budget = RequestBudget(context=100, max_prompts=3, vocab_size=300)
    most = 16 * 100 + (64 << 10)
    messages = [{"role": "user", "content": "a: {[,"}] * (most // 3 - 1)
    budget.check(json.dumps({"messages": messages}).encode())
    with pytest.raises(ApiError, match=f"the body has {most + 2} objects, lists and members"):
        budget.check(json.dumps({"messages": [*messages, messages[0], []]}).encode())
    ids = list(range(3 * 100 + 300 + (64 << 10) + 1))
    budget.check(json.dumps(ids).encode())
    with pytest.raises(ApiError, match=f"{len(ids)} elements, and .* allows {len(ids) - 1}"):
        budget.check(json.dumps([*ids, 1]).encode())
