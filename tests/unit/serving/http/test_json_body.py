"""Bodies are measured, and are what Python's own JSON reads, less what cannot be written again."""

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.http.json_body import RequestBudget, read_json, values_of
from megatron_hybrid.serving.http.json_response import encode_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def result_of(read, text: bytes) -> str:
    try:
        return repr(read(text))
    except ValueError:
        return "refused"


def read_by_python(text: bytes):
    value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    json.dumps(value, ensure_ascii=False).encode()  # raises for half of a character
    return value


def _refuse(text: str):
    raise ValueError(text)


def _finite(text: str) -> float:
    if math.isinf(float(text)):
        raise ValueError(text)
    return float(text)


@settings(max_examples=60)
@given(
    VALUES,
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(0, 200),
    st.sampled_from(["", ",", "]", "7", "\\", "\x0c"]),
)
@example([1, 2, 3, 4, 5, 6, 7, 8, "a", 9, 10], None, False, 200, "")
def test_a_body_is_what_python_reads_and_writes_again(value, indent, is_ascii, place, instead):
    """Also with a character that is not there, or another one."""
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    data = (text[:place] + instead + text[place + 1 :]).encode(errors="surrogatepass")
    assert result_of(read_json, data) == result_of(read_by_python, data)


@pytest.mark.parametrize(
    "text",
    [
        *("1e999", "-1E+400", "[[1e309]]", '{"a": {"b": 1e999}}', "1" * 320 + ".0", "1" * 5000),
        *("9" * 300 + "e10", "-" + "9" * 299 + ".5E+10"),
        *('"\\ud800"', '{"a\\udc00b": 1}', "[NaN]", "-Infinity", "[" * 9999, "", '"a'),
    ],
)
def test_what_cannot_be_written_as_json_again_is_refused(text):
    with pytest.raises(json.JSONDecodeError, match=r"line 1|beyond float64"):
        read_json(text.encode())


def test_a_byte_order_mark_is_read_over_and_utf16_is_refused():
    assert read_json('\ufeff{"a": "é"}'.encode()) == {"a": "é"}
    with pytest.raises(json.JSONDecodeError):
        read_json('{"a": 1}'.encode("utf-16"))


def test_large_numbers_that_float64_holds_are_read():
    assert read_json(b'[1e308, "1e999 NaN", 1e-999]') == [1e308, "1e999 NaN", 0.0]


def test_numbers_that_json_lacks_are_null_in_answers():
    values = [math.nan, math.inf, -math.inf, 1e-300, "🦊"]
    assert encode_json(values).decode() == '[null,null,null,1e-300,"🦊"]'


MARKED = st.recursive(
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
@given(MARKED)
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
