"""Is a longer prompt cheaper? Tokens computed of prompts around a block of 528 tokens.

Ours: the engine with a small model of random weights. Blocks: the rule of vLLM's `align` mode in
Qwen3.5-4B's sizes, which `benchmarks/results/replay.json` has from vLLM's own manager.
"""

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from benchmarks.questions.common import aligned, answer, engine_of, random_tokens, small_model
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.runner import replay
from megatron_hybrid.tools.replay.protocol import Request
from megatron_hybrid.tools.replay.rules import BlockAligned, unified_block

LENGTHS = range(479, 561)
PATTERN = "M-G-*-"
SHOWN = (479, 496, 512, 527, 528, 529, 544, 560)
TAIL = 64
"""Tokens after a shared prefix."""
_SHAPE = GEOMETRIES["qwen3.5-4b"]
BLOCK = unified_block(_SHAPE.recurrent_bytes() // _SHAPE.state_layers, _SHAPE.kv_bytes_per_layer)


def prompts(tokens: Sequence[int], tails: Sequence[Sequence[int]]) -> tuple[list, list]:
    """The same prompt twice; and three prompts that share it and go on differently."""
    return [tokens, tokens], [[*tokens, *tail] for tail in tails]


def computed_here(engine, tokens: Sequence[int], tails: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Tokens of `tokens` that the last prompt of each list of `prompts` computes."""
    found = []
    for sent in prompts(tokens, tails):
        engine.clear_cache()
        last = [answer(engine, prompt, 1) for prompt in sent][-1].prefix
        found.append(max(0, len(tokens) - last.skipped_tokens))
    return found[0], found[1]


def computed_in_blocks(tokens: Sequence[int], tails: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The same with states at the ends of blocks."""
    sizes = _SHAPE.kv_bytes_per_token, _SHAPE.recurrent_bytes()
    found = []
    for sent in prompts(tokens, tails):
        requests = [
            Request(np.array(prompt, np.int32), np.zeros(1, np.int32), i, 0, float(i))
            for i, prompt in enumerate(sent)
        ]
        skipped = replay(requests, BlockAligned(BLOCK, *sizes, inf)).skipped_tokens[-1]
        found.append(max(0, len(tokens) - skipped))
    return found[0], found[1]


def run(lengths: Sequence[int] = LENGTHS) -> Iterator[str]:
    """The lines of the table."""
    model = small_model(PATTERN)
    engine = engine_of(model)
    tokens = random_tokens(0, model, max(lengths))
    tails = random_tokens(1, model, 3, TAIL)
    rows, most = [("tokens", "ours", f"blocks of {BLOCK}", "ours", f"blocks of {BLOCK}")], 0
    for length in lengths:
        ours = computed_here(engine, tokens[:length], tails)
        blocks = computed_in_blocks(tokens[:length], tails)
        most = max(most, *ours)
        if length in SHOWN:
            rows.append((length, ours[0], blocks[0], ours[1], blocks[1]))
    yield "        sent again, computed    a prefix of the third prompt, computed"
    yield from aligned(rows)
    yield f"ours, all {len(lengths)} lengths from {min(lengths)} to {max(lengths)}: at most {most}"
