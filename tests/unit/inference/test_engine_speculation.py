"""Drafts change the number of steps and nothing else (tests/helpers/drafted.py makes random runs).

Faults of other engines, of which each has a test that compares with a run without drafts:
 1. a step without drafts after one that accepted some: the test of that name
 2. prefill cut off the grid, then A, B, A; a tier without fetches; hits behind rejected rows, or
    fewer of them; blocks of a window: `test_answers_and_hits_are_those_of_a_run_without_drafts`
 3. accepted runs across checkpoints: `test_an_accepted_run_crosses_a_checkpoint_position`
 4. kinds and modes: `test_every_layer_kind_and_cache_mode`
 5. no drafts under load, and back: `test_no_drafts_for_a_while_..`, and test_draft_length.py
 6. acceptance that rises from wrong states: `test_acceptance_that_rises_is_..`
 7. preemption, slots used again, stops inside of a run, log-probs, guides: `test_random_run`
An MTP head has its own: worker/test_mtp_drafter.py.
"""

import logging

import numpy as np
import pytest
from drafted import DraftedRun, Failing, Oracle, draft_with, poison_rejected
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import matrix_rows
from reference import greedy, is_greedy, random_tokens, tiny_engine, tiny_model
from scripted import scripted_engine

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams

MODEL = tiny_model("MW*")
BASE = random_tokens(40)
PROMPTS = [BASE + random_tokens(n, n) for n in (3, 17)]
KINDS = ("M*", "G*", "K*", "S*", "C*", "W", "L*", "HRU", "MG*-W-")


def drafting(model=MODEL, drafter=None, tokenizer=None, most=3, **fields):
    """An engine with drafts, of a drafter or of its own ones."""
    fields = {"speculation": "lookup", "num_speculative_tokens": most, **fields}
    engine = tiny_engine(model, tokenizer, **fields)
    if drafter is not None:
        draft_with(engine, drafter)
    poison_rejected(engine)
    return engine


def answers(engine, prompts, params, **options):
    """Answers of prompts in turn, then of their second turns: what is compared of each."""
    given = params, RequestOptions(**options)
    found = [engine.generate([prompt], *given)[0] for prompt in prompts]
    turns = [[*r.prompt_tokens, *r.token_ids, *random_tokens(5)] for r in found]
    found += [engine.generate([turn], *given)[0] for turn in turns]
    engine.check_integrity()
    return [(r.token_ids, r.text, r.finish_reason, r.prefix) for r in found]


def oracle_of(rows, wrong=0.0) -> Oracle:
    return Oracle({i: tokens for i, (tokens, *_) in enumerate(rows)}, wrong)


RUNS = {  # seeds of all kinds, most drafters and graphs, and what has to occur in them
    1: "draft_tokens_accepted",
    2: "disk: fetched tokens",
    3: "host: fetched tokens",
    4: "preemptions",
    11: "host: fetched tokens",
    13: "graph_steps",
    16: "preemptions",
}


@pytest.mark.parametrize("seed", matrix_rows(RUNS, 2, 16))
def test_random_run(seed):
    run = DraftedRun(seed)
    run.run()
    assert run.stats[RUNS[seed]] and run.stats["draft_tokens"]


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_a_perfect_drafter_gives_all_tokens_of_a_step_and_a_wrong_one_its_own(wrong):
    expected = tiny_engine(MODEL).generate([BASE], greedy(17))[0].token_ids
    engine = drafting(drafter=Oracle({0: expected}, wrong))
    engine.cache.policy.interval_tokens = 1 << 20  # drafts end before a state to save
    request = engine.add_request(BASE, greedy(17))
    numbers = []
    while not request.done:
        numbers.append(sum(len(output.token_ids) for output in engine.step()))
        assert request.lease is None or request.lease.own_blocks is None  # none is lent any more
    assert request.token_ids == expected
    assert numbers == ([1] * 17 if wrong else [1, 4, 4, 4, 4])
    stats = engine.stats()
    # With one token missing, two, three .. fewer are proposed.
    numbers = (13 * 3 + 2 + 1, 0) if wrong else (12, 12)
    assert (stats["draft_tokens"], stats["draft_tokens_accepted"]) == numbers


