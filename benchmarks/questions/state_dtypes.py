"""Which dtype do recurrent states need? Errors of Mamba-2 over 200,000 tokens, against
float64, by the dtype in which states are kept between calls."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.long_states import KINDS, SEGMENT, TOKENS, heading, lines, measure

DTYPES = ("fp32", "bf16", "fp16")
MAMBA2 = next(kind for kind in KINDS if kind.name == "Mamba-2")


def _with_a_mean(tokens: int, generator):
    """Keys and values of mean 1: the state of a head that forgets nothing grows by 1 a token."""
    x, dt, B, C = MAMBA2.inputs(tokens, generator)
    return (x + 1).float().double(), dt, (B + 1).float().double(), C


def run(tokens: int = TOKENS, segment: int = SEGMENT) -> Iterator[str]:
    """The lines of the table."""
    yield "relative errors of the worst head of Mamba-2, against float64"
    yield heading(list(range(segment, tokens + 1, segment)))
    for name, way, inputs in (
        ("inputs of mean 0", "steps", MAMBA2.inputs),
        ("inputs of mean 1", "segments", _with_a_mean),
    ):
        ways = tuple(f"{way}, {dtype}" for dtype in DTYPES)
        yield from lines(name, measure(replace(MAMBA2, inputs=inputs, ways=ways), tokens, segment))
    yield f"steps: the state is kept after each token; segments: after each {segment:,}"
    yield "nan: a state overflowed"
