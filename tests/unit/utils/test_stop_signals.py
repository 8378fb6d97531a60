"""A run that is asked to end finishes its step; a later Ctrl-C ends it at once."""

import signal

import pytest

from megatron_hybrid.utils import stop_signals as module
from megatron_hybrid.utils.stop_signals import stop_signals


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
