"""Errors over thousands of tokens; docs/measured/questions/state_dtypes.md has those over 200,000.

A token recurrence multiplies by decays near 1, which fp32 rounds, once a token; the chunked scans
add up their logarithms in float64. So Mamba layers have a limit of their own, token by token.
"""

import pytest
from matrix import matrix_rows

from benchmarks.long_states import KINDS, gradient_errors, measure

TOKENS = 2_000
EXACT, TOKEN_BY_TOKEN, ONCE, EACH_TOKEN = 1e-6, 2e-5, 5e-3, 2e-1
LIMITS = {
    "Mamba-2": {
        "one call": EXACT,
        "segments, fp32": EXACT,
        "segments, bf16": ONCE,
        "segments, fp16": ONCE / 4,
        "steps, fp32": TOKEN_BY_TOKEN,
        "steps, bf16": EACH_TOKEN,
        "steps, fp16": EACH_TOKEN / 4,
    },
}
BY_TOKEN = dict.fromkeys(("one call", "segments, fp32"), TOKEN_BY_TOKEN)
LIMITS["Mamba-1"] = LIMITS["Mamba-2"] | BY_TOKEN
STEPS = {"steps, fp32": EXACT, "steps, bf16": EACH_TOKEN / 10, "steps, fp16": EACH_TOKEN / 40}
LIMITS["GDN"] = LIMITS["Mamba-2"] | STEPS
LIMITS["KDA"] = LIMITS["GDN"]
LIMITS["short convolution"] = {
    way: limit for way, limit in LIMITS["GDN"].items() if "16" not in way
}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.mark.parametrize(
    "kind",
    matrix_rows(KINDS, *(kind for kind in KINDS if kind.name != "GDN")),  # KDA's rule with one gate
    ids=lambda kind: kind.name,
)
def test_outputs_and_states(kind):
    """Of the worst head, against float64; states in 16 bits are rounded once, or at each token."""
    found, limits = measure(kind, TOKENS), LIMITS[kind.name]
    assert found.keys() == limits.keys()
    for way, errors in found.items():
        assert max(errors.outputs + errors.states) < limits[way], way
        if "32" not in way and way != "one call":
            assert errors.states[-1] > 1e-4, way  # they are rounded indeed


@each_kind
def test_gradients_of_one_call(kind):
    limit = TOKEN_BY_TOKEN if kind.name == "Mamba-1" else 3e-6
    assert max(gradient_errors(kind, TOKENS)) < limit
