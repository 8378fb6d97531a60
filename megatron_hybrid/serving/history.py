"""History: the counters of the last day, for plots over time."""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.metrics.meter import BOUNDS

SECONDS = 5.0
"""Seconds between two samples."""
SPANS = {300: 5, 3600: 30, 86400: 600}
"""Seconds of a plot -> seconds of each of its points. All are kept: 327 points in all."""
PERCENTILES = (50, 90, 99)
_PEAKS = ("requests_running", "requests_waiting")
_KEYS = (
    *("requests", "prompt_tokens", "skipped_tokens", "shared_tokens", "prefill_tokens"),
    "generation_tokens",
    *("checkpoints_evicted", "kv_blocks_evicted", "host_records_evicted", "disk_records_evicted"),
    *("pages", "pages_in_use", "pages_cached", "checkpoints", "cached_tokens"),
    *("host_bytes", "host_states", "disk_bytes", "disk_states"),
)
_TIMES = ("time_to_first_token_seconds", "inter_token_latency_seconds")

Point = dict[str, Any]


class History:
    """Samples of an engine's `stats` and `histograms`, in points of each length of `SPANS`."""

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        # One more than a plot has, as growth is counted from the point before.
        self._points: dict[int, deque[Point]] = {
            span: deque(maxlen=span // step + 1) for span, step in SPANS.items()
        }

    async def run(self) -> None:
        """Take samples until cancelled, or until the engine is closed."""
        while True:
            try:
                stats, times = await self._sample()
            except RuntimeError:
                return
            self.add(time.time(), stats, times)
            await asyncio.sleep(SECONDS)

    def add(self, now: float, stats: Mapping[str, float], times: Mapping[str, Any]) -> None:
        """Add a sample to the points of each span.

        Args:
            now: seconds since 1970.
            stats: those of the engine.
            times: the engine's `histograms`.
        """
        point = _point(now, stats, times)
        for span, step in SPANS.items():
            _add(self._points[span], point, step)

    async def columns(self, span: int) -> dict[str, list[float | None]]:
        """Return a list for each value, the oldest point first and the present one last.

        `time` is the end of a point, in seconds since 1970. Counters hold what the engine has
        counted until then: `lost_tokens_<reason>` counts prompt tokens that were computed again,
        and `requests` those that have begun. `requests_running` and `requests_waiting` are the most
        of all samples in the point; a request that ran between two samples is not seen.
        `<name>_p<percentile>` is in seconds, over the times in the point, or None if it has none.

        Args:
            span: a key of `SPANS`.
        """
        points = list(self._points[span])
        _add(points, _point(time.time(), *await self._sample()), SPANS[span])
        columns: dict[str, list[float | None]] = {
            key: [point[key] for point in points] for key in points[-1] if key not in _TIMES
        }
        for name in _TIMES:
            grown = [
                [new - old for old, new in zip(before[name][0], after[name][0])]
                for before, after in pairwise(points)
            ]
            for percent in PERCENTILES:
                found = [percentile(counts, points[-1][name][1], percent) for counts in grown]
                columns[f"{name}_p{percent}"] = [None, *found]
        return columns

    async def _sample(self) -> tuple[Mapping[str, float], Mapping[str, Sequence[Any]]]:
        return await self._engine.stats(), await self._engine.histograms()


def percentile(counts: Sequence[int], longest: Sequence[float], percent: float) -> float | None:
    """Return the seconds below which so many percent of a histogram are, or None if it is empty.

    Between a bound and the longest time up to the next one, times count as evenly spread.

    Args:
        counts, longest: fields of a `Histogram`.
    """
    wanted, below = sum(counts) * percent / 100, 0
    if not wanted:
        return None
    for count, low, high in zip(counts, (0.0, *BOUNDS), longest):
        if below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below += count
    return longest[-1]


def _point(now: float, stats: Mapping[str, float], times: Mapping[str, Sequence[Any]]) -> Point:
    lost = {key: value for key, value in stats.items() if key.startswith("lost_tokens_")}
    kept = {key: stats[key] for key in (*_PEAKS, *_KEYS)}
    return {"time": now, **kept, **lost, **{name: times[name] for name in _TIMES}}


def _add(points: deque[Point] | list[Point], point: Point, step: int) -> None:
    """Append a point, or replace the last one if it lies in the same step. The first point stays as
    it is, since growth is counted from it."""
    last = points[-1] if len(points) > 1 else None
    if last is None or last["time"] // step != point["time"] // step:
        points.append(point)
    else:
        points[-1] = {**point, **{key: max(last[key], point[key]) for key in _PEAKS}}
