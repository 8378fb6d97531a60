"""Large bodies are read in pieces, as Python's own JSON reads them."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hybrid.serving import body

NUMBERS = st.lists(st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, width=32))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | NUMBERS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def result_of(read, text: bytes) -> str:
    try:
        return repr(read(text))  # of NaN, too
    except ValueError:
        return "refused"


@settings(max_examples=150, deadline=None)
@given(
    VALUES, st.sampled_from([None, 1]), st.integers(0, 200), st.sampled_from(["", ",", "]", "7"])
)
@example([1, 2, 3, 4, 5, 6, 7, 8, "a", 9, 10], None, 200, "")
def test_a_body_in_pieces_is_what_json_reads(value, indent, place, instead):
    """Also with a character that is not there, or another one."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    text = text[:place] + instead + text[place + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_PIECE", 17)
        data = text.encode(errors="surrogatepass")
        assert result_of(body.read_json, data) == result_of(json.loads, data)


@pytest.mark.parametrize("place", [0, 1, 100_000, 32 << 10, (32 << 10) - 5, 150_000])
def test_half_a_character_is_found_anywhere_in_a_large_body(place):
    found = bytearray(b"a" * 150_010)
    assert not body._is_suspect(bytes(found))
    found[place : place + 6] = b"\\ud83d"
    assert body._is_suspect(bytes(found))
