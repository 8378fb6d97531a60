"""Seeded synthetic workloads. The same arguments give the same requests, on every machine.

The order of the random draws is part of each workload: published figures refer to these
requests, and `tests/unit/benchmarks/replay/test_replay_workloads.py` holds their hashes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hybrid.tools.replay.protocol import Request

VOCABULARY = 120_000


def draw_tokens(rng: np.random.Generator, n: float) -> np.ndarray:
    """int32 [n]; n is cut to an integer."""
    return rng.integers(0, VOCABULARY, int(n), dtype=np.int32)


def zipf(n: int, exponent: float) -> np.ndarray:
    """float64 [n]: probability of rank 1 .. n."""
    weights = np.arange(1, n + 1) ** -float(exponent)
    return weights / weights.sum()


def short_classify(limit: int = 5000, seed: int = 3) -> Iterator[Request]:
    """Classification after system prompts: 20 of them with 380 to 620 tokens (Zipf), each
    followed by a text of 10 to 60 tokens; the answer is a label of 1 to 8 tokens."""
    rng = np.random.default_rng(seed)
    systems = [draw_tokens(rng, rng.integers(380, 621)) for _ in range(20)]
    for i, k in enumerate(rng.choice(20, limit, p=zipf(20, 1))):
        prompt = np.concatenate([systems[k], draw_tokens(rng, rng.integers(10, 61))])
        yield Request(prompt, draw_tokens(rng, rng.integers(1, 9)), i, 0, float(i))


def chat(limit: int | None = None, seed: int = 4, sessions: int = 300) -> Iterator[Request]:
    """Chats of 6 to 12 turns after 10 system prompts, interleaved over an hour.

    30 % of the sessions drop the first 40 to 80 % of every answer (its thinking) from the history,
    so that the next prompt leaves the cached one right at the end of the last prompt.
    """
    rng = np.random.default_rng(seed)
    systems = [draw_tokens(rng, rng.integers(300, 1501)) for _ in range(10)]
    turns = []
    for session in range(sessions):
        arrival = rng.uniform(0, 3600)
        history = [systems[rng.integers(10)]]
        drops_thinking = rng.random() < 0.3
        for _ in range(rng.integers(6, 13)):
            history.append(draw_tokens(rng, max(4, rng.lognormal(np.log(60), 0.8))))
            prompt_pieces = len(history)
            output = draw_tokens(rng, max(8, rng.lognormal(np.log(200), 0.7)))
            thinking = int(len(output) * rng.uniform(0.4, 0.8)) if drops_thinking else 0
            history.append(output[thinking:])
            turns.append((arrival, session, history, prompt_pieces, output))
            arrival += rng.exponential(60)
    return interleaved(turns, limit)


def agent(limit: int | None = None, seed: int = 5, sessions: int = 60) -> Iterator[Request]:
    """Agents: one of 3 tool prompts (6k to 10k tokens) and a task, then 20 to 40 steps, each of
    which appends an output of 100 to 400 tokens and a tool's result of 200 to 3,000."""
    rng = np.random.default_rng(seed)
    tools = [draw_tokens(rng, rng.integers(6000, 10001)) for _ in range(3)]
    turns = []
    for session in range(sessions):
        arrival = rng.uniform(0, 600)
        history = [tools[rng.integers(3)], draw_tokens(rng, rng.integers(50, 400))]
        for _ in range(rng.integers(20, 41)):
            prompt_pieces = len(history)
            output = draw_tokens(rng, rng.integers(100, 401))
            history += [output, draw_tokens(rng, rng.integers(200, 3001))]
            turns.append((arrival, session, history, prompt_pieces, output))
            arrival += rng.exponential(20)
    return interleaved(turns, limit)


def rl_group(
    limit: int | None = None, seed: int = 6, prompts: int = 200, samples: int = 16
) -> Iterator[Request]:
    """Rollouts: 200 prompts of 300 to 2,500 tokens, each sampled 16 times in a row."""
    rng = np.random.default_rng(seed)
    limit = prompts * samples if limit is None else limit
    for first in range(0, min(limit, prompts * samples), samples):
        prompt = draw_tokens(rng, rng.integers(300, 2501))
        for i in range(first, min(first + samples, limit)):
            yield Request(prompt, draw_tokens(rng, rng.integers(50, 601)), i, 0, float(first))


def rag_fork(limit: int = 2000, seed: int = 7) -> Iterator[Request]:
    """Questions to documents: a preamble of 300 tokens, one of 40 documents of 2k to 20k tokens
    (Zipf, exponent 0.8), a question of 15 to 80 tokens that forks at an arbitrary token."""
    rng = np.random.default_rng(seed)
    preamble = draw_tokens(rng, 300)
    documents = [draw_tokens(rng, rng.integers(2000, 20001)) for _ in range(40)]
    documents = [np.concatenate([preamble, document]) for document in documents]
    for i, k in enumerate(rng.choice(40, limit, p=zipf(40, 0.8))):
        prompt = np.concatenate([documents[k], draw_tokens(rng, rng.integers(15, 81))])
        yield Request(prompt, draw_tokens(rng, rng.integers(30, 200)), i, 0, float(i))


