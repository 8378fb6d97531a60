"""Recorded traces: the Mooncake format, and JSONL with token ids."""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.workloads import VOCABULARY, draw_tokens
from megatron_hybrid.tools.replay.jsonl import PROMPT_FIELDS, load_jsonl, rows
from megatron_hybrid.tools.replay.protocol import Request

MOONCAKE_BLOCK = 512
MOST_BLOCK_ID = 2**44 - 1
"""`block_tokens` has 64 bits for an id and a position."""
MOST_OUTPUT = 1 << 30


def load(path: str | Path, limit: int | None = None) -> Iterator[Request]:
    """Requests of a trace file; the first row tells its format.

    Raises:
        ValueError: the file is empty, of neither format, or a row is wrong.
    """
    _, keys = next(rows(path), (0, {}))
    if "hash_ids" in keys:
        return load_mooncake(path, limit)
    if any(name in keys for name in PROMPT_FIELDS):
        return islice(load_jsonl(path), limit)
    found = f"starts with the fields {list(keys)}" if keys else "is empty"
    raise ValueError(
        f"{path} {found}; its first line must be a JSON object with `hash_ids` "
        f"(Mooncake) or with `prompt` (token ids)"
    )


def load_mooncake(path: str | Path, limit: int | None = None) -> Iterator[Request]:
    """The format of the Mooncake release (FAST'25): one JSON object a line with `timestamp` in ms,
    `input_length` and `output_length` in tokens, and one id in `hash_ids` for each block of 512
    tokens of the input. Equal ids mean equal tokens, so an id is expanded to 512 pseudo-random
    ones. Outputs and sessions are not recorded: every output is new, every request its own session.

    Raises:
        ValueError: a row is wrong, or earlier than the one before; names file, line and remedy.
    """
    rng, latest = np.random.default_rng(1), 0.0
    for i, (number, row) in enumerate(islice(rows(path), limit)):
        try:
            _check_mooncake(row, latest)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        latest = row["timestamp"]
        output = draw_tokens(rng, max(1, row["output_length"]))
        blocks = np.concatenate([block_tokens(block_id) for block_id in row["hash_ids"]])
        yield Request(blocks[: row["input_length"]], output, i, 0, row["timestamp"] / 1000)


def _check_mooncake(row: dict[str, Any], latest: float) -> None:
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not ids or not all(_whole(i, 0, MOST_BLOCK_ID) for i in ids):
        raise ValueError(
            f"`hash_ids` is {str(ids)[:60]}: give a list of at least one whole number from 0 to "
            f"{MOST_BLOCK_ID}"
        )
    most = MOONCAKE_BLOCK * len(ids)
    if not _whole(length := row.get("input_length"), 1, most):
        raise ValueError(
            f"`input_length` is {length!r}: {len(ids)} `hash_ids` stand for 1 to {most} tokens, "
            f"{MOONCAKE_BLOCK} each"
        )
    if not _whole(length := row.get("output_length"), 0, MOST_OUTPUT):
        raise ValueError(
            f"`output_length` is {length!r}: give a whole number from 0 to {MOST_OUTPUT}"
        )
    time = row.get("timestamp")
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < math.inf:
        raise ValueError(f"`timestamp` is {time!r}: give milliseconds from 0 on")
    if time < latest:
        raise ValueError(
            f"`timestamp` is {time}, after {latest}: requests are replayed in the order of the "
            f"file, sort it by `timestamp`"
        )


def _whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


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
