"""JSON that is encoded in pieces."""

import json

import pytest

from megatron_hybrid.serving.json_response import encode_json


@pytest.mark.parametrize(
    "value",
    [
        *({}, [], "", None, 1.5, True, [[]], {"a": {}}, {"a": [], "b": [{"c": None}, "🦊"]}),
        *([*range(size)] for size in (255, 256, 257, 512, 1000)),
        {"a": [[*range(300)], [{"b": [*"xyz"] * 200}] * 300]},
    ],
)
def test_json_in_pieces_is_json(value):
    expected = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert encode_json(value).decode() == expected
