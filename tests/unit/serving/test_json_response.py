"""JSON of answers and events."""

from math import inf, nan

from megatron_hybrid.serving.json_response import encode_json


def test_numbers_that_json_lacks_are_null():
    assert encode_json([nan, inf, -inf, 1e-300, "🦊"]).decode() == '[null,null,null,1e-300,"🦊"]'
