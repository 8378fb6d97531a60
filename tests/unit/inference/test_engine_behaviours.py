"""Behaviours that users of other engines miss, each as an operation sequence on a small model.

Where a number of skipped tokens is claimed, the answer is checked against full forward passes too.
"""

import itertools

import pytest
from matrix import matrix_rows
from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model
from settled import settled

from megatron_hybrid.inference.requests.options import RequestOptions

MODEL = tiny_model()


def ask(engine, prompt, count=4):
    """Answers one prompt, checks the answer against the reference, returns its prefix report."""
    result = engine.generate([prompt], greedy(count))[0]
    assert len(result.token_ids) == count
    assert is_greedy(MODEL, prompt, result.token_ids)
    report = result.prefix
    assert report.skipped_tokens + report.computed_tokens == report.prompt_tokens == len(prompt)
    engine.check_integrity()
    return report


LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 100, 255, 257, 479, 552]


@pytest.mark.parametrize(
    ("block_size_tokens", "length"),
    matrix_rows(
        itertools.product([16, 64, 256], LENGTHS),
        *itertools.product([16], [1, 2, 15, 16, 17, 479, 552]),
        *itertools.product([64], [63, 64, 65, 100]),
        *itertools.product([256], [255, 257]),
    ),
)
def test_behaviour_1_any_length_sent_twice_skips_all_of_it(length, block_size_tokens):
    engine = tiny_engine(MODEL, block_size_tokens=block_size_tokens, cache_bytes=16 << 20)
    prompt = random_tokens(length)
    assert ask(engine, prompt).skipped_tokens == 0
    second = ask(engine, prompt)
    assert (second.shared_tokens, second.skipped_tokens) == (length, length)
    assert second.miss_reason is None


@pytest.mark.parametrize("mode", ["off", "memory_only", "restore"])
def test_behaviour_5_sixteen_samples_share_one_prefill(mode):
    engine = tiny_engine(MODEL, max_requests=16, prefix_caching=mode)
    prompt = random_tokens(90)
    results = engine.generate([prompt], greedy(3), RequestOptions(n=16))[0].samples
    assert len(results) == 16
    assert all(is_greedy(MODEL, prompt, r.token_ids) for r in results)
    decoded = 3 if mode == "restore" else 2  # the last token runs too where its state is kept
    assert engine.stats()["forward_tokens"] == 90 + 16 * decoded
    engine.check_integrity()


def test_behaviour_5_equal_prompts_added_at_once_are_prefilled_once():
    engine = tiny_engine(MODEL, max_requests=16)
    prompt = random_tokens(90)
    results = engine.generate([prompt] * 16, greedy(3))
    assert all(is_greedy(MODEL, prompt, r.token_ids) for r in results)
    assert [r.prefix.skipped_tokens for r in results] == [0] + [90] * 15
    assert engine.stats()["forward_tokens"] == 90 + 16 * 3


@pytest.mark.parametrize("max_tokens", [64, 512])
def test_single_flight_saves_the_junction_before_the_running_prefill_reaches_it(max_tokens):
    engine = tiny_engine(MODEL, max_tokens=max_tokens)
    settled(engine.cache)
    base = random_tokens(300)
    prompts = [base, base[:200] + random_tokens(30, seed=1), base[:100] + random_tokens(9, seed=2)]
    results = engine.generate(prompts, greedy(4))
    for prompt, result in zip(prompts, results):
        assert is_greedy(MODEL, prompt, result.token_ids)
    assert [r.prefix.skipped_tokens for r in results] == [0, 200, 100]
