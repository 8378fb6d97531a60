"""The history of a day of a server, simulated: what a picture or a test of the page's charts shows
takes no day."""

import math
import random
from typing import Any

from megatron_hybrid.inference.metrics.meter import Histogram
from megatron_hybrid.inference.metrics.prometheus import COUNTERS, GAUGES
from megatron_hybrid.serving.history import SECONDS, History

DAY = 86400
FIRST, BETWEEN = TIMES = ("time_to_first_token_seconds", "inter_token_latency_seconds")
LOST = ("lost_tokens_state_evicted", "lost_tokens_kv_evicted", "lost_tokens_budget")


class SimulatedEngine:
    """It says what there was at the end of the day."""

    def __init__(self):
        self.counts: dict[str, int] = dict.fromkeys([*COUNTERS, *GAUGES, *LOST], 0)
        self.times = {name: Histogram() for name in TIMES}

    async def stats(self) -> dict[str, int]:
        return dict(self.counts)

    async def histograms(self) -> dict[str, tuple[list[int], list[float]]]:
        return self.measured()

    def measured(self) -> dict[str, tuple[list[int], list[float]]]:
        return {name: (list(each.counts), list(each.longest)) for name, each in self.times.items()}


def load_at(second: float) -> float:
    """Requests per second: few at night, two peaks by day."""
    hour = second % DAY / 3600
    return 0.25 + 1.1 * sum(math.exp(-(((hour - peak) / 2.4) ** 2)) for peak in (10.5, 15.5))


def simulated_day(until: float) -> History:
    """The history of the day before `until`, in seconds since 1970."""
    draw, engine, waiting = random.Random(0), SimulatedEngine(), 0.0
    history: Any = History(engine)  # type: ignore[arg-type]
    counts = engine.counts
    for number in range(int(DAY / SECONDS)):
        now = until - DAY + SECONDS * number
        waiting += max(0.0, draw.gauss(1, 0.3)) * load_at(now) * SECONDS
        served = min(waiting, 7.5)  # what the model can serve in that time
        waiting -= served
        prompt, share = served * 1800, 0.72 + 0.1 * math.sin(now / 9000)
        grown = {
            "requests": served,
            "prompt_tokens": prompt,
            "skipped_tokens": prompt * share,
            "prefill_tokens": prompt * (1 - share),
            "generation_tokens": served * 160,
            "checkpoints_evicted": served * 0.4,
            "kv_blocks_evicted": served * 2,
            "host_records_evicted": served * 0.7,
            **dict(zip(LOST, (prompt * 0.03, prompt * 0.02, prompt * 0.008))),
        }
        for name, value in grown.items():
            counts[name] += round(value)
        running = round(6 * served)
        counts["requests_running"], counts["requests_waiting"] = running, round(waiting)
        counts |= {"pages": 4096, "pages_in_use": 75 * running, "pages_cached": 4000 - 75 * running}
        counts |= {"checkpoints": 212, "host_states": 1140, "disk_states": 8210}
        counts |= {"host_bytes": 14 << 30, "disk_bytes": 96 << 30}
        for _ in range(round(served)):
            first = (0.06 + waiting / 3) * draw.lognormvariate(0, 0.5)
            engine.times[FIRST].observe(first)
            between = 0.012 * (1 + served / 5) * draw.lognormvariate(0, 0.3)
            engine.times[BETWEEN].observe(between, 160)
        history.add(now, dict(counts), engine.measured())
    return history
