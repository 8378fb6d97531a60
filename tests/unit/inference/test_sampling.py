"""Sampling against brute-force probabilities, and its independence from everything but its draw."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hybrid.inference.sampling import (
    Draw,
    SamplingParams,
    log_probs_of,
    sample,
    top_log_probs,
    uniform,
)

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.5, 0.0, 1.0])
NUM_DRAWS = 4000


def frequencies(params: SamplingParams) -> torch.Tensor:
    """How often each token comes out of many positions of one stream."""
    draws = [Draw(params, seed=3, sample_index=0, position=i) for i in range(NUM_DRAWS)]
    tokens = sample(LOGITS.expand(NUM_DRAWS, -1), draws)
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / NUM_DRAWS


def brute_force(temperature=1.0, top_k=0, top_p=0.0) -> torch.Tensor:
    """Probabilities by the definition: temper, keep k, keep the smallest set of mass p, norm."""
    probabilities = (LOGITS.double() / temperature).softmax(0)
    order = probabilities.argsort(descending=True).tolist()
    kept = order[: top_k or len(order)]
    if top_p:
        mass = sum(probabilities[i].item() for i in kept)
        total, nucleus = 0.0, []
        for token in kept:
            nucleus.append(token)
            total += probabilities[token].item() / mass
            if total >= top_p:
                break
        kept = nucleus
    result = torch.zeros(len(LOGITS), dtype=torch.float64)
    result[kept] = probabilities[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"top_p": 1.0},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.8},
    ],
)
def test_frequencies_are_the_probabilities(fields):
    expected = brute_force(**fields)
    given_ = frequencies(SamplingParams(**fields)).double()
    assert (given_[expected == 0] == 0).all()
    # Four standard deviations of a binomial proportion; the draws are fixed, so this is exact.
    bound = 4 * (expected * (1 - expected) / NUM_DRAWS).sqrt() + 1e-12
    assert ((given_ - expected).abs() <= bound).all()


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_k=1)])
def test_greedy_takes_the_first_maximum(params):
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    draws = [Draw(params, seed=i, sample_index=0, position=9) for i in range(2)]
    assert sample(logits, draws) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-308, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    draws = [Draw(SamplingParams(temperature=temperature), i, 0, i) for i in range(20)]
    assert set(sample(LOGITS.expand(20, -1) * 1e3, draws)) == {0}
    assert set(sample(-LOGITS.expand(20, -1), draws)) == {2}


def test_a_huge_temperature_is_uniform():
    params = SamplingParams(temperature=1e300)
    given_ = frequencies(params)
    assert ((given_ - 1 / 6).abs() < 0.03).all()


def test_tokens_that_are_ruled_out_are_never_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0]).expand(50, -1)
    draws = [Draw(SamplingParams(top_p=1.0), 1, 0, i) for i in range(50)]
    assert set(sample(logits, draws)) == {1, 3}


@given(st.integers(0, 2**64), st.integers(0, 15), st.lists(st.integers(0, 10**6), min_size=1))
def test_a_draw_depends_on_its_own_arguments_alone(seed, sample_index, positions):
    params = SamplingParams(temperature=0.9)
    draws = [Draw(params, seed, sample_index, position) for position in positions]
    together = sample(LOGITS.expand(len(draws), -1), draws)
    assert together == [sample(LOGITS[None], [draw])[0] for draw in draws]


def test_streams_of_seeds_samples_and_positions_are_uncorrelated():
    base = [uniform(1, 0, i) for i in range(2000)]
    for other in (
        [uniform(2, 0, i) for i in range(2000)],
        [uniform(1, 1, i) for i in range(2000)],
        [uniform(1, 0, i + 1) for i in range(2000)],
    ):
        correlation = torch.corrcoef(torch.tensor([base, other]))[0, 1].item()
        assert abs(correlation) < 0.08  # 3.5 standard deviations
    assert all(0 <= u < 1 for u in base)
    assert abs(sum(base) / 2000 - 0.5) < 0.03


def test_log_probs_are_those_of_the_untempered_softmax():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    expected = logits.double().softmax(-1).log()
    given_ = log_probs_of(logits, [6, 0, 3])
    for row, token, value in zip(range(3), (6, 0, 3), given_):
        assert value == pytest.approx(expected[row, token].item(), abs=1e-6)


def test_top_log_probs_come_most_likely_first():
    top = top_log_probs(LOGITS, 3)
    assert list(top) == [0, 3, 5]
    assert top[3] == pytest.approx(LOGITS.log_softmax(0)[3].item(), abs=1e-6)
    assert len(top_log_probs(LOGITS, 100)) == len(LOGITS)
