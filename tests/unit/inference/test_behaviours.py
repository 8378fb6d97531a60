"""Behaviours that users of other engines miss, each as an operation sequence on a small model.

Where a number of skipped tokens is claimed, the answer is checked against full forward passes too.
"""

import itertools

import pytest
import torch
from matrix import matrix_rows
from reference import greedy, greedy_tokens, is_greedy, random_tokens, tiny_engine, tiny_model
from settled import settled

from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.inference.requests.options import RequestOptions

MODEL = tiny_model()


def ask(engine, prompt, count=4, **options):
    """Answers one prompt, checks the answer against the reference, returns its prefix report."""
    result = engine.generate([prompt], greedy(count), RequestOptions(**options))[0]
    assert len(result.token_ids) == count
    assert is_greedy(MODEL, prompt, result.token_ids)
    report = result.prefix
    assert report.skipped_tokens + report.computed_tokens == report.prompt_tokens == len(prompt)
    engine.check_integrity()
    return report


class ForwardCounter:
    """Counts the model's forward passes and their tokens."""

    def __init__(self, engine, monkeypatch):
        self.passes = self.tokens = 0
        kind = type(engine.model)  # a `forward` of the model alone would be another model
        forward = kind.forward

        def counted(model, input_ids, *, inference_context=None):
            if inference_context is not None:  # not the reference's own passes
                self.passes += 1
                self.tokens += inference_context.ragged_layout().num_tokens
            return forward(model, input_ids, inference_context=inference_context)

        monkeypatch.setattr(kind, "forward", counted)


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


def test_a_prompt_that_ends_at_a_checkpoint_runs_no_prefill(monkeypatch):
    engine = tiny_engine(MODEL)
    prompt = random_tokens(100)
    ask(engine, prompt)
    counter = ForwardCounter(engine, monkeypatch)
    assert ask(engine, prompt, count=1).skipped_tokens == 100
    # The one pass runs the generated token, to keep the state after it for the next turn.
    assert (counter.passes, counter.tokens) == (1, 1)


def test_behaviour_2_the_first_to_part_resumes_near_its_junction_the_next_at_it():
    base = random_tokens(600)
    engine = tiny_engine(MODEL)
    ask(engine, base)
    assert ask(engine, base[:530] + random_tokens(60, seed=1)).skipped_tokens == 512
    assert ask(engine, base[:530] + random_tokens(60, seed=2)).skipped_tokens == 530
    assert ask(engine, base[:499] + random_tokens(60, seed=3)).skipped_tokens == 480
    assert ask(engine, base[:499] + random_tokens(60, seed=4)).skipped_tokens == 499


def test_behaviour_4_second_turn_skips_prompt_and_answer():
    engine = tiny_engine(MODEL)
    prompt = random_tokens(150)
    ask(engine, prompt, count=21)
    history = prompt + greedy_tokens(MODEL, prompt, 21)
    assert ask(engine, history + random_tokens(30, seed=1)).skipped_tokens == 171


def test_behaviour_4_a_history_without_the_thinking_part_skips_to_the_cut():
    engine = tiny_engine(MODEL)
    prompt = random_tokens(150)
    ask(engine, prompt, count=40)
    answer = greedy_tokens(MODEL, prompt, 40)[25:]
    assert ask(engine, prompt + answer + [1, 2, 3]).skipped_tokens == 150


def test_a_stopped_answer_is_resumed_before_its_stop_token():
    engine = tiny_engine(MODEL)
    prompt = random_tokens(80)
    expected = greedy_tokens(MODEL, prompt, 12)
    stop = next(token for i, token in enumerate(expected) if i > 3 and token not in expected[:i])
    kept = expected.index(stop)
    result = engine.generate([prompt], greedy(12, termination_id=stop))[0]
    assert (result.finish_reason, result.token_ids) == ("stop", expected[:kept])
    history = prompt + expected[: kept + 1]
    assert ask(engine, [*history, 7, 8]).skipped_tokens == 80 + kept


