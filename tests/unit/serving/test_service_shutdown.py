"""The end of a server: by one signal or two, after a failed rank, and where its steps fail."""

import asyncio
import logging
import signal
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import uvicorn
from commands import run_python
from waiting import LIMIT_S

from megatron_hybrid.serving import service
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.serving.run import _Server
from megatron_hybrid.serving.service import Service, Shutdown
from megatron_hybrid.utils.child_lifetime import EndSignal


class Signals(EndSignal):
    """Notes the last deadline in place of setting it."""

    seconds = None

    def end_within(self, seconds):
        self.seconds = seconds


def fake_service(drain=asyncio.sleep):
    """A service without an engine. drain: gets 0."""
    engine = SimpleNamespace(rank_failure=None)
    return SimpleNamespace(
        drain=partial(drain, 0),
        end_now=lambda: None,
        engine=engine,
        config=ServingConfig("m", drain_seconds=0),
    )


async def never(*_):
    await asyncio.Event().wait()


ERROR = {"side_effect": RuntimeError("this step is broken")}
BROKEN = {"hangs": never, "raises": AsyncMock(**ERROR), "raises when it is called": Mock(**ERROR)}


def server_of(service):
    return _Server(uvicorn.Config(None), service, Signals())


@pytest.fixture(autouse=True)
def caught_logs(monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron_hybrid"), "propagate", True)


@pytest.fixture
def impatient(monkeypatch):
    for name in ("STEP_SECONDS", "SAVE_SECONDS"):
        monkeypatch.setattr(service, name, 0.01)


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("broken", ["first", "drain", "last"])
async def test_a_step_that_fails_stops_no_other(broken, how, impatient, caplog):
    done = []

    async def note(name, *_):
        done.append(name)

    steps = {name: partial(note, name) for name in ("first", "drain", "last")}
    steps[broken] = BROKEN[how]
    stopped = asyncio.Event()
    first, last = (("a step", steps[name], 0.01) for name in ("first", "last"))
    signals, drained = Signals(), fake_service(steps["drain"])
    ending = Shutdown(drained, signals, stopped.set, first=[first], last=[last])
    ending.take_signal()
    await stopped.wait()
    assert signals.seconds > 0.03
    assert done == [name for name in ("first", "drain", "last") if name != broken]
    assert ("was given up after" if how == "hangs" else "this step is broken") in caplog.text


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("broken", ["save_cache", "close"])
async def test_a_service_closes_though_a_step_fails(broken, how, impatient):
    calls = []

    async def note(name):
        calls.append(name)

    closing = Service.__new__(Service)
    closing.saves_cache = True
    steps = {name: partial(note, name) for name in ("save_cache", "close")}
    closing.engine = SimpleNamespace(rank_failure=None, **{**steps, broken: BROKEN[how]})
    await closing.close()
    assert calls == [name for name in steps if name != broken]
    closing.admission = SimpleNamespace(abort_all=calls.clear)
    closing.engine.end_waits = lambda: None
    closing.end_now()  # from then on it saves no cache
    await closing.close()
    assert "save_cache" not in calls


def test_a_process_that_holds_on_ends_at_its_last_deadline():
    script = """
from megatron_hybrid.utils.child_lifetime import EndSignal
with EndSignal() as end:
    end.end_within(0.3)
    while True: pass
"""
    result = run_python(script, timeout=LIMIT_S)
    assert result.returncode == 1 and "line 5" in result.stderr


async def test_a_second_signal_ends_the_requests_that_run():
    aborted = []
    running = fake_service(never)
    running.end_now = lambda: aborted.append(True)
    server = server_of(running)
    seen = []
    for _ in range(3):
        server.handle_exit(signal.SIGINT, None)
        await asyncio.sleep(0)
        seen.append((server.should_exit, bool(aborted), server.force_exit))
    assert seen == [(False, False, False), (True, True, False), (True, True, True)]


async def test_a_server_ends_when_a_rank_has_failed(caplog):
    running = fake_service()
    server = server_of(running)
    await server.on_tick(1)
    await asyncio.sleep(0.01)
    assert not server.should_exit
    running.engine.rank_failure = "rank 1 on host has ended"
    await server.on_tick(2)
    while not server.should_exit:
        await asyncio.sleep(0)
    assert "the server ends: rank 1 on host has ended" in caplog.text
