"""The counters of the last hour."""

import asyncio
from collections import defaultdict

from megatron_hybrid.serving import history
from megatron_hybrid.serving.history import History


class CountingEngine:
    """Its every answer is one more; after `last` answers it is closed."""

    def __init__(self, last: int):
        self.last, self.num = last, 0

    async def stats(self):
        self.num += 1
        if self.num > self.last:
            raise RuntimeError("this AsyncEngine is closed")
        return defaultdict(lambda: self.num, lost_tokens_budget=self.num, unplotted=0)


def columns_after(samples: int) -> dict[str, list[float]]:
    async def take():
        engine = CountingEngine(samples)
        found = History(engine)
        await asyncio.wait_for(found.run(), 20)  # ends with the engine
        engine.last += 2
        return await found.columns()

    return asyncio.run(take())


def test_samples_are_taken_until_the_engine_is_closed_and_one_when_asked(monkeypatch):
    monkeypatch.setattr(history, "SECONDS", 0)
    columns = columns_after(4)
    assert columns["prompt_tokens"] == columns["lost_tokens_budget"] == [1, 2, 3, 4, 6]
    assert columns["time"] == sorted(columns["time"])
    assert "unplotted" not in columns


def test_old_samples_are_forgotten(monkeypatch):
    monkeypatch.setattr(history, "SECONDS", 0)
    number = history.MAX_SAMPLES
    columns = columns_after(number + 5)
    assert columns["skipped_tokens"] == [*range(6, number + 6), number + 7]
