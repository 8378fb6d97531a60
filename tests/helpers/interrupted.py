"""Ctrl-C in the middle of an engine's calls: at each line that takes or gives back a lock, and, as
`python tests/helpers/interrupted.py`, once or twice at random moments. `make soak` runs that."""

import _thread
import itertools
import linecache
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from reference import greedy, random_tokens, tiny_engine, tiny_model

LIMIT_S = 60
_TAKES_A_LOCK = re.compile(
    r"with self\._?(\w*lock|mutex|cond\w*)\b|(acquire|release|notify|notify_all)\(|__(enter|exit)__"
)
_PRESS = defaultdict(partial(_thread.interrupt_main, signal.SIGINT))
"""A look-up raises the signal and runs no Python, so that the handler does not run in a tracer, but
where it would run without one."""


def press_at(number: int, call) -> bool:
    """Call it, with an interrupt where the main thread comes to such a line for the `number`th time
    (from 0). Returns whether it came there."""
    lines, was_there = itertools.count(), []

    def trace(frame, event, arg):
        if event != "line":
            return trace
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if _TAKES_A_LOCK.search(text) and next(lines) == number:
            was_there.append(text)
            sys.settrace(None)
            _PRESS[object()]
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert was_there
    finally:
        sys.settrace(before)
    return bool(was_there)


def assert_no_lock_is_held(engine) -> None:
    """Another thread can use the engine, and so can the thread that writes to the disk."""
    ThreadPoolExecutor(1).submit(engine.stats).result(LIMIT_S)
    if engine.offload.disk is not None:
        mutex = engine.offload.disk.store._mutex
        assert mutex.acquire(timeout=LIMIT_S)
        mutex.release()


_presses_left = [0]


def _press(*_) -> None:
    if not _presses_left[0]:
        return
    _presses_left[0] -= 1
    if not _presses_left[0]:
        signal.setitimer(signal.ITIMER_REAL, 0)
    os.kill(os.getpid(), signal.SIGINT)


def _call_with_presses(call, choose: random.Random, twice: bool) -> int:
    """Call it, with one interrupt, or two, from 10 microseconds to 30 ms apart. Returns the number
    of those that were raised."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raised = 0
    try:
        try:
            first, second = (10 ** choose.uniform(-5, -1.5) for _ in range(2))
            _presses_left[0] = 1 + twice
            signal.setitimer(signal.ITIMER_REAL, first, second)
            call()
            time.sleep(0.04)
        except KeyboardInterrupt:
            raised += 1
            time.sleep(0.04 if twice else 0)
    except KeyboardInterrupt:
        raised += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return raised


_num_stopped = [0]
"""Lives that a second interrupt ended: it may leave another folder locked for the process."""


def _elsewhere(engine) -> str:
    return f"{engine.config.cache_dir}-other-{_num_stopped[0]}"


PROMPTS = [random_tokens(length, seed=length) for length in (30, 50, 80)]
CALLS = {
    "save": lambda engine, choose: engine.save_cache(),
    "save elsewhere": lambda engine, choose: engine.save_cache(_elsewhere(engine)),
    "suspend": lambda engine, choose: engine.suspend(choose.choice(("disk", "host", "drop"))),
    "resume": lambda engine, choose: engine.resume(),
    "generate": lambda engine, choose: engine.generate(PROMPTS, greedy(2)),
    "explain": lambda engine, choose: engine.explain(PROMPTS[0]),
    "close": lambda engine, choose: engine.close(),
}


def interrupted_life(engine, choose: random.Random) -> int:
    """Random calls with interrupts at random moments, `close` as the last. Returns the number of
    interrupts that took effect."""
    took_effect = 0
    for name in (*choose.choices(sorted(CALLS), k=4), "close"):
        if engine.is_closed or (engine.is_suspended and name not in ("resume", "close")):
            continue
        twice = choose.random() < 0.2  # the second one may stop a change half-way
        took_effect += _call_with_presses(partial(CALLS[name], engine, choose), choose, twice)
        assert_no_lock_is_held(engine)
        if twice:
            _num_stopped[0] += 1
            break
        if not engine.is_closed:
            engine.check_integrity()
    engine.close()
    return took_effect


def fuzz(rounds: int, seed: int) -> int:
    """Lives of an engine, each in the folder of an earlier one. Returns the number of interrupts
    that took effect."""
    choose, took_effect = random.Random(seed), 0
    model = tiny_model("MG*-")
    expected = [r.token_ids for r in tiny_engine(model).generate(PROMPTS, greedy(2))]
    signal.signal(signal.SIGALRM, _press)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            fields = {"cache_bytes": 300 << 10, "max_sequence_length": 128}
            fields |= {"cache_dir": f"{folder}/{number % 7}", "host_cache_bytes": 1 << 20}
            engine = tiny_engine(model, **fields)
            answers = [r.token_ids for r in engine.generate(PROMPTS, greedy(2))]
            assert answers == expected, answers
            assert not engine.offload.disk.store.problems, engine.offload.disk.store.problems
            took_effect += interrupted_life(engine, choose)
    return took_effect


if __name__ == "__main__":
    import faulthandler

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    faulthandler.dump_traceback_later(3600, exit=True)
    print(f"{fuzz(rounds, seed=0)} interrupts took effect in {rounds} lives of an engine")
