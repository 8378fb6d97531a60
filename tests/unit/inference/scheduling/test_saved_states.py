"""Which states the engine saves, out of which forward passes, and that they are the right ones."""

import pytest
from differential import InjectedError, LogitsRecorder, check_answer, failing_forward
from matrix import matrix_rows
from reference import finish, greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.cache.index.tree import Kind
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.scheduling.scheduler import MIN_CAPTURES, max_captures


class Spy:
    """Counts forward passes and copies of states, and checks all logits at the end."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.passes, self.copies = engine, 0, 0
        self.recorder = LogitsRecorder(engine)
        for owner, name, counter in (
            (engine.runner, "forward", "passes"),
            (engine.memory, "save_checkpoint", "copies"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name), counter))

    def _counted(self, function, counter):
        def call(*arguments):
            setattr(self, counter, getattr(self, counter) + 1)
            return function(*arguments)

        return call

    def serve(self, prompt, count, **options):
        request = self.engine.add_request(prompt, greedy(count), RequestOptions(**options))
        while not request.closed:
            self.engine.step()
        self.recorder.check(self.engine.model)
        check_answer(self.engine.model, request)
        self.engine.check_integrity()
        return request


def kinds(engine, tokens):
    return {p.position: p.kind for p in engine.explain(tokens).positions}


@pytest.mark.parametrize("pattern", matrix_rows(["MG*-W-", "M*", "SC*"], "M*"))
def test_an_answer_that_is_cut_resumes_near_the_cut(pattern, monkeypatch):
    engine = tiny_engine(tiny_model(pattern))
    spy = Spy(engine, monkeypatch)
    interval = engine.cache.policy.interval_tokens
    prompt = random_tokens(interval // 2)
    request = spy.serve(prompt, 2 * interval)
    assert spy.passes == 1 + 2 * interval  # saving states in between takes no further one
    history = request.tokens.tolist()
    intervals = [p for p, kind in kinds(engine, history).items() if kind == Kind.INTERVAL]
    assert intervals == [interval, 2 * interval]
    cut = history[: 2 * interval - 5] + random_tokens(20, seed=1)
    assert spy.serve(cut, 3).prefix.skipped_tokens == interval
    cut = history[: 2 * interval + 3] + random_tokens(20, seed=2)
    assert spy.serve(cut, 3).prefix.skipped_tokens == 2 * interval
    assert spy.copies == engine.stats()["checkpoints_saved"]


def compute_again(engine, request):
    """Its next step fails and all that is cached is lost; then it goes on to its end."""
    with failing_forward(engine), pytest.raises(InjectedError):
        engine.step()
    while engine.cache.evict(1):
        pass
    finish(engine, request)


def test_all_intervals_of_an_answer_are_saved_when_a_failed_request_is_computed_again_in_parts():
    engine = tiny_engine(tiny_model("M*"), max_tokens=64)
    interval = engine.cache.policy.interval_tokens
    request = engine.add_request(random_tokens(20), greedy(300))
    while request.num_tokens < 300:
        engine.step()
    compute_again(engine, request)
    positions = engine.explain(request.tokens.tolist()).positions
    stored = {f.position for f in positions if f.is_stored and f.kind == Kind.INTERVAL}
    assert stored >= set(range(interval, 320, interval))


@pytest.mark.parametrize("pattern", ["MG*-W-", "M*"])
def test_all_states_of_a_prefill_come_out_of_one_pass(pattern, monkeypatch):
    engine = tiny_engine(tiny_model(pattern))
    spy = Spy(engine, monkeypatch)
    prompt = random_tokens(400)
    report = spy.serve(prompt, 1, cache_breakpoints=[33, 34, 128]).prefix
    assert spy.passes == 2  # the prompt, and the one token of the answer
    saved = kinds(engine, prompt)
    assert {33, 34, 128, 400} < set(saved)
    assert list(saved.values()).count(Kind.INTERVAL) == 399 // engine.cache.policy.interval_tokens
    assert report.checkpoints_saved == len(saved) + 1
    for position in (33, 34, *(p for p, kind in saved.items() if kind == Kind.INTERVAL)):
        follower = prompt[:position] + random_tokens(9, seed=position)
        assert spy.serve(follower, 2).prefix.skipped_tokens == position


def test_nothing_is_saved_twice(monkeypatch):
    engine = tiny_engine(tiny_model("M*"), cache_bytes=16 << 20)
    spy = Spy(engine, monkeypatch)
    prompt = random_tokens(200)
    first = spy.serve(prompt, 60)
    history = first.tokens.tolist()
    before = spy.copies
    spy.serve(prompt, 60)  # the same answer: all its states are there
    assert spy.copies == before
    spy.serve(history + random_tokens(5, seed=1), 1)
    spy.serve(prompt[:100] + random_tokens(30, seed=2), 1)
    engine.generate([prompt[:100] + random_tokens(30, seed=3)] * 4, greedy(0))  # single flight
    stats = engine.stats()
    assert stats["checkpoints_duplicate"] == stats["checkpoints_evicted"] == 0
    assert spy.copies == stats["checkpoints_saved"] == stats["checkpoints"]


def test_a_forward_saves_so_many_states_and_no_more(monkeypatch):
    prompt = random_tokens(300)
    engine = tiny_engine(cache_bytes=32 << 20)
    kv_bytes, state_bytes = engine.cache.spec.kv_bytes_per_token, engine.memory.slots.shape[1]
    limit = max_captures(engine.cache.spec, engine.config.max_requests, 512)
    assert limit == MIN_CAPTURES + 512 * kv_bytes // state_bytes < 200
    counts, staging = [], engine.memory.staging
    monkeypatch.setattr(
        engine.memory, "staging", lambda count: counts.append(count) or staging(count)
    )
    breakpoints = range(1, 301)
    request = engine.add_request(prompt, greedy(2), RequestOptions(cache_breakpoints=breakpoints))
    finish(engine)
    assert max(counts) == limit
    saved = [checkpoint.position for checkpoint in engine.cache.contents.stored_checkpoints()]
    # the deepest ones, and the end of the prompt, whose state is not on its way
    assert {*range(300 - limit, 301)} <= set(saved)
    assert request.prefix.checkpoints_skipped == 299 - limit
    resumed = engine.generate([[*prompt[:299], 3, 4]], greedy(2))[0]
    assert resumed.prefix.skipped_tokens == 299
    again = engine.generate([[*prompt[:50], 3, 4]], greedy(2))[0]
    assert again.prefix.skipped_tokens == 0
    assert again.prefix.miss_reason is not None
    check_answer(tiny_model(), request)
    engine.check_integrity()
