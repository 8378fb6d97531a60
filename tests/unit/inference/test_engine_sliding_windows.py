"""Sliding windows in the engine: what a chat reuses, and how many pages a request can hold.

A window layer keeps what its next token sees, so its pages are bounded however long the request
gets, and a checkpoint holds the tail that was visible where it was taken.
"""

import itertools

import numpy as np
import pytest
from differential import TOLERANCE, LogitsRecorder
from matrix import matrix_rows
from reference import (
    full_logits,
    greedy,
    random_tokens,
    tiny_engine,
    tiny_model,
)

from megatron_hybrid.cache.report import MissReason


def window_engine(pattern, window, **fields):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1}
    model = tiny_model(pattern, **sizes, sliding_window=window)
    return tiny_engine(model, **{"max_sequence_length": 8192, "cache_bytes": 24 << 20, **fields})


# What is reused ----------------------------------------------------------------------------------


class Chat:
    """A conversation: each turn's prompt is all that was said, and something new."""

    numbers = itertools.count()

    def __init__(self, engine, system):
        self.engine, self.said, self.number = engine, list(system), next(self.numbers)

    def turn(self, new_tokens=23, count=9):
        """One turn; returns (tokens that were said before it, its prefix report)."""
        before = len(self.said)
        prompt = self.said + random_tokens(new_tokens, seed=1000 * self.number + before)
        result = self.engine.generate([prompt], greedy(count))[0]
        self.engine.check_integrity()
        self.said = prompt + result.token_ids
        assert len(self.said) == before + new_tokens + count
        return before, result.prefix


def recorded(engine):
    """Its logits are kept from here on. The function that is returned compares them with full
    forward passes without any cache, and the tokens that were drawn with them."""
    recorder = LogitsRecorder(engine)

    def check():
        longest = {}  # one pass for all that begin the same text, such as the turns of a chat
        for request, position, logits_V in sorted(
            recorder.rows, key=lambda row: row[0].num_tokens, reverse=True
        ):
            tokens = tuple(request.tokens[: request.num_tokens].tolist())
            text = next((text for text in longest if text[: len(tokens)] == tokens), tokens)
            if text not in longest:
                longest[text] = full_logits(engine.model, list(text))
            assert (longest[text][position] - logits_V).abs().max() <= TOLERANCE
            assert tokens[position + 1] == logits_V.argmax()
        assert longest

    return check


@pytest.mark.parametrize(
    ("pattern", "block", "max_tokens"),
    matrix_rows(
        [
            ("W-", 16, 600),
            ("W-", 64, 5000),
            ("W*-", 64, 600),
            ("MW*-", 16, 5000),
            ("WWWWW*", 16, 600),
        ],
        ("MW*-", 16, 5000),
    ),
)
def test_a_chat_with_a_system_prompt_of_four_windows_resumes_at_every_turn(
    pattern, block, max_tokens
):
    engine = window_engine(pattern, 1024, block_size_tokens=block, max_tokens=max_tokens)
    check = recorded(engine)
    system = random_tokens(4096)
    chat = Chat(engine, system)
    assert chat.turn()[1].skipped_tokens == 0
    for turn in range(2, 6):
        if turn == 3:  # others come between: with the same system prompt, and with their own
            Chat(engine, system).turn()
        if turn == 5:
            for seed in (1, 2):
                Chat(engine, random_tokens(1500, seed=seed)).turn()
        before, report = chat.turn()
        assert (report.shared_tokens, report.skipped_tokens) == (before, before)
        assert report.miss_reason is None
    # The first of the others left the chat at the end of the system prompt, and saved a state.
    assert Chat(engine, system).turn()[1].skipped_tokens == 4096
    check()


def test_a_report_tells_what_was_shared_and_what_was_not():
    """KV of full attention can be shared without a state; that of a window cannot."""
    prompt = random_tokens(200)
    engine = window_engine("W*-", 50, prefix_caching="memory_only")
    first = engine.add_request(prompt, greedy(9))
    engine.step()
    second = engine.add_request(prompt, greedy(9))
    engine.step()
    assert (second.prefix.shared_tokens, second.prefix.skipped_tokens) == (200, 0)
    assert second.prefix.miss_reason is MissReason.MODE
    leases = first.lease, second.lease
    assert np.array_equal(*(lease.block_table[:12] for lease in leases))
    windows = [set(lease.local_tables[0].ravel()) - {0} for lease in leases]
    assert windows[0] and windows[1] and not windows[0] & windows[1]


# How much is held --------------------------------------------------------------------------------


def blocks(num_tokens, block):
    return -(-num_tokens // block)


def bound(window, num_tokens, block):
    """Blocks of a window layer that a request holds in a forward of so many tokens: those of the
    window - 1 tokens that its first token sees, those of its own tokens, which are all written
    before any is read, and one more, since neither begins where a block does."""
    return blocks(window - 1, block) + blocks(num_tokens - 1, block) + 1


@pytest.mark.parametrize(
    ("window", "block", "max_tokens"),
    matrix_rows([(2, 16, 1), (33, 16, 20), (100, 64, 7), (30, 16, 200)], (33, 16, 20)),
)
def test_a_pool_for_one_window_serves_a_long_request(window, block, max_tokens):
    """The smallest pool that is not refused at the door is large enough, to the page. Its forwards
    are as short as need be."""
    fields = {"block_size_tokens": block, "max_tokens": max_tokens, "max_sequence_length": 200}
    page = window_engine("W-", window, **fields).cache.spec.page_bytes
    pages = bound(window, 1, block)
    small = window_engine("W-", window, cache_bytes=page * pages, **fields)
    with pytest.raises(ValueError, match=r"200 tokens does not fit in cache_bytes") as refused:
        small.add_request(random_tokens(160), greedy(40))
    remedy = "raise cache_bytes, or shorten the prompt or the answer (num_tokens_to_generate=40)"
    assert str(refused.value).endswith(f": {remedy}")
    engine = window_engine("W-", window, cache_bytes=page * (pages + 1), **fields)
    check = recorded(engine)
    for prompt in (random_tokens(160), random_tokens(160), random_tokens(159)):
        engine.generate([prompt], greedy(40))
        engine.check_integrity()
    assert not engine.stats()["preemptions"]
    check()
