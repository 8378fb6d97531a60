"""Ctrl-C: in the middle of a step it waits, and nothing is lost or counted twice. A run that is
asked to end finishes its step; a later one ends it at once."""

import itertools
import signal
from functools import partial

import pytest
from interrupted import assert_no_lock_is_held, press_at
from reference import finish, greedy, greedy_tokens, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.cache.pages.allocator import PageAllocator
from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.offload.disk_store import DiskStore
from megatron_hybrid.utils import stop_signals as module
from megatron_hybrid.utils.interrupts import defer_sigint
from megatron_hybrid.utils.stop_signals import stop_signals

pytestmark = pytest.mark.usefixtures("interrupts")
MODEL = tiny_model()


def press():
    signal.raise_signal(signal.SIGINT)


def test_it_waits_for_the_end_of_the_block_and_the_second_one_does_not():
    seen = []
    with pytest.raises(KeyboardInterrupt), defer_sigint():
        press()
        seen.append("went on")
    assert seen == ["went on"]
    with pytest.raises(KeyboardInterrupt):  # as before
        press()
    with pytest.raises(KeyboardInterrupt), defer_sigint():
        press()
        press()
        raise AssertionError("went on")


def test_blocks_within_blocks_wait_for_the_outermost():
    seen = []
    with pytest.raises(KeyboardInterrupt), defer_sigint():
        with defer_sigint():
            press()
        seen.append("went on")
        with defer_sigint():
            press()
            seen.append("a second one waited")
    assert seen == ["went on"]


def test_a_handler_that_is_set_meanwhile_stays():
    with defer_sigint():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_of_the_caller_is_called_once_with_its_arguments():
    calls = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    with defer_sigint():
        press()
        assert calls == []
    assert calls == [signal.SIGINT]


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_handler_stays(ignored):
    signal.signal(signal.SIGINT, ignored)
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is ignored


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
    assert [result.token_ids for result in results] == [
        greedy_tokens(MODEL, prompt, 4) for prompt in prompts
    ]


@pytest.mark.parametrize("name", ["cancel", "clear_cache"])
def test_cancelling_and_clearing_are_done_whole(monkeypatch, name):
    engine = tiny_engine(MODEL)
    request = engine.add_request(random_tokens(40), greedy(4))
    while not request.done and not (name == "cancel" and request.num_generated):
        engine.step()
    call = engine.clear_cache if name == "clear_cache" else lambda: engine.cancel(request)
    operation = "recount" if name == "clear_cache" else "release"
    change = getattr(PageAllocator, operation)

    def interrupted(self, *arguments):
        change(self, *arguments)
        monkeypatch.undo()
        press()

    monkeypatch.setattr(PageAllocator, operation, interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    engine.check_integrity()
    assert engine.stats()["leases"] == 0


def test_saving_that_is_interrupted_goes_on_where_it_was(monkeypatch, tmp_path):
    """It comes when the bytes of a record are on their way and the tier has not counted them."""
    engine = tiny_engine(MODEL, cache_dir=tmp_path / "own")
    prompts = [random_tokens(60, seed=seed) for seed in range(3)]
    engine.generate(prompts, greedy(1))
    whole = engine.save_cache(tmp_path / "other")
    put, calls = DiskStore.put, itertools.count(1)

    def interrupted(self, *arguments):
        put(self, *arguments)
        if next(calls) == 2:
            press()

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DiskStore, "put", interrupted)
        engine.save_cache()
    assert next(calls) == 5  # three blocks and their state came before, all of one prompt
    assert engine.save_cache() == whole
    engine.close()
    again = tiny_engine(MODEL, cache_dir=tmp_path / "own")
    skipped = [result.prefix.skipped_tokens for result in again.generate(prompts, greedy(1))]
    assert min(skipped) > 0
    again.close()


@pytest.mark.parametrize("presses", [1, 2])
def test_closing_is_done_whole_and_can_be_done_again(monkeypatch, tmp_path, presses):
    engine = tiny_engine(MODEL, cache_dir=tmp_path)
    engine.generate([random_tokens(60)], greedy(1))
    saved = engine.save_cache()
    interrupt_closing(monkeypatch, presses)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    monkeypatch.undo()
    engine.close()
    again = tiny_engine(MODEL, cache_dir=tmp_path)  # the folder is free
    assert again.save_cache() == saved
    again.close()


