"""Sampling against brute-force probabilities, and its independence from everything but its draw."""

import inspect
import math
from collections import Counter

import pytest
import torch
from extreme_sampling import Round, naive_draw, naive_hash
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import matrix_rows
from reference import random_tokens, tiny_engine, tiny_model
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron_hybrid.inference.sampling_params import Draw, SamplingParams, model_defaults
from megatron_hybrid.inference.worker import model_runner, sampler
from megatron_hybrid.inference.worker.sampler import (
    HostCopy,
    gumbel_noise,
    noise_keys,
    processed_log_probs,
    token_hash,
)


def sample(logits_nV: torch.Tensor, draws: list[Draw]) -> list[int]:
    return sampler.sample(logits_nV, draws).tolist()


def frequencies(params: SamplingParams, logits: torch.Tensor, count: int):
    """How often each token comes out of many positions of one stream."""
    params = params.resolved()
    draws = [Draw(params, seed=3, sample_index=0, position=i) for i in range(count)]
    tokens = sample(logits.expand(count, -1), draws)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


WIDE = torch.randn(400, generator=torch.Generator().manual_seed(0)) * 2.5
"""More tokens than those whose exact noise is computed."""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 3.0},
        {"top_k": 30},
        {"temperature": 1.3, "top_p": 0.9},
        {"min_p": 0.02},
        {"temperature": 0.8, "top_k": 200, "top_p": 0.95},
    ],
)
def test_draws_have_the_distribution_of_the_processors_of_transformers(fields):
    """By Pearson's chi-square: its expectation is k - 1, its variance 2 (k - 1). Log-probabilities
    are those of the distribution that is drawn from."""
    warpers = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
    }
    theirs = LogitsProcessorList(warpers[name](value) for name, value in fields.items())
    expected = theirs(torch.tensor([[0]]), WIDE[None].double())[0].softmax(0)
    rows = [SamplingParams(**fields).resolved(), SamplingParams(top_k=1).resolved()]
    log_probs, greedy = processed_log_probs(WIDE.expand(2, -1), rows)
    torch.testing.assert_close(log_probs.double(), expected.log(), atol=1e-5, rtol=1e-5)
    assert greedy.max() == 0 and greedy.isfinite().sum() == 1
    count = 10_000
    given_ = frequencies(SamplingParams(**fields), WIDE, count).double()
    assert (given_[expected == 0] == 0).all()
    # Rare tokens together, so that each cell expects some draws.
    is_rare = expected * count < 8
    cells = [torch.cat([x[~is_rare], x[is_rare].sum()[None]]) * count for x in (given_, expected)]
    cells = [x[cells[1] > 0] for x in cells]
    chi_square = ((cells[0] - cells[1]) ** 2 / cells[1]).sum().item()
    free = len(cells[0]) - 1
    assert abs(chi_square - free) < 4 * math.sqrt(2 * free)


