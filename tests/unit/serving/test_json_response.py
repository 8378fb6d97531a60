"""JSON of answers and events."""

import json
from math import inf, nan

import pytest

from megatron_hybrid.serving.json_response import encode_json


@pytest.mark.parametrize(
    "value",
    [
        *({}, [], "", None, 1.5, True, [[]], {"a": {}}, {"a": [], "b": [{"c": None}, "🦊"]}),
        *(
            "\x00\x7f\u2028</script>\\",
            2**70,
            {"a": [[*range(300)], [{"b": [*"xyz"] * 200}] * 300]},
        ),
    ],
)
def test_an_answer_is_compact_json(value):
    expected = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert encode_json(value).decode() == expected


def test_numbers_that_json_lacks_are_null():
    assert encode_json([nan, inf, -inf, 1e-300]) == b"[null,null,null,1e-300]"
