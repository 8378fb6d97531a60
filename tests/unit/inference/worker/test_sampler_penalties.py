"""Biases, penalties and bans: each against its definition elsewhere, and in answers of the engine
that neither cache, batch, preemption nor samples may change."""

import numpy as np
import pytest
import torch
from host_syncs import no_host_syncs
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import random_tokens, tiny_engine, tiny_model
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker.sampler import adjust

MODEL = tiny_model()
PROMPT = random_tokens(20)


def draw_of(prompt, answer, stop_ids=(), **fields):
    """The draw of a request's next token."""
    tokens = np.array([*prompt, *answer], np.int32)
    params = SamplingParams(**fields).resolved()
    stops = frozenset(stop_ids)
    return Request(
        0, tokens, len(prompt), params, seed=1, stop_ids=stops, num_tokens=len(tokens)
    ).draw()


def rows_of(seed: int, count: int = 1, vocab_size: int = 50) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


TOKENS = st.lists(st.integers(0, 49), max_size=30)
PROMPTS = st.lists(st.integers(0, 49), min_size=1, max_size=30)


@settings(deadline=None)
@given(PROMPTS, TOKENS, st.floats(0.1, 5), st.integers(0, 1000))
def test_the_repetition_penalty_is_that_of_transformers(prompt, answer, penalty, seed):
    logits = rows_of(seed)
    given_ = adjust(logits, [draw_of(prompt, answer, repetition_penalty=penalty)])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *answer]]), logits)
    torch.testing.assert_close(given_, expected, rtol=1e-6, atol=0)


@settings(deadline=None)
@given(PROMPTS, TOKENS, st.floats(-2, 2), st.floats(-2, 2), st.integers(0, 1000))
def test_presence_and_frequency_penalties_are_those_of_openai(
    prompt, answer, presence, frequency, seed
):
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence; c counts in the answer."""
    logits = rows_of(seed)
    draw = draw_of(prompt, answer, presence_penalty=presence, frequency_penalty=frequency)
    expected = [
        mu - answer.count(j) * frequency - float(answer.count(j) > 0) * presence
        for j, mu in enumerate(logits[0].tolist())
    ]
    torch.testing.assert_close(
        adjust(logits, [draw])[0], torch.tensor(expected), rtol=1e-5, atol=1e-5
    )


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 49), st.floats(-100, 100), min_size=1), st.integers(0, 1000))
def test_a_logit_bias_is_added_as_in_transformers(biases, seed):
    logits = rows_of(seed)
    expected = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    expected = expected(torch.tensor([[0]]), logits)
    given_ = adjust(logits, [draw_of([0], [], logit_bias=biases)])
    torch.testing.assert_close(given_, expected, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(PROMPTS, TOKENS, st.integers(0, 30), st.sets(st.integers(0, 49), min_size=1))
def test_stop_tokens_are_banned_before_min_tokens_as_in_transformers(
    prompt, answer, min_tokens, stops
):
    logits = rows_of(3)
    given_ = adjust(logits, [draw_of(prompt, answer, stops, min_tokens=min_tokens)])
    expected = MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, sorted(stops))
    assert torch.equal(given_, expected(torch.tensor([[*prompt, *answer]]), logits))


FEW = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@settings(deadline=None)
@given(PROMPTS, st.lists(st.integers(0, 3), max_size=8), st.lists(FEW, min_size=1, max_size=4))
def test_the_ends_of_bad_words_are_banned_as_in_transformers(prompt, answer, words):
    given_ = adjust(rows_of(1), [draw_of(prompt, answer, bad_words_ids=words)])
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor([answer or [9]]), rows_of(1))
    torch.testing.assert_close(given_, expected)


KINDS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, -1.5, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.dictionaries(st.integers(0, 49), st.integers(-100, 100), max_size=3),
        "min_tokens": st.sampled_from([0, 4, 20]),
    },
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(PROMPTS, TOKENS, KINDS), min_size=1, max_size=6), st.integers(0, 100))
def test_rows_that_are_adjusted_together_are_those_adjusted_alone(kinds, seed):
    draws = [draw_of(prompt, answer, (7, 9), **kind) for prompt, answer, kind in kinds]
    allowed = np.random.default_rng(seed).integers(-(2**31), 2**31, (len(draws), 2), np.int32)
    for index in range(0, len(draws), 2):
        draws[index] = draws[index]._replace(allowed=allowed[index])
    logits = rows_of(seed, len(draws)).bfloat16()
    before = logits.clone()
    with no_host_syncs():
        together = adjust(logits, draws)
    assert torch.equal(logits, before)
    for row, draw in enumerate(draws):
        assert torch.equal(together[row].float(), adjust(logits[row][None], [draw])[0].float())
        if not draw.changes_logits:
            assert torch.equal(together[row], logits[row].to(together.dtype))


@pytest.mark.parametrize("vocab_size", [50, 64, 70])
def test_tokens_whose_bit_is_not_set_are_ruled_out(vocab_size):
    """Also those of a model's padded columns, for which there is no bit."""
    logits = rows_of(0, 2, vocab_size)
    words = np.array([0b1001, -(2**31)], np.int32)
    given_ = adjust(logits, [draw_of([1], []), draw_of([1], [])._replace(allowed=words)])
    expected = torch.full((vocab_size,), -torch.inf)
    kept = [token for token in (0, 3, 63) if token < vocab_size]
    expected[kept] = logits[1, kept]
    assert torch.equal(given_, torch.stack([logits[0], expected]))


def test_a_step_in_which_no_row_asks_costs_nothing():
    logits = rows_of(0, 2)
    draws = [draw_of([1, 2], [3], (7,), top_k=3, min_p=0.1), draw_of([1], [2], (7,), seed=4)]
    assert adjust(logits, draws) is logits
    assert all(draw.prompt_tokens is draw.answer_tokens is None for draw in draws)


# In the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
def test_no_stop_token_bans_no_token_of_another_request(is_first):
    last = MODEL.config.vocab_size - 1
    biased = SamplingParams(top_k=1, num_tokens_to_generate=6, logit_bias={last: 100.0})
    endless = SamplingParams(top_k=1, num_tokens_to_generate=6, min_tokens=6, termination_id=-1)
    order = slice(None, None, 1 if is_first else -1)
    prompts, params = [PROMPT, random_tokens(9, seed=1)][order], [biased, endless][order]
    results = tiny_engine(MODEL).generate(prompts, params)
    assert results[0 if is_first else 1].token_ids == [last] * 6
