"""`engine.requests()` and `engine.cache_tree()`: what an operator sees of a running engine."""

import pytest
from followed_tree import FollowedTree
from reference import finish, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.view import MAX_ENDED
from megatron_hybrid.inference.sampling_params import SamplingParams

PARAMS = SamplingParams(num_tokens_to_generate=3)


def test_a_request_is_seen_while_it_waits_runs_and_after_its_end():
    engine = tiny_engine(max_requests=1, max_tokens=16)
    first = engine.add_request(random_tokens(20), PARAMS)
    second = engine.add_request(random_tokens(24, seed=1), PARAMS, RequestOptions(priority=2))
    engine.step()
    running, waiting = engine.requests()
    assert (running.request_id, running.status) == (first.request_id, "prefill")
    assert (running.prompt_tokens, running.computed_tokens, running.is_ended) == (20, 16, False)
    assert (waiting.request_id, waiting.status) == (second.request_id, "waiting")
    assert (waiting.priority, waiting.computed_tokens, waiting.edge) == (2, 0, 0)
    finish(engine)
    newest, oldest = engine.requests()
    assert (newest.request_id, oldest.request_id) == (second.request_id, first.request_id)
    assert newest.is_ended and newest.status == "length" and newest.generated_tokens == 3
    assert 0 < newest.seconds_to_first_token <= newest.seconds
    assert {newest.edge, oldest.edge} == {edge.number for edge in engine.cache_tree()}


def test_reuse_and_its_miss_reason_are_those_of_the_answer():
    engine = tiny_engine()
    prompt = random_tokens(60)
    for tokens in (prompt, prompt, [*prompt[:40], 1, 2, 3]):
        (result,) = engine.generate([tokens], PARAMS)
        seen = engine.requests()[0]
        assert seen.request_id == result.request_id
        assert seen.shared_tokens == result.prefix.shared_tokens
        assert seen.skipped_tokens == result.prefix.skipped_tokens
        assert seen.miss_reason is result.prefix.miss_reason
    assert seen.shared_tokens == 40


def test_cancelled_requests_and_all_samples_are_seen_the_last_ones_first():
    engine = tiny_engine()
    engine.cancel(engine.add_request(random_tokens(9), PARAMS))
    (seen,) = engine.requests()
    assert (seen.status, seen.skipped_tokens, seen.edge) == ("cancelled", 0, 0)
    engine.generate([random_tokens(9)], PARAMS, RequestOptions(n=3))
    assert sorted(view.sample_index for view in engine.requests()[:3]) == [0, 1, 2]
    engine.generate([random_tokens(3, seed=seed) for seed in range(MAX_ENDED + 2)], PARAMS)
    assert len(engine.requests()) == MAX_ENDED


@pytest.mark.parametrize("tiers", [("host",), ("disk",), ("host", "disk")])
def test_evicted_states_are_seen_in_the_tier_that_has_them(tiers, tmp_path):
    fields = (
        {"host_cache_bytes": 300_000 if len(tiers) > 1 else 64 << 20} if "host" in tiers else {}
    )
    if "disk" in tiers:
        fields["cache_dir"] = tmp_path
    engine = tiny_engine(tiny_model("MG*-"), cache_bytes=400_000, **fields)
    with engine:
        followed = FollowedTree()
        for seed in range(12):
            engine.generate([random_tokens(70, seed=seed)], PARAMS)
            followed.ask(engine.cache_changes, limit=4)
            followed.check(engine.cache, engine.offload.tier_of)
        states = [state for edge in engine.cache_tree() for state in edge.states]
        stats = engine.stats()
        found = {name: sum(state.tier == name for state in states) for name in ("pool", *tiers)}
        assert found["pool"] == stats["checkpoints"]
        for tier in tiers:
            assert 0 < found[tier] == stats[f"{tier}_states"]
        # What is told to be there can be fetched.
        for seed in range(12):
            told = engine.explain(random_tokens(70, seed=seed))
            on_edge = [state for state in states if state.edge == told.edge]
            below = {state.tier for state in on_edge if state.position <= 70} & set(tiers)
            assert told.below is None or told.below[0] in below
        engine.clear_cache()
        assert followed.ask(engine.cache_changes, limit=4).is_whole
        followed.check(engine.cache, engine.offload.tier_of)


def test_tokens_are_told_only_if_asked():
    engine = tiny_engine()
    prompt = random_tokens(20)
    engine.generate([prompt], PARAMS)
    assert [edge.first_tokens for edge in engine.cache_tree()] == [[]]
    assert [edge.first_tokens for edge in engine.cache_tree(num_tokens=5)] == [prompt[:5]]
    assert engine.requests()[0].last_tokens == []
    assert engine.requests(num_tokens=5)[0].last_tokens == prompt[-5:]


@pytest.mark.parametrize(
    ("view", "field", "value"),
    [
        ("cache_changes", "limit", 0),
        ("cache_changes", "num_tokens", -1),
        ("cache_tree", "max_edges", -1),
        ("requests", "num_tokens", 1.5),
    ],
)
def test_numbers_that_no_view_can_have_are_refused(view, field, value):
    with tiny_engine() as engine, pytest.raises(ValueError, match=f"^{field} is {value}; it must"):
        getattr(engine, view)(**{field: value})
