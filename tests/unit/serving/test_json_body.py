"""Bodies are read as Python's own JSON reads them, less what cannot be written as JSON again."""

import json
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hybrid.serving.json_body import read_json

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
