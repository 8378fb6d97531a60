"""The server notices when no request goes on any more, and when none runs."""

import asyncio
from types import SimpleNamespace

import pytest

from megatron_hybrid.serving import admission
from megatron_hybrid.serving.admission import Admission
from megatron_hybrid.serving.config import ServingConfig


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(admission.time, "perf_counter", lambda: clock.now)
    return clock


def engine(**fields):
    return SimpleNamespace(**{"rank_failure": None, "num_steps": 7, "is_held": False, **fields})


def look(admitting: Admission) -> None:
    """Let `watch` look once."""

    async def once() -> None:
        task = asyncio.ensure_future(admitting.watch())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(once())


def test_a_request_that_waits_while_no_step_ends_is_a_stall(clock):
    admitting = Admission(engine(), 8, ServingConfig("m"))
    look(admitting)
    clock.now += 500
    assert admitting.stall is None  # nobody waits
    with admitting.admitted("a", "") as ticket, admitting.admitted("prepared", ""):
        clock.now += 500
        assert admitting.stall is None  # the engine has none
        ticket.waits_since = clock.now
        clock.now += 119
        assert admitting.stall is None
        with admitting.admitted("b", "") as other:
            clock.now += 2
            other.waits_since = clock.now
            # One that has just come hides nothing: a client that tries again would hide all.
            assert admitting.stall == "no request has gone on for 121 s, and 2 wait"
    assert admitting.stall is None


@pytest.mark.parametrize("sign", ["step", "pause", "output", "slow client", "answered"])
def test_what_goes_on_or_waits_for_others_is_none(clock, sign):
    told = engine()
    admitting = Admission(told, 8, ServingConfig("m"))
    with admitting.admitted("a", "") as ticket:
        ticket.waits_since = clock.now
        look(admitting)
        clock.now += 200
        assert admitting.stall
        if sign == "step":
            told.num_steps += 1
        told.is_held = sign == "pause"
        look(admitting)
        if sign in ("output", "slow client"):
            ticket.count(SimpleNamespace(sample_index=1, token_ids=[5]))
            clock.now += 1000 * (sign == "slow client")
        elif sign == "answered":
            ticket.count_all([])
        assert admitting.stall is None
        ticket.waits_since = clock.now
        clock.now += 200
        assert admitting.stall


async def test_freed_memory_goes_back_once_when_nothing_runs(monkeypatch):
    calls = []
    monkeypatch.setattr(admission, "_trim", calls.append)
    monkeypatch.setattr(admission, "_REST_SECONDS", 0.001)
    admitting = Admission(engine(), 8, ServingConfig("m"))
    task = asyncio.create_task(admitting.trim_when_idle())
    with admitting.admitted("a", ""):
        await asyncio.sleep(0.05)
        assert not calls
    while not calls:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    task.cancel()
    assert calls == [0]