@pytest.mark.parametrize("top_p", [1.0, 0.999999999999999])
def test_top_p_near_one_keeps_no_more_than_top_k(top_p):
    """The sum of the k probabilities may round to less than top_p."""
    params = SamplingParams(top_k=50, top_p=top_p).resolved()
    rows = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * 3
    allowed = processed_log_probs(rows, [params] * 300).isfinite()
    assert allowed.sum(1).min() > 0 and allowed.sum(1).max() <= 50


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([0.0, 0.0, 1e-9, 0.3, 0.5, 0.75, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
).map(SamplingParams.resolved)


@settings(max_examples=60, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=70), st.integers(1, 90), st.integers(0, 10**6))
def test_rows_that_are_drawn_together_are_those_drawn_alone(params, vocab_size, seed):
    """Greedy rows and others, in batches of any size, with equal logits and ruled out tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(params), vocab_size, generator=generator) * 3
    logits[::3] = logits[::3].round()
    logits[1::3, 1::2] = -torch.inf
    draws = [Draw(own, seed, sample_index=0, position=i) for i, own in enumerate(params)]
    assert sample(logits, draws) == list(map(naive_draw, logits.numpy(), draws))
    for first in (0, len(params) // 2):
        assert sample(logits[first:], draws[first:]) == sample(logits, draws)[first:]


def test_noise_has_the_bits_of_whole_numbers_and_no_larger_bound():
    points = [(0, 0, 0), (2**64 - 1, 3, 10**6), (-1, 0, 5)]
    keys = [noise_keys(*point) for point in points]
    ids = torch.tensor([0, 1, 2, 151_935, 2**31 - 1], dtype=torch.int32)
    hashes = token_hash(ids[None], torch.tensor(keys, dtype=torch.int32).T[:, :, None])
    assert hashes.tolist() == [naive_hash(ids.numpy(), own).tolist() for own in keys]
    numbers = torch.tensor([[0, 1, 2, 1000, *range(10**6, 2**31, 10**7), 2**31 - 1]])
    noise = gumbel_noise(numbers.int())
    above = sampler.noise_bound(numbers.int()) - noise
    assert above.min() >= 0 and above[(noise > 3) & (numbers >= 1000)].max() < 0.1


def test_streams_of_seeds_samples_positions_and_tokens_are_uncorrelated():
    ids = torch.arange(2000, dtype=torch.int32)[None]

    def stream(seed, sample_index, position, first=0):
        keys = torch.tensor(noise_keys(seed, sample_index, position), dtype=torch.int32)
        return gumbel_noise(token_hash(ids + first, keys.view(2, 1, 1)))[0]

    base = stream(1, 0, 7)
    others = [(2, 0, 7), (1, 1, 7), (1, 0, 8), (1, 0, 7, 1), (1, 0, 7, 2000)]
    rows = torch.corrcoef(torch.stack([base, *(stream(*other) for other in others)]))[0, 1:]
    assert rows.abs().max() < 0.08  # 3.5 standard deviations
    # Gumbel's mean and variance
    assert abs(base.mean() - 0.5772) < 0.1 and abs(base.var() - math.pi**2 / 6) < 0.2


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_a_row_whose_tokens_are_not_all_candidates_says_so(top_p):
    params = [SamplingParams(top_p=top_p, min_p=m).resolved() for m in (0.0, 0.001)]
    draws = [Draw(params[i % 2], 1, 0, i) for i in range(60)]
    rows = WIDE.expand(60, -1)
    exact = torch.tensor(sample(rows, draws))
    kept = processed_log_probs(rows, [draw.params for draw in draws]).isfinite().sum(1)
    for size in (1, 8, 64, 399):
        tokens = sampler.sample(rows, draws, size)
        assert torch.equal(tokens, torch.where(kept <= size, exact, -1))


def test_a_step_draws_again_what_was_not_among_the_candidates(monkeypatch):
    params = SamplingParams(
        top_p=0.97, seed=1, num_tokens_to_generate=5, return_log_probs=True, top_n_logprobs=2
    )
    model, prompts = tiny_model("*-"), [random_tokens(9, seed=i) for i in range(3)]

    def answers(num_candidates):
        monkeypatch.setattr(model_runner, "NUM_CANDIDATES", num_candidates)
        engine = tiny_engine(model, logprobs_mode="processed_logprobs")
        results = engine.generate(prompts, [params, SamplingParams(top_k=1), params])
        return [(own.token_ids, own.log_probs, own.top_n_logprobs) for own in results]

    reads = []
    read = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda x: reads.append(x) or read(x))
    expected = answers(97)
    once = len(reads)
    assert answers(1) == expected
    assert len(reads) > 2 * once


@pytest.mark.parametrize("seed", matrix_rows(range(4), *range(2)))
def test_extreme_values_and_rows_without_finite_logits_are_their_requests_alone(seed):
    """With drafts and without, as samples, in graphs; draws are those of a naive model, and they
    are drawn again at most until all tokens are candidates."""
    counts = Counter()
    Round(seed, counts).run()
    assert counts["draws"] > 50 and counts["length"]
    assert any("NaN" in ended for ended in counts)


def test_values_come_to_the_host_as_they_are():
    tensors = [
        torch.tensor([0, 151_935, 2**31, -1]),
        torch.tensor([[0.1, -torch.inf], [1e-45, -3.4e38]]),
        torch.empty(2, 0),
        torch.tensor(7),
    ]
    assert HostCopy(tensors).wait() == [tensor.tolist() for tensor in tensors]
    assert HostCopy(tensors[:1]).wait() == [tensors[0].tolist()]


# What neither the request nor the caller says ----------------------------------------------------

TUNED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 500}


def drawn_with(params: SamplingParams, generation_config: dict) -> tuple:
    """Temperature, top_k, top_p and number of tokens that a request would hold."""
    held = params.resolved(model_defaults(generation_config))
    return held.temperature, held.top_k, held.top_p, held.num_tokens_to_generate


@pytest.mark.parametrize(
    ("fields", "generation_config", "held"),
    [
        ({}, {}, (1.0, 0, 0.0, 30)),
        ({}, TUNED, (0.6, 20, 0.9, 500)),
        ({}, {"top_p": 0.9, "temperature": None}, (1.0, 0, 0.9, 30)),
        ({"temperature": 1.5, "top_k": 0}, TUNED, (1.5, 0, 0.9, 500)),
        ({"top_p": 0.0, "num_tokens_to_generate": 0}, TUNED, (0.6, 20, 0.0, 0)),
        ({"top_k": 1}, TUNED, (0.6, 1, 0.9, 500)),
        ({}, {**TUNED, "do_sample": False}, (1.0, 1, 0.0, 500)),
        # A request that says how to draw is not made greedy by the rest of the model's values.
        ({"temperature": 0.8}, {**TUNED, "do_sample": False}, (0.8, 0, 0.0, 500)),
        ({"top_p": 0.5}, {"temperature": 0}, (1.0, 0, 0.5, 30)),
        ({"num_tokens_to_generate": 7}, {"do_sample": False}, (1.0, 1, 0.0, 7)),
        ({"temperature": 0}, {"do_sample": False}, (0.0, 0, 0.0, 30)),
    ],
)
def test_the_request_goes_before_the_model_and_the_model_before_us(fields, generation_config, held):
    assert drawn_with(SamplingParams(**fields), generation_config) == held


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "hot", r"has temperature='hot': .*it must be a number from 0 to"),
        ("repetition_penalty", 0, r"has repetition_penalty=0: .*from 1e-30 to"),
        ("max_new_tokens", [3], r"has max_new_tokens=\[3\]: "),
        ("do_sample", "no", "do_sample is 'no'; it must be true or false"),
    ],
)
def test_a_bad_value_of_the_model_is_named_with_its_file(name, value, message):
    with pytest.raises(ValueError, match=r"^generation_config\.json of the model(:)? " + message):
        model_defaults({name: value})


def test_what_a_model_asks_for_and_does_not_get_is_logged(caplog):
    model_defaults({"repetition_penalty": 1.05, "num_beams": 1, "min_p": None})
    assert not caplog.messages
    model_defaults({"num_beams": 4})
    (message,) = caplog.messages
    assert "num_beams=4, which is not supported" in message


def test_a_greedy_model_keeps_its_repetition_penalty_and_drops_min_p():
    model = model_defaults({"do_sample": False, "repetition_penalty": 1.2, "min_p": 0.1})
    held = SamplingParams().resolved(model)
    assert (held.top_k, held.repetition_penalty, held.min_p) == (1, 1.2, 0.0)
    assert SamplingParams(min_p=0.3).resolved(model).top_k == 0
    assert SamplingParams(repetition_penalty=1).resolved(model).repetition_penalty == 1.0


def test_min_tokens_of_the_model_do_not_fail_a_request_for_fewer():
    model = model_defaults({"min_new_tokens": 8})
    assert SamplingParams().resolved(model).min_tokens == 8
    assert SamplingParams(num_tokens_to_generate=3).resolved(model).min_tokens == 3
    with pytest.raises(ValueError, match="min_tokens=50 exceeds num_tokens_to_generate=30"):
        SamplingParams(min_tokens=50).resolved(model)


def test_the_signature_still_names_the_fields():
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["temperature", "top_k"]
