"""The process that reads guides first: what llguidance cannot bound ends it, and no other."""

import pytest

from megatron_hybrid.text.guide import Guide


def chain(length):
    """Return a schema whose references lead through so many definitions, two at a time."""
    definitions = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "object"}}}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Guide.json_schema(
            {"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(32)]}
        ),
        pytest.param(
            lambda: Guide.json_schema(
                {"type": "object", "patternProperties": {f"^a{i}b+$": {} for i in range(512)}}
            ),
            marks=pytest.mark.matrix,
        ),
        lambda: Guide.json_schema(chain(2048)),
    ],
    ids=["minutes of a CPU", "pairs of patterns", "too deep for its stack"],
)
def test_a_guide_that_would_end_the_process_or_hold_a_cpu_is_refused(make):
    with pytest.raises(ValueError, match="3 s of a CPU or 512 MiB to compile, or is too deep"):
        make()
    Guide.json_schema(chain(64))  # the next guide has a process again
