"""The counters of the last day."""

import asyncio
from collections import defaultdict

import numpy as np
import pytest
from waiting import LIMIT_S

from megatron_hybrid.inference.metrics.meter import BOUNDS, Histogram
from megatron_hybrid.inference.metrics.prometheus import HISTOGRAMS
from megatron_hybrid.serving import history
from megatron_hybrid.serving.history import SPANS, History, percentile

EMPTY = dict.fromkeys(HISTOGRAMS, (Histogram().counts, Histogram().longest))


class CountingEngine:
    """Its every answer is one more; after `last` answers it is closed."""

    def __init__(self, last: int):
        self.last, self.num, self.counts = last, 0, EMPTY

    async def stats(self):
        self.num += 1
        if self.num > self.last:
            raise RuntimeError("this AsyncEngine is closed")
        return counted(self.num)

    async def histograms(self):
        return self.counts


def counted(number: int):
    return defaultdict(lambda: number, lost_tokens_budget=number, unplotted=0)


def columns_at(found: History, now: float, span: int, monkeypatch):
    monkeypatch.setattr(history.time, "time", lambda: now)
    return asyncio.run(found.columns(span))


async def test_samples_are_taken_until_the_engine_is_closed_and_one_when_asked(monkeypatch):
    monkeypatch.setattr(history, "SECONDS", 0)
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(history.time, "time", lambda: float(next(clock)))

    engine = CountingEngine(4)
    found = History(engine)
    await asyncio.wait_for(found.run(), LIMIT_S)  # ends with the engine
    engine.last += 2
    columns = await found.columns(300)
    assert columns["prompt_tokens"] == columns["lost_tokens_budget"] == [1, 2, 3, 4, 6]
    assert columns["time"] == [0, 5, 10, 15, 20]
    assert "unplotted" not in columns


def test_two_days_keep_as_many_points_as_each_plot_has_and_lose_no_growth(monkeypatch):
    engine = CountingEngine(10**9)
    found = History(engine)
    for number in range(2 * 86400 // 5):
        found.add(5.0 * number, counted(number), EMPTY)
    engine.num = number
    for span, step in SPANS.items():
        columns = columns_at(found, 5.0 * number + 1, span, monkeypatch)
        times, counts = columns["time"], columns["generation_tokens"]
        assert times[-1] - times[0] == pytest.approx(span, abs=step)
        assert len(times) == span // step + 1
        assert np.diff(counts[:-1]).tolist() == [step // 5] * (len(counts) - 2)


def test_a_point_of_a_queue_is_its_longest(monkeypatch):
    engine = CountingEngine(10)
    found = History(engine)
    for second, waiting in enumerate([0, 0, 9, 0, 0]):
        stats = counted(0) | {"requests_waiting": waiting}
        found.add(30.0 + second, defaultdict(int, stats), EMPTY)
    engine.num = 0
    assert columns_at(found, 36.0, 3600, monkeypatch)["requests_waiting"] == [0, 9]


def test_percentiles_are_within_the_bounds_around_those_of_numpy():
    times = np.random.default_rng(0).lognormal(-2, 1, 1000)
    measured = Histogram()
    for each in times:
        measured.observe(each)
    for percent in history.PERCENTILES:
        exact = np.percentile(times, percent)
        place = np.searchsorted(BOUNDS, exact)
        found = percentile(measured.counts, measured.longest, percent)
        assert BOUNDS[place - 1] <= found <= min(times.max(), BOUNDS[place])
    assert percentile(*EMPTY["step_time_seconds"], 50) is None
    assert percentile([0] * len(BOUNDS) + [1], [0.0] * len(BOUNDS) + [600.0], 100) == 600.0


def test_percentiles_of_a_point_are_of_its_own_time(monkeypatch):
    engine, measured = CountingEngine(10), Histogram()
    found = History(engine)
    for minute, seconds in enumerate([0.01, 4.0, None]):
        times = (measured.counts[:], measured.longest[:])
        found.add(60.0 * minute, counted(0), {**EMPTY, "inter_token_latency_seconds": times})
        if seconds:
            measured.observe(seconds, 100)
    engine.counts = {**EMPTY, "inter_token_latency_seconds": times}
    columns = columns_at(found, 121.0, 3600, monkeypatch)
    first, *rest = columns["inter_token_latency_seconds_p50"]
    assert first is None and 0.005 < rest[0] <= 0.01 and 2 < rest[1] <= 5
    assert columns["time_to_first_token_seconds_p99"] == [None] * 3
