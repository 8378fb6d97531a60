"""Two threads in one engine: the second gets an error at once, and nothing has changed."""

import threading

import pytest
from forks import in_fork
from reference import finish, greedy, greedy_tokens, random_tokens, tiny_engine, tiny_model
from waiting import LIMIT_S

from megatron_hybrid.inference.exclusive import EngineBusyError

MODEL = tiny_model("MG*-")
PROMPT = random_tokens(40)
CALLS = {
    "add_request": lambda engine, request: engine.add_request(PROMPT),
    "step": lambda engine, request: engine.step(),
    "generate": lambda engine, request: engine.generate([PROMPT]),
    "stream": lambda engine, request: engine.stream(PROMPT),
    "cancel": lambda engine, request: engine.cancel(request),
    "save_cache": lambda engine, request: engine.save_cache("/nonexistent"),
    "clear_cache": lambda engine, request: engine.clear_cache(),
    "load_weights": lambda engine, request: engine.load_weights({}),
    "update_weights": lambda engine, request: engine.update_weights(),
    "suspend": lambda engine, request: engine.suspend(),
    "resume": lambda engine, request: engine.resume(),
    "close": lambda engine, request: engine.close(),
    "explain": lambda engine, request: engine.explain(PROMPT),
    "stats": lambda engine, request: engine.stats(),
    "metrics": lambda engine, request: engine.metrics(),
    "check_integrity": lambda engine, request: engine.check_integrity(),
}


@pytest.fixture
def inside(monkeypatch):
    """An engine in the middle of a step that another thread runs, and that step's request."""
    engine = tiny_engine(MODEL)
    request = engine.add_request(PROMPT, greedy(5))
    is_inside, goes_on, forward = threading.Event(), threading.Event(), engine.runner.forward

    def waits(plan):
        is_inside.set()
        assert goes_on.wait(LIMIT_S)
        return forward(plan)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", waits)
        thread = threading.Thread(target=engine.step)
        thread.start()
        assert is_inside.wait(LIMIT_S)
        yield engine, request
        goes_on.set()
        thread.join()
    finish(engine)
    assert request.token_ids == greedy_tokens(MODEL, PROMPT, 5)
    assert engine.stats()["requests"] == 1


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_call_beside_another_threads_is_refused(name, inside):
    engine, request = inside
    with pytest.raises(EngineBusyError, match=rf"{name}\(\) was called while another thread"):
        CALLS[name](engine, request)


def test_a_stream_that_cannot_step_now_goes_on_later(monkeypatch):
    engine = tiny_engine(MODEL)
    stream = engine.stream(PROMPT, greedy(5))
    forward, errors = engine.runner.forward, []

    def read():
        with pytest.raises(EngineBusyError) as raised:
            next(stream)
        errors.append(raised)

    def forward_beside_a_reader(plan):
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()
        return forward(plan)

    monkeypatch.setattr(engine.runner, "forward", forward_beside_a_reader)
    engine.step()
    monkeypatch.undo()
    assert len(errors) == 1
    tokens = [token for output in stream for token in output.token_ids]
    assert tokens == greedy_tokens(MODEL, PROMPT, 5)


def test_a_call_inside_a_step_is_refused(monkeypatch):
    engine = tiny_engine(MODEL)
    request, forward = engine.add_request(PROMPT, greedy(2)), engine.runner.forward

    def steps(plan):
        for name in ("step", "cancel", "close", "load_weights", "update_weights"):
            with pytest.raises(EngineBusyError, match=rf"{name}\(\) was called inside a step"):
                CALLS[name](engine, request)
        return forward(plan)

    monkeypatch.setattr(engine.runner, "forward", steps)
    finish(engine)
    assert request.token_ids == greedy_tokens(MODEL, PROMPT, 2) and engine.epoch == 0


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_every_call_in_a_fork_is_refused_at_once(inside):
    engine, request = inside  # its lock is held by a thread that the fork has not

    def check():
        for name in CALLS.keys() - {"close"}:
            with pytest.raises(RuntimeError, match=r"this engine belongs to process .* is a fork"):
                CALLS[name](engine, request)
        with pytest.raises(RuntimeError, match="is a fork"), engine.lead():
            pass
        engine.close()

    assert in_fork(check) == 0