def fluctuating(limit: int = 600, seed: int = 8, families: int = 20) -> Iterator[Request]:
    """Prompts that share a prefix of fluctuating length with the first of their family.

    The first of a family has 6,000 tokens; the second shares 5,120 of them, the third 4,992, all
    later ones a number in between; each goes on with 200 to 1,000 tokens of its own. Nobody sees
    the same junction often, so what counts is how near to a new one a request can resume.
    """
    rng = np.random.default_rng(seed)
    bases = [draw_tokens(rng, 6000) for _ in range(families)]
    seen = [0] * families
    for i, k in enumerate(rng.choice(families, limit, p=zipf(families, 0.5))):
        prompt, count = bases[k], seen[k]
        if count:
            shared = (5120, 4992)[count - 1] if count < 3 else rng.integers(4992, 5121)
            prompt = np.concatenate([prompt[:shared], draw_tokens(rng, rng.integers(200, 1001))])
        seen[k] += 1
        yield Request(prompt, draw_tokens(rng, rng.integers(20, 100)), i, 0, float(i))


def code(limit: int = 3000, seed: int = 9, developers: int = 30) -> Iterator[Request]:
    """Code completion: instructions of 200 tokens, a file (1k to 12k when it is opened) up to the
    cursor, and at most 600 tokens after it.

    A developer (Zipf, exponent 0.7) types 2 to 20 tokens between two requests, having taken 40 % of
    the completions and, in 30 % of the cases, deleted up to 30 tokens; 9 % go on elsewhere in the
    file, 3 % open another. So a prompt leaves the last one at or shortly before the cursor.
    """
    rng = np.random.default_rng(seed)
    instructions = draw_tokens(rng, 200)

    def opened() -> tuple[np.ndarray, int]:
        file = draw_tokens(rng, rng.integers(1000, 12001))
        return file, int(rng.integers(len(file)))

    files = [opened() for _ in range(developers)]
    for i, k in enumerate(rng.choice(developers, limit, p=zipf(developers, 0.7))):
        (file, cursor), move = files[k], rng.random()
        if move < 0.03:
            file, cursor = opened()
        elif move < 0.12:
            cursor = int(rng.integers(len(file)))
        start = cursor - min(cursor, rng.integers(1, 31)) if rng.random() < 0.3 else cursor
        before = np.concatenate([file[:start], draw_tokens(rng, rng.integers(2, 21))])
        after = file[cursor:]
        prompt = np.concatenate([instructions, before, after[:600]])
        output = draw_tokens(rng, rng.integers(5, 60))
        yield Request(prompt, output, i, 0, float(i))
        if rng.random() < 0.4:
            before = np.concatenate([before, output])
        files[k] = np.concatenate([before, after]), len(before)


def interleaved(turns: list[tuple], limit: int | None) -> Iterator[Request]:
    """Sessions merged by time. turns: (arrival, session, the session's history in pieces, how many
    of them are this turn's prompt, output); a history only grows, so prompts are views of it."""
    numbers: dict[int, int] = {}
    histories: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    turns = sorted(turns, key=lambda turn: turn[:2])
    for arrival, session, pieces, prompt_pieces, output in turns[:limit]:
        if session not in histories:
            histories[session] = np.concatenate(pieces), np.cumsum([len(p) for p in pieces])
        history, ends = histories[session]
        turn = numbers[session] = numbers.get(session, -1) + 1
        yield Request(history[: ends[prompt_pieces - 1]], output, session, turn, arrival)


@dataclass(frozen=True)
class Workload:
    generate: Callable[..., Iterator[Request]]
    """Takes `limit`, the number of requests."""
    budgets_gb: tuple[float, ...]
    """Cache sizes at which it is replayed: tight, middling, ample (GB of 10^9 bytes)."""


WORKLOADS = {
    "short-classify": Workload(short_classify, (1, 4, 16)),
    "chat": Workload(chat, (1, 4, 16)),
    "agent": Workload(agent, (4, 16, 64)),
    "rag-fork": Workload(rag_fork, (2, 8, 32)),
    "rl-group": Workload(rl_group, (1, 4, 16)),
    "fluctuating": Workload(fluctuating, (2, 8, 32)),
    "code": Workload(code, (1, 4, 16)),
}


def add_seeds(parser: argparse.ArgumentParser, default: Sequence[int]) -> None:
    """Add the option --seeds of the requests."""
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=default,
        metavar="N",
        help="Make the requests from these seeds. The default is %(default)s.",
    )
