"""How many tokens are drafted: a table of acceptances and loads, and the way down and up again."""

import pytest
from drafted import Oracle, draft_with
from hypothesis import given
from hypothesis import strategies as st
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.drafters import BatchDrafter
from megatron_hybrid.inference.requests.draft_length import (
    FIRST_ACCEPTANCE,
    TRIAL_STEPS,
    DraftCost,
    DraftCosts,
    DraftLength,
    best_length,
    break_even,
    pay_together,
)
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker import warm_up

# Parts of a step's time, as measured with the demo model on a CPU of one thread.
ALONE, BUSY = 0.15, 0.65
COSTS = DraftCosts((1, 8), (DraftCost(ALONE), DraftCost(BUSY)))
# As it is with a CUDA graph of 1 + 3 rows, of which the first draft costs nearly all.
GRAPH = DraftCost(0.02, 0.6)


costs = st.builds(DraftCost, st.floats(0, 2), st.sampled_from((0.0, 0.01, 0.5, 1.5)))


@given(acceptance=st.floats(0, 1), cost=costs, most=st.integers(0, 9))
def test_no_other_number_gives_more_tokens_per_second(acceptance, cost, most):
    """Nor does a step without drafts, also where they cost the time of a graph's rows."""

    def rate(length):
        return sum(acceptance**i for i in range(length + 1)) / (1 + cost.of(length, 1))

    best = max(rate(length) for length in range(most + 1))
    length = DraftLength(acceptance=acceptance)
    chosen = best_length(acceptance, cost, most)
    if not pay_together([(length, chosen)], 1, cost, False):
        chosen = 0
    assert rate(chosen) == pytest.approx(best)
    if (least := break_even(cost, most)) < 1 and most:
        assert (rate(chosen) > 1) == (acceptance > least) or abs(acceptance - least) < 0.002


def test_rows_of_a_graph_are_used_by_all_decodes_or_by_none():
    def pay(*acceptances, is_trial=False, count=3):
        drafts = [(DraftLength(acceptance=each), count) for each in acceptances]
        return pay_together(drafts, 4, GRAPH, is_trial)

    assert best_length(0.4, GRAPH, 3) == 3  # the rows are there
    assert best_length(0.4, DraftCost(GRAPH.of(3, 1) / 3), 3) == 1  # as if each cost a third
    assert not pay_together([(DraftLength(acceptance=0.4), 3)], 1, GRAPH, False)
    assert pay(0.9, 0.9, 0.1, 0.1)
    assert not pay(0.9)  # the other three wait for it
    assert not pay(0.1, 0.1, 0.1, 0.1) and pay(0.1, 0.1, 0.1, 0.1, is_trial=True)
    assert pay(0.7, is_trial=True)  # three drafts at most
    assert not pay(0.7, is_trial=True, count=2)  # two cannot pay for the rows


