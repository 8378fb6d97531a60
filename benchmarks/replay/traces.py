"""Recorded traces: the Mooncake format, and JSONL with token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.replay.workloads import VOCABULARY, draw_tokens
from megatron_hybrid.tools.replay.jsonl import PROMPT_FIELDS, load_jsonl, rows
from megatron_hybrid.tools.replay.request import Request

MOONCAKE_BLOCK = 512


def load(path: str | Path, limit: int | None = None) -> Iterator[Request]:
    """Requests of a trace file; the first line tells its format.

    Raises:
        ValueError: the file is empty, or of neither format.
    """
    with open(path, encoding="utf-8") as file:
        first = file.readline()
    keys = json.loads(first) if first.strip() else {}
    if "hash_ids" in keys:
        return load_mooncake(path, limit)
    if any(name in keys for name in PROMPT_FIELDS):
        return load_jsonl(path, limit)
    raise ValueError(
        f"{path} starts with {first[:60]!r}; its first line must be a JSON object with `hash_ids` "
        f"(Mooncake) or with `prompt` (token ids)"
    )


def load_mooncake(path: str | Path, limit: int | None = None) -> Iterator[Request]:
    """The format of the Mooncake release (FAST'25): one JSON object a line with `timestamp` in ms,
    `input_length` and `output_length` in tokens, and one id in `hash_ids` for each block of 512
    tokens of the input. Equal ids mean equal tokens, so an id is expanded to 512 pseudo-random
    ones. Outputs and sessions are not recorded: every output is new, every request its own session.
    """
    rng = np.random.default_rng(1)
    for i, (_, row) in enumerate(islice(rows(path), limit)):
        output = draw_tokens(rng, max(1, row["output_length"]))
        blocks = np.concatenate([block_tokens(block_id) for block_id in row["hash_ids"]])
        yield Request(blocks[: row["input_length"]], output, i, 0, row["timestamp"] / 1000)


def block_tokens(block_id: int) -> np.ndarray:
    """int32 [512] that depend on block_id alone: splitmix64 (Steele et al., 2014) of
    block_id * 2**20 + 1 .. 512."""
    x = np.arange(1, MOONCAKE_BLOCK + 1, dtype=np.uint64)
    x += np.uint64(block_id << 20)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x % np.uint64(VOCABULARY)).astype(np.int32)