@pytest.mark.parametrize("pattern", matrix_rows(KINDS, "M*", "S*"))
def test_every_layer_kind_and_cache_mode(pattern):
    model = tiny_model(pattern, sliding_window=7)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, num_tokens_to_generate=12)
    for mode in ("off", "memory_only", "restore"):
        expected = answers(tiny_engine(model, prefix_caching=mode), PROMPTS[:1], params)
        drafter = oracle_of(expected, 0.3)
        engine = drafting(model, drafter, most=4, prefix_caching=mode, num_speculative_tokens=4)
        assert answers(engine, PROMPTS[:1], params) == expected
        assert 0 < engine.stats()["draft_tokens_accepted"] < engine.stats()["draft_tokens"]


def test_rows_of_drafts_have_the_bits_of_decodes_in_bf16_too():
    """Where a rounding is a hundred times that of fp32, any other order of sums would show."""
    model = tiny_model.__wrapped__("MGK*-SCW").bfloat16()
    params = SamplingParams(seed=2, num_tokens_to_generate=24, return_log_probs=True)
    expected = tiny_engine(model).generate([BASE, BASE[:20]], params)
    drafter = Oracle({i: result.token_ids for i, result in enumerate(expected)}, 0.3)
    for own, other in zip(drafting(model, drafter).generate([BASE, BASE[:20]], params), expected):
        assert own.token_ids == other.token_ids
        assert own.log_probs == other.log_probs


@pytest.mark.parametrize(
    ("pattern", "prompts", "count", "fields", "parts"),
    [
        ("MW*", [0, 1, 0], 12, {"max_tokens": 37}, [0.0, 0.5]),  # a prefill cut off the grid
        ("MW*", [0, 1], 14, {}, [0.0, 0.3, 1.0]),
        ("MW*", [0, 1], 12, {"host_cache_bytes": 1 << 20}, [0.3]),  # nothing is fetched from it
        ("WM", [0], 40, {"num_speculative_tokens": 9}, [0.7]),  # blocks of a window are freed
    ],
)
def test_answers_and_hits_are_those_of_a_run_without_drafts(pattern, prompts, count, fields, parts):
    """They end at junctions, and never behind rejected rows."""
    model, params = tiny_model(pattern, sliding_window=16), greedy(count)
    prompts = [PROMPTS[i] for i in prompts]
    plain = {key: value for key, value in fields.items() if key != "num_speculative_tokens"}
    expected = answers(tiny_engine(model, **plain), prompts, params)
    assert all(prefix.skipped_tokens for *_, prefix in expected[len(prompts) :])  # second turns
    for wrong in parts:
        engine = drafting(model, oracle_of(expected, wrong), **fields)
        assert answers(engine, prompts, params) == expected  # with the reports