@pytest.mark.parametrize("mode", ["off", "memory_only", "restore"])
def test_behaviour_5_sixteen_samples_share_one_prefill(mode, monkeypatch):
    engine = tiny_engine(MODEL, max_requests=16, prefix_caching=mode)
    counter = ForwardCounter(engine, monkeypatch)
    prompt = random_tokens(90)
    results = engine.generate([prompt], greedy(3), RequestOptions(n=16))[0].samples
    assert len(results) == 16
    assert all(is_greedy(MODEL, prompt, r.token_ids) for r in results)
    decoded = 3 if mode == "restore" else 2  # the last token runs too where its state is kept
    assert counter.tokens == 90 + 16 * decoded
    engine.check_integrity()


def test_behaviour_5_equal_prompts_added_at_once_are_prefilled_once(monkeypatch):
    engine = tiny_engine(MODEL, max_requests=16)
    counter = ForwardCounter(engine, monkeypatch)
    prompt = random_tokens(90)
    results = engine.generate([prompt] * 16, greedy(3))
    assert all(is_greedy(MODEL, prompt, r.token_ids) for r in results)
    assert [r.prefix.skipped_tokens for r in results] == [0] + [90] * 15
    assert counter.tokens == 90 + 16 * 3


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


@pytest.mark.parametrize("max_tokens", matrix_rows([1, 7, 64, 512], 7, 512))
def test_behaviour_6_any_cut_of_the_prefill_saves_the_same_checkpoints(max_tokens):
    engine = tiny_engine(MODEL, max_tokens=max_tokens)
    prompt = random_tokens(200)
    ask(engine, prompt, cache_breakpoints=[33, 128])
    suffix = random_tokens(20, seed=1)
    for position in (33, 128, 200):
        follower = prompt[:position] + suffix
        assert engine.cache.match(torch.tensor(follower).numpy()).skipped_tokens == position
        assert ask(engine, follower).skipped_tokens == position


def test_behaviour_7_state_evicted_and_kv_evicted_are_told_apart():
    engine = tiny_engine(MODEL)
    settled(engine.cache)
    prompt = random_tokens(200)
    ask(engine, prompt)
    while engine.stats()["checkpoints"]:
        engine.cache.evict(1)
    report = ask(engine, [*prompt, 5])
    assert (report.shared_tokens, report.skipped_tokens) == (200, 0)
    assert report.miss_reason is MissReason.STATE_EVICTED

    engine = tiny_engine(MODEL)
    ask(engine, prompt)
    engine.cache.evict(10**6)
    report = ask(engine, prompt)
    assert report.skipped_tokens == 0
    assert report.miss_reason is MissReason.KV_EVICTED


def test_behaviour_9_a_pool_too_small_for_any_checkpoint_serves_every_request():
    model = tiny_model("M*", mamba_state_dim=128)  # a state as large as the KV of 400 tokens
    engine = tiny_engine(model, cache_bytes=48 << 10, max_sequence_length=64)
    prompt = random_tokens(40)
    for _ in range(3):
        result = engine.generate([prompt], greedy(4))[0]
        assert is_greedy(model, prompt, result.token_ids)
        assert result.prefix.skipped_tokens == 0
        engine.check_integrity()
    assert result.prefix.miss_reason is MissReason.BUDGET
    assert engine.stats()["checkpoints_no_room"] > 0


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_behaviour_10_cancelling_leaves_reference_counts_as_before(steps):
    engine = tiny_engine(MODEL, max_tokens=32)
    running = engine.add_request(random_tokens(100), greedy(50))
    for _ in range(6):
        engine.step()
    before = engine.cache.allocator.ref_counts.copy()
    held = set(before.nonzero()[0])
    request = engine.add_request(random_tokens(100)[:70] + random_tokens(90, seed=1), greedy(4))
    for _ in range(steps):
        engine.step()
    engine.cancel(request)
    after = engine.cache.allocator.ref_counts
    own = set(running.lease.block_table.ravel()) | set(running.lease.local_tables[0].ravel())
    assert set(after.nonzero()[0]) <= (held | own)
    assert (after[list(own - {0})] == 1).all()
    engine.check_integrity()
    while not running.closed:
        engine.step()
    assert is_greedy(MODEL, random_tokens(100), running.token_ids)
