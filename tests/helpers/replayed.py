"""Requests for replays, and what a modelled cache holds after them."""

import hashlib

import numpy as np

from benchmarks.replay.runner import replay
from megatron_hybrid.tools.replay.protocol import Request


def small_requests(seed, count=80, known=10, least=0.0):
    """Prompts over two tokens, so that they share, leave and extend each other all the time.

    Args:
        known: conversations that the next prompt may begin with, of which `least` is its share.
    """
    rng = np.random.default_rng(seed)
    histories = [np.empty(0, dtype=np.int32)]
    for i in range(count):
        start = histories[rng.integers(len(histories))]
        start = start[: rng.integers(int(least * len(start)), len(start) + 1)]
        prompt = np.concatenate([start, rng.integers(0, 2, rng.integers(1, 9), dtype=np.int32)])
        output = rng.integers(0, 2, rng.integers(1, 5), dtype=np.int32)
        histories = [*histories[1 - known :], np.concatenate([prompt, output])]
        yield Request(prompt, output, i, 0, float(i))


def check_baseline(engine):
    """Recount what a baseline holds."""
    tokens = states = window_tokens = 0
    window = getattr(engine.tree, "window", 0)
    stack = [engine.tree.root]
    while stack:
        node = stack.pop()
        assert all(
            child.parent is node and child.start == node.end for child in node.children.values()
        )
        assert all(node.start < p <= node.end for p in node.states)
        assert node.pins == 0 or engine.running
        tokens += len(node.tokens)
        states += len(node.states)
        window_tokens += sum(min(position, window) for position in node.states)
        stack.extend(node.children.values())
    assert (tokens, states) == (engine.tree.num_tokens, engine.tree.num_states)
    assert window_tokens == getattr(engine.tree, "num_window_tokens", 0)
    assert engine.bytes_held <= engine.budget


def skipped_tokens(engine, *prompts):
    """Replay prompts one after the other, each with an answer of five tokens 7."""
    requests = [Request(p, np.array([7] * 5, np.int32), i, 0, 0.0) for i, p in enumerate(prompts)]
    return replay(requests, engine).skipped_tokens


def digest(requests):
    """16 hexadecimal digits of prompts and answers."""
    found = hashlib.sha256()
    for request in requests:
        found.update(len(request.prompt).to_bytes(4, "little"))
        found.update(request.prompt.astype("<i4").tobytes())
        found.update(request.output.astype("<i4").tobytes())
    return found.hexdigest()[:16]