def stored_states(engine):
    """Positions and roles of all states in the cache, and the tokens that are held."""
    states = [(c.position, c.kind) for c in engine.cache.contents.stored_checkpoints()]
    return sorted(states), engine.stats()["cached_tokens"]


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(["M*", "MW*"]),
    st.integers(0, 24),
    st.sampled_from([(0.0, 1), (0.5, 1), (1.0, 1), (1.0, 3)]),
    st.integers(0, 10**6),
)
def test_drafts_change_no_decision_of_the_cache(pattern, more_pages, drafter, seed):
    """Hits, evictions, states and free pages are those without drafts, in their order, in pools
    from one request up. Requests beside each other have wrong drafts only: others end sooner."""
    (wrong, at_a_time), model = drafter, tiny_model(pattern)
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 30, 4)
    prompts = [BASE[:n] + random_tokens(int(n) % 3, seed) for n in lengths.tolist()]
    asked = [
        SamplingParams(seed=seed, num_tokens_to_generate=int(n), stop_token_ids=random_tokens(3, n))
        for n in random.integers(0, 16, 4)
    ]
    fields = {"max_requests": at_a_time, "max_sequence_length": 48, "warm_up": False}
    spec = tiny_engine(model, **fields).cache.spec
    num_pages = (spec.num_blocks(48) + 1) * sum(spec.pages_per_block) + 2 + more_pages
    fields["cache_bytes"] = num_pages * spec.page_bytes

    def run(engine):
        engine.cache.policy.interval_tokens = 16
        results = engine.generate(prompts, asked) + engine.generate(prompts[::-1], asked)
        engine.check_integrity()
        stats, cache = engine.stats(), engine.cache
        kept = ("checkpoints_evicted", "kv_blocks_evicted", "checkpoints_no_room", "preemptions")
        answers = [(r.token_ids, r.finish_reason, r.prefix) for r in results]
        return answers, cache.digest(), stored_states(engine), [stats[key] for key in kept]

    expected = run(tiny_engine(model, **fields))
    known = Oracle({i: tokens for i, (tokens, *_) in enumerate(expected[0])}, wrong, seed)
    assert run(drafting(model, known, **fields)) == expected


@pytest.mark.parametrize(
    ("fields", "num_accepted"),
    [
        ({"stop_words": ("STOP",)}, 4),
        ({"stop_token_ids": (3,)}, 3),  # what follows a stop token is no draft
        ({"num_tokens_to_generate": 5}, 3),  # as is what follows the last one
    ],
)
def test_an_accepted_draft_that_ends_the_answer_is_counted(fields, num_accepted, monkeypatch):
    script = [0, 1, 20, 0, 3, 1, 1, 20]
    options = {"speculation": "lookup", "num_speculative_tokens": 7}
    engine = scripted_engine(monkeypatch, {5: [*script, 1]}, **options)
    draft_with(engine, Oracle({0: script}))
    result = engine.generate([[1, 2, 3, 4]], SamplingParams(seed=5, **fields))[0]
    assert result.token_ids in (script[:5], script[:4])
    assert result.accepted_draft_tokens == engine.stats()["draft_tokens_accepted"] == num_accepted


def test_no_drafts_for_a_while_and_then_all_are_accepted_again():
    expected = tiny_engine(MODEL).generate([BASE], greedy(33))[0].token_ids
    engine = drafting(drafter=Oracle({0: expected}))
    engine.cache.policy.interval_tokens = 1 << 20  # drafts end before a state to save
    drafts, request = engine.scheduler.draft_planner.drafts, engine.add_request(BASE, greedy(33))
    numbers = []
    while not request.done:
        engine.scheduler.draft_planner.drafts = None if 3 <= len(numbers) < 11 else drafts
        numbers.append(sum(len(output.token_ids) for output in engine.step()))
    assert request.token_ids == expected
    assert numbers == [1, 4, 4, *[1] * 8, 4, 4, 4, 4]


def test_acceptance_that_rises_is_that_of_the_right_tokens():
    """Loops are easy to draft, also those that a wrong state makes."""
    engine = drafting(tiny_model("M-"))
    result = engine.generate([BASE], greedy(120))[0]
    assert is_greedy(engine.model, BASE, result.token_ids)
    assert engine.num_steps < 90 and engine.stats()["draft_tokens_accepted"] > 40


def test_a_drafter_that_raises_costs_only_its_drafts(caplog):
    expected = answers(tiny_engine(MODEL), PROMPTS, greedy(11))
    engine = drafting(drafter=Failing())
    with caplog.at_level(logging.WARNING):
        assert answers(engine, PROMPTS, greedy(11)) == expected
    assert "Failing: KeyError: 'no draft'" in caplog.text
    assert "outside of the vocabulary" in caplog.text
    assert len(caplog.records) < 20 and engine.stats()["step_failures"] == 0
