"""Ctrl-C: in the middle of a step it waits, and nothing is lost or counted twice."""

import itertools
import signal
import threading

import pytest
from reference import greedy, greedy_tokens, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.cache.page_allocator import PageAllocator
from megatron_hybrid.inference.interrupts import interrupts_wait

MODEL = tiny_model()


def press():
    signal.raise_signal(signal.SIGINT)


def test_it_waits_for_the_end_of_the_block():
    seen = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        press()
        seen.append("went on")
    assert seen == ["went on"]
    with pytest.raises(KeyboardInterrupt):  # as before
        press()


def test_the_second_one_does_not_wait():
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        press()
        press()
        raise AssertionError("went on")


def test_a_handler_of_the_caller_is_called_once_with_its_arguments():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with interrupts_wait():
            press()
            assert calls == []
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_handler_stays(ignored):
    before = signal.signal(signal.SIGINT, ignored)
    try:
        with interrupts_wait():
            assert signal.getsignal(signal.SIGINT) is ignored
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_run_as_they_are():
    results = []

    def serve():
        results.append(tiny_engine(MODEL).generate([[1, 2, 3]], greedy(3))[0].generated_tokens)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert results == [greedy_tokens(MODEL, [1, 2, 3], 3)]


@pytest.mark.parametrize("operation", ["allocate", "retain", "release", "cache"])
def test_a_step_that_is_interrupted_is_done_whole(monkeypatch, operation):
    """It comes when a page has been counted and its holder does not know yet."""
    prompts = [random_tokens(40), random_tokens(40)[:30] + random_tokens(20, seed=1)]
    engine = tiny_engine(MODEL)
    change = getattr(PageAllocator, operation)
    for number in range(1, 4):
        calls = itertools.count(1)

        def interrupted(self, *arguments, calls=calls, number=number):
            result = change(self, *arguments)
            if next(calls) == number:
                press()
            return result

        engine.clear_cache()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(PageAllocator, operation, interrupted)
            engine.generate(prompts, greedy(4))
        engine.check_integrity()
        assert not engine.has_work
        assert engine.stats()["leases"] == 0
    results = engine.generate(prompts, greedy(4))
    assert [result.generated_tokens for result in results] == [
        greedy_tokens(MODEL, prompt, 4) for prompt in prompts
    ]