def test_saving_to_another_folder_lets_it_go(monkeypatch, tmp_path):
    engine = tiny_engine(MODEL)
    engine.generate([random_tokens(60)], greedy(1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_closing(patch, presses=1)
        engine.save_cache(tmp_path)
    assert engine.save_cache(tmp_path).states > 0


def interrupt_closing(monkeypatch, presses):
    """So many interrupts while a store waits for its writer."""
    wait = DiskStore._wait_for_writer

    def interrupted(self):
        for _ in range(presses):
            press()
        wait(self)

    monkeypatch.setattr(DiskStore, "_wait_for_writer", interrupted)


def test_an_interrupt_while_others_are_cancelled_leaves_none_behind(monkeypatch):
    engine = tiny_engine(MODEL)
    step, cancel, calls = engine.step, engine.cancel, itertools.count()

    def interrupted_step():
        step()
        press()

    def interrupted_cancel(request):
        if not next(calls):
            press()
        cancel(request)

    monkeypatch.setattr(engine, "step", interrupted_step)
    monkeypatch.setattr(engine, "cancel", interrupted_cancel)
    prompts = [random_tokens(40, seed=seed) for seed in range(4)]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(prompts, greedy(4))
    assert not engine.has_work
    engine.check_integrity()


def test_an_interrupt_while_results_are_made_loses_none(monkeypatch):
    engine = tiny_engine(MODEL)
    engine.add_request([1, 2, 3], greedy(1))
    result = Request.result
    calls = itertools.count()

    def interrupted(self):
        if not next(calls):
            press()
        return result(self)

    monkeypatch.setattr(Request, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    assert [len(output.result.token_ids) for output in engine.step()] == [1]


def test_what_an_interrupted_generate_has_answered_comes_out_nowhere_else(monkeypatch):
    engine = tiny_engine(MODEL)
    other = engine.add_request([4, 5, 6], greedy(1))
    result = Request.result

    def interrupted(self):
        press()
        return result(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Request, "result", interrupted)
        engine.generate([[1, 2, 3]], greedy(1))
    assert [found.request_id for found in engine.step()] == [other.request_id]
    assert not engine.has_work


@pytest.mark.parametrize("name", ["save", "save elsewhere", "suspend", "resume", "close"])
def test_an_interrupt_at_a_line_that_takes_a_lock_leaves_it_to_nobody(name, tmp_path):
    """At each such line, of ours or of the standard library."""
    engine = tiny_engine(MODEL, cache_dir=tmp_path / "own")
    prompt = random_tokens(60)
    engine.generate([prompt], greedy(1))
    whole = engine.save_cache()
    was_there, number = True, 0
    while was_there:
        if engine.is_closed:
            engine = tiny_engine(MODEL, cache_dir=tmp_path / "own")
        calls = {
            "save": engine.save_cache,
            "save elsewhere": partial(engine.save_cache, tmp_path / f"{number}"),
            "suspend": partial(engine.suspend, "disk"),
            "resume": engine.resume,
            "close": engine.close,
        }
        if name == "resume":
            engine.suspend("disk")
        was_there = press_at(number, calls[name])
        assert_no_lock_is_held(engine)
        engine.close() if name == "close" else engine.resume()
        number += 1
    assert number > 2
    engine.close()
    again = tiny_engine(MODEL, cache_dir=tmp_path / "own")
    assert again.save_cache() == whole and not again.offload.disk.store.problems
    assert again.generate([prompt], greedy(1))[0].prefix.skipped_tokens == 60
    again.close()


def test_a_deferred_interrupt_is_let_in_where_nothing_is_half_done():
    seen = []
    with pytest.raises(KeyboardInterrupt), defer_sigint() as let_in:
        let_in()
        with defer_sigint() as inner:
            press()
            inner()
            seen.append("inner")
        try:
            let_in()
        finally:
            press()  # waits again
            seen.append("clean-up")
    assert seen == ["inner", "clean-up"]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    seconds = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
    return seconds


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_for_the_end_and_raises_nothing(number):
    before = signal.getsignal(number)
    with stop_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
    assert signal.getsignal(number) is before


def test_one_ctrl_c_that_arrives_from_terminal_and_torchrun_is_one(clock):
    with stop_signals() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            clock[0] += 0.5
        assert stop.is_set()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_later_ctrl_c_ends_at_once(clock, first):
    with stop_signals():
        signal.raise_signal(first)
        clock[0] += 1.5
        signal.raise_signal(signal.SIGINT)
        clock[0] += 1
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