@pytest.mark.parametrize("cost", [GRAPH, DraftCost(0.02, 1.5), DraftCost(0.25, 0.15)])
def test_decodes_that_began_at_different_times_try_their_drafts_together(cost):
    """So their trials can pay for the rows of a graph; and when they are right again, all draft."""
    lengths = [DraftLength(acceptance=0.0) for _ in range(8)]
    opened = []
    for step in range(1, 20 * TRIAL_STEPS):
        started = lengths[: 1 + step // 3]  # they come one after the other
        is_trial = step % TRIAL_STEPS == 0
        drafts = [(each, count) for each in started if (count := each.choose(cost, 3, is_trial))]
        if drafts and pay_together(drafts, len(started), cost, is_trial):
            opened.append(step)
            for each, count in drafts:
                each.note(count, count if step > 10 * TRIAL_STEPS else 0)
    trials = list(range(TRIAL_STEPS, 10 * TRIAL_STEPS + 1, TRIAL_STEPS))
    assert opened[: len(trials)] == trials
    assert opened[-TRIAL_STEPS:] == list(range(19 * TRIAL_STEPS, 20 * TRIAL_STEPS))


@pytest.mark.parametrize("works_ahead", [False, True])
def test_a_step_has_drafts_where_they_pay_for_the_rows_of_its_graph(works_ahead):
    """One decode of four that knows its answer does not, alone it does."""
    model, prompt = tiny_model("M*"), random_tokens(20)
    expected = tiny_engine(model).generate([prompt], greedy(20))[0].token_ids
    engine = tiny_engine(model, speculation="lookup", num_speculative_tokens=3)
    oracle, asked = Oracle({0: expected}), []

    class Ahead(BatchDrafter):  # as the one of a model's part
        prepare, propose = staticmethod(asked.append), staticmethod(oracle.propose)

    draft_with(engine, Ahead() if works_ahead else oracle)
    engine.scheduler.draft_planner.costs = DraftCosts((1,), (GRAPH,))
    request = engine.add_request(prompt, greedy(20))
    others = SamplingParams(top_k=1, num_tokens_to_generate=8, num_speculative_tokens=0)
    for i in range(1, 4):
        engine.add_request(random_tokens(5, i), others)
    counts = []
    while not request.done:
        before = request.num_generated
        engine.step()
        counts.append(request.num_generated - before)
    assert request.token_ids == expected
    assert counts[1:7] == [1] * 6 and counts[9:11] == [4, 4]
    assert bool(asked) == works_ahead and len(asked) < 8  # nothing is computed in vain


@pytest.mark.parametrize(
    ("num_decodes", "cost"),
    [(1, ALONE), (3, ALONE + 2 / 7 * (BUSY - ALONE)), (8, BUSY), (64, BUSY)],
)
def test_cost_at_a_load(num_decodes, cost):
    assert COSTS.at(num_decodes).draft == pytest.approx(cost)
    assert DraftCosts().at(num_decodes) == DraftCost()
    swapped = DraftCosts((1, 8), (DraftCost(0, ALONE), DraftCost(0, BUSY)))
    assert swapped.at(num_decodes).step == pytest.approx(cost)


def test_wrong_drafts_end_below_the_cost_and_are_tried_again():
    length, lengths = DraftLength(), []
    for step in range(60):
        lengths.append(length.choose(DraftCost(BUSY), 3, step % TRIAL_STEPS == 0))
        if lengths[-1]:
            length.note(lengths[-1], 0)
    assert lengths == ([1] + [0] * (TRIAL_STEPS - 1)) * 3 + [1] + [0] * 11
    assert length.acceptance < BUSY < FIRST_ACCEPTANCE
    while length.acceptance < 0.88:  # they are right from here on
        length.note(1, 1)
    assert length.choose(DraftCost(BUSY), 3) == 2


def test_a_request_that_is_joined_by_others_drafts_less_until_they_end():
    """And its answer is the same, and acceptance, too."""
    model, prompt = tiny_model("M*"), random_tokens(20)
    expected = tiny_engine(model).generate([prompt], greedy(60))[0].token_ids
    engine = tiny_engine(model, speculation="lookup", num_speculative_tokens=3)
    draft_with(engine, Oracle({0: expected, **{i: [] for i in range(1, 6)}}))
    engine.scheduler.draft_planner.costs = DraftCosts(
        (1, 2, 4), tuple(map(DraftCost, (0.1, 0.1, 1.5)))
    )
    request = engine.add_request(prompt, greedy(60))
    counts = []
    while not request.done:
        if len(counts) == 4:
            for i in range(4):
                engine.add_request(random_tokens(5, i), greedy(11))
        before = request.num_generated
        engine.step()
        counts.append(request.num_generated - before)
    assert request.token_ids == expected
    assert counts[:4] == [1, 4, 4, 4] and counts[5:15] == [1] * 10 and counts[16:18] == [4, 4]
    assert request.draft_length.num_accepted == request.draft_length.num_drafts > 0


def test_a_request_says_how_many_drafts_it_wants_and_its_result_how_many_it_had():
    model, prompt = tiny_model("M*"), random_tokens(20)
    engine = tiny_engine(model, speculation="lookup", num_speculative_tokens=3)
    plain = engine.generate([prompt], greedy(25))[0]
    numbers = []
    for most in (0, 1, None, 9):
        params = SamplingParams(top_k=1, num_tokens_to_generate=25, num_speculative_tokens=most)
        steps = engine.num_steps
        result = engine.generate([prompt], params)[0]
        assert result.token_ids == plain.token_ids
        numbers.append((engine.num_steps - steps, result.accepted_draft_tokens))
        drafts = result.draft_tokens
        assert result.accepted_draft_tokens == drafts
        assert (f", drafts {drafts} of {drafts}" in str(result)) == (most != 0)
    # The last token runs for its state.
    assert numbers == [(26, 0), (1 + 12 + 1, 12), (1 + 6 + 1, 18), (1 + 6 + 1, 18)]
    (*_, view) = engine.requests()
    assert engine.requests()[0].accepted_draft_tokens == 18
    assert view.draft_tokens == plain.draft_tokens
    with pytest.raises(ValueError, match="num_speculative_tokens is -1; it must"):
        SamplingParams(num_speculative_tokens=-1)


def test_costs_are_measured_when_an_engine_is_made_and_those_of_the_slowest_rank(monkeypatch):
    """Steps of no request leave nothing behind."""
    agreed, of_rows = [], [0.0]

    def seconds(runner, plan):
        runner.run(plan)
        drafts = sum(len(work.draft_draws) for work in plan.work)
        return 0.01 * (1 + 0.05 * drafts + of_rows[0] * (drafts > 0))

    monkeypatch.setattr(warm_up, "_seconds", seconds)
    engine = tiny_engine(tiny_model("M*"), speculation="lookup", warm_up=True)
    assert engine.scheduler.draft_planner.costs == DraftCosts(
        (1, 8), (DraftCost(0.05), DraftCost(0.4))
    )
    assert engine.stats()["draft_break_even_permille"] == 50
    assert not engine.memory.slots.any() and not engine.memory.pool.any()
    assert engine.stats()["draft_tokens"] == 0

    def slowest(own):
        agreed.append(own)
        return [700_000] * len(own)

    monkeypatch.setattr(engine.runner.ranks, "maximum", slowest)
    costs = warm_up.measure_draft_costs(engine.runner, 512)
    assert costs.costs == (DraftCost(0.7, 0.7),) * 2
    assert agreed[1::2] == [[50_000, 0], [400_000, 0]]
    of_rows[0], agreed[:] = 0.5, []  # as of a graph
    warm_up.measure_draft_costs(engine.runner, 512)
    assert agreed[1::2] == [[50_000, 500_000], [400_000, 500_000]]
    assert warm_up.measure_draft_costs(engine.runner, 1) == DraftCosts()
    few = tiny_engine(tiny_model("M*"), speculation="lookup", max_requests=5)
    assert warm_up.measure_draft_costs(few.runner, 512).num_decodes == (1, 5)


def test_the_passes_of_a_part_count_as_drafts_do(monkeypatch):
    passes = []
    engine = tiny_engine(tiny_model("M*/*"), speculation="mtp", num_speculative_tokens=2)
    predict = engine.runner.predict
    monkeypatch.setattr(
        engine.runner, "predict", lambda works, most: passes.append(most) or predict(works, most)
    )
    costs = warm_up.measure_draft_costs(engine.runner, 512)
    assert costs.num_decodes == (1, 8) and [2] in passes and [2] * 8 in passes
    assert not engine.memory.slots.any() and not engine.memory.pool.any()
