"""History: the counters of the last hour, for plots over time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping

from megatron_hybrid.inference.async_engine import AsyncEngine

SECONDS = 5.0
"""Between two samples."""
MAX_SAMPLES = 720
_KEYS = (
    *("requests_running", "requests_waiting", "prompt_tokens", "skipped_tokens", "shared_tokens"),
    *("checkpoints_evicted", "kv_blocks_evicted", "host_records_evicted", "disk_records_evicted"),
    *("pages", "pages_in_use", "pages_cached", "checkpoints", "cached_tokens"),
    *("host_bytes", "host_states", "disk_bytes", "disk_states"),
)


class History:
    """Samples of an engine's `stats`.

    Args:
        engine: to ask.
    """

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self._samples: deque[dict[str, float]] = deque(maxlen=MAX_SAMPLES)

    async def run(self) -> None:
        """Take samples until cancelled, or until the engine is closed."""
        while True:
            try:
                self._samples.append(await self._sample())
            except RuntimeError:
                return
            await asyncio.sleep(SECONDS)

    async def columns(self) -> dict[str, list[float]]:
        """A list for each counter, the oldest sample first, the last one of now. `time` is in
        seconds since 1970; `lost_tokens_<reason>` are prompt tokens that were computed again."""
        samples = [*self._samples, await self._sample()]
        return {key: [sample[key] for sample in samples] for key in samples[-1]}

    async def _sample(self) -> dict[str, float]:
        stats: Mapping[str, float] = await self._engine.stats()
        lost = {key: value for key, value in stats.items() if key.startswith("lost_tokens_")}
        return {"time": time.time(), **{key: stats[key] for key in _KEYS}, **lost}
