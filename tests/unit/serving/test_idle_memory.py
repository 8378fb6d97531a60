"""Freed memory goes back to the system."""

import asyncio
from types import SimpleNamespace

from megatron_hybrid.serving import idle_memory


async def test_freed_memory_goes_back_once_when_nothing_runs(monkeypatch):
    calls = []
    monkeypatch.setattr(idle_memory, "_trim", calls.append)
    monkeypatch.setattr(idle_memory, "_REST_SECONDS", 0.001)
    admission = SimpleNamespace(load=1, num_admitted=1)

    task = asyncio.create_task(idle_memory.trim_when_idle(admission))
    await asyncio.sleep(0.05)
    assert not calls
    admission.load = 0
    while not calls:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    task.cancel()
    assert calls == [0]
