"""The driver of a replay: who runs when, what is timed, what counts as lost."""

import gc
from itertools import count

import numpy as np
import pytest

from benchmarks.replay.runner import TURN, replay, side_by_side, timed
from megatron_hybrid.tools.replay.protocol import Attempts, Engine, Request


class Recorder(Engine):
    """An engine with room for `room` requests that writes down what happens."""

    def __init__(self, room=100):
        self.room, self.running, self.log = room, 0, []

    def begin(self, prompt, message_starts=()):
        if self.running == self.room:
            self.log.append("full")
            return None
        self.running += 1
        self.log.append(f"+{prompt[0]}")
        handle = Recorder()
        handle.skipped_tokens, handle.name = 0, prompt[0]
        return handle

    def finish(self, handle, tokens):
        self.running -= 1
        assert tokens.tolist() == [handle.name, -handle.name]
        self.log.append(f"-{handle.name}")


def requests(*sessions):
    return [
        Request(np.array([i], np.int32), np.array([-i], np.int32), session, 0, float(i))
        for i, session in enumerate(sessions)
    ]


@pytest.mark.parametrize(
    ("sessions", "in_flight", "room", "order"),
    [
        ("abc", 1, 9, "+0 -0 +1 -1 +2 -2"),
        ("abcd", 2, 9, "+0 +1 -0 +2 -1 +3 -2 -3"),
        ("abbc", 3, 9, "+0 +1 -0 -1 +2 +3 -2 -3"),  # the second turn of b waits for the first
        ("abc", 3, 1, "+0 full -0 +1 full -1 +2 -2"),
    ],
)
def test_order(sessions, in_flight, room, order):
    engine = Recorder(room)
    result = replay(requests(*sessions), engine, in_flight)
    assert " ".join(engine.log) == order
    assert len(result.seconds) == len(sessions) and min(result.seconds) > 0


def test_refused_attempts_are_timed_too(monkeypatch):
    clock = count()  # a second for each call
    monkeypatch.setattr("benchmarks.replay.runner.thread_time", lambda: next(clock))
    result = replay(requests(*"abcd"), Recorder(room=2), in_flight=3)
    assert result.seconds == [2, 2, 3, 3]


def test_engines_take_turns():
    """Each sees what it would see alone, a number of requests at a time."""
    sessions, order = range(2 * TURN + 7), []

    class Ordered(Recorder):
        def begin(self, prompt, message_starts=()):
            order.append((self.room, prompt[0]))
            return super().begin(prompt)

    engines, alone = [Ordered(), Ordered(room=2)], [Recorder(), Recorder(room=2)]
    side_by_side(iter(requests(*sessions)), engines, in_flight=3)
    for engine, other in zip(engines, alone):
        replay(requests(*sessions), other, in_flight=3)
        assert engine.log == other.log
    turns = [(room, i // TURN) for room, i in order]
    assert list(dict.fromkeys(turns)) == [(100, 0), (2, 0), (100, 1), (2, 1), (100, 2), (2, 2)]
    assert turns == sorted(turns, key=lambda turn: (turn[1], -turn[0]))


def test_an_engine_that_foresees_gets_all_requests_before_the_first():
    class Foresees(Recorder):
        def foresee(self, requests):
            self.log.append(f"{len(requests)} to come")

    engine = Foresees()
    side_by_side(iter(requests("a", "b")), [Recorder(), engine])
    assert engine.log == ["2 to come", "+0", "-0", "+1", "-1"]


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_clock_runs(collects):
    def fail():
        assert not gc.isenabled()
        raise RuntimeError

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        found, seconds = timed(lambda a, b: (a, b, gc.isenabled()), 1, 2)
        assert found == (1, 2, False) and seconds > 0
        with pytest.raises(RuntimeError):
            timed(fail)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_no_room_for_a_request_that_is_alone():
    with pytest.raises(RuntimeError, match="no room for request 0"):
        replay(requests("a"), Recorder(room=0))


def test_what_a_refused_attempt_has_cached_is_not_counted():
    attempts, prompt, other = Attempts(), [1, 2], [1, 2]
    assert attempts.admitted(prompt, 7) == 7
    attempts.refused(prompt, 3)
    attempts.refused(prompt, 5)
    assert (attempts.admitted(prompt, 9), attempts.admitted(prompt, 1)) == (3, 1)
    assert attempts.admitted(other, 9) == 9
