"""What is computed again as a function of length: where coarse blocks make a cliff."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.engines import ENGINES
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.runner import replay
from benchmarks.replay.workloads import draw_tokens
from megatron_hybrid.tools.replay.protocol import Request

BUDGET_BYTES = 64e9
"""Nothing is evicted."""
SUFFIX_TOKENS = 64
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Cliff:
    """Tokens computed again by one engine."""

    geometry: str
    engine: str
    lengths: list[int]
    repeated: list[int]
    """The same prompt of that length a second time: tokens computed."""
    forked: list[int]
    """A second prompt that shares that many tokens and goes on differently: how many of the shared
    ones are computed."""


def measure(geometry: str, engine: str, lengths: Sequence[int], seed: int = 0) -> Cliff:
    """Every length by itself, in a cache that is empty before."""
    build = next(iter(ENGINES[engine].build(GEOMETRIES[geometry], BUDGET_BYTES, 1).values()))
    rng = np.random.default_rng(seed)
    repeated, forked = [], []
    for length in lengths:
        prompt = draw_tokens(rng, length)
        repeated.append(length - _second(build(), [prompt, prompt], rng))
        forks = [np.concatenate([prompt, draw_tokens(rng, SUFFIX_TOKENS)]) for _ in range(2)]
        forked.append(max(0, length - _second(build(), forks, rng)))
    return Cliff(geometry, engine, list(lengths), repeated, forked)


def _second(engine, prompts: list[np.ndarray], rng: np.random.Generator) -> int:
    """Tokens of the last prompt that were skipped."""
    requests = [
        Request(prompt, draw_tokens(rng, ANSWER_TOKENS), i, 0, float(i))
        for i, prompt in enumerate(prompts)
    ]
    return replay(requests, engine).skipped_tokens[-1]
