"""Errors over thousands of tokens; `docs/guides/long_sequences.md` has those over 200,000.

A token recurrence multiplies by decays near 1, which fp32 rounds, once a token; the chunked scans
add up their logarithms in float64. So Mamba layers have a limit of their own, token by token.
"""

import pytest
from matrix import matrix_rows

from benchmarks.long_states import KINDS, gradient_errors, measure

TOKENS = 4_000
EXACT, TOKEN_BY_TOKEN, ONCE, EACH_TOKEN = 1e-6, 2e-5, 5e-3, 2e-1
LIMITS = {
    "Mamba-2": {
        "one call": EXACT,
        "segments, fp32": EXACT,
        "segments, bf16": ONCE,
        "steps, fp32": TOKEN_BY_TOKEN,
        "steps, bf16": EACH_TOKEN,
    },
    "Mamba-1": {
        "one call": TOKEN_BY_TOKEN,
        "segments, fp32": TOKEN_BY_TOKEN,
        "segments, bf16": ONCE,
        "steps, fp32": TOKEN_BY_TOKEN,
        "steps, bf16": EACH_TOKEN,
    },
    "GDN": {
        "one call": EXACT,
        "segments, fp32": EXACT,
        "segments, bf16": ONCE,
        "steps, fp32": EXACT,
        "steps, bf16": EACH_TOKEN / 10,
    },
}
LIMITS["KDA"] = LIMITS["GDN"]
LIMITS["short convolution"] = {
    way: limit for way, limit in LIMITS["GDN"].items() if "bf16" not in way
}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@pytest.mark.parametrize(
    "kind",
    matrix_rows(KINDS, *(kind for kind in KINDS if kind.name != "GDN")),  # KDA's rule with one gate
    ids=lambda kind: kind.name,
)
def test_outputs_and_states(kind):
    """Of the worst head, relative to float64; states in bf16 are rounded once, or at each token."""
    found, limits = measure(kind, TOKENS), LIMITS[kind.name]
    assert found.keys() == limits.keys()
    for way, errors in found.items():
        assert max(errors.outputs + errors.states) < limits[way], way
        if "bf16" in way:
            assert errors.states[-1] > 1e-3, way  # they are rounded indeed


@each_kind
def test_gradients_of_one_call(kind):
    limit = TOKEN_BY_TOKEN if kind.name == "Mamba-1" else 3e-6
    assert max(gradient_errors(kind, TOKENS)) < limit
