"""How much host memory the index takes, and how long a long trace takes."""

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np

from benchmarks.replay.geometry import Geometry
from benchmarks.replay.runner import Replay, replay
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.protocol import Request

SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType)
"""Code: not part of a cache's memory."""


@dataclass(frozen=True)
class Footprint:
    """One trace through the project's own cache."""

    requests: int
    prompt_tokens: int
    skipped_percent: float
    wall_seconds: float
    """All of it: making the tokens, the cache's work, the driver."""
    cache_seconds: float
    """In `begin` and `finish` alone."""
    cached_tokens: int
    checkpoints: int
    index_bytes: int
    """Everything that the cache refers to: token arrays, page tables, tree, queues, counters."""

    @property
    def bytes_per_token(self) -> float:
        return self.index_bytes / max(1, self.cached_tokens)


def footprint(requests: Iterable[Request], geometry: Geometry, budget_bytes: float) -> Footprint:
    """Replay a trace (it may be a generator) sequentially and weigh the cache at the end."""
    engine = Ours(geometry.spec(), budget_bytes)
    began = perf_counter()
    result: Replay = replay(requests, engine)
    wall = perf_counter() - began
    stats = engine.cache.stats()
    return Footprint(
        requests=len(result.prompt_tokens),
        prompt_tokens=sum(result.prompt_tokens),
        skipped_percent=round(100 * result.skipped_share, 2),
        wall_seconds=round(wall, 2),
        cache_seconds=round(sum(result.seconds), 2),
        cached_tokens=stats["cached_tokens"],
        checkpoints=stats["checkpoints"],
        index_bytes=deep_size(engine.cache),
    )


def deep_size(root: object) -> int:
    """Bytes of all objects that can be reached from root, each counted once; an array that is a
    view counts as all of the memory that it keeps alive."""
    seen, stack, total = {id(root)}, [root], 0
    while stack:
        item = stack.pop()
        total += sys.getsizeof(item)
        referents = [item.base] if isinstance(item, np.ndarray) else gc.get_referents(item)
        for referent in referents:
            if id(referent) not in seen and not isinstance(referent, SHARED):
                seen.add(id(referent))
                stack.append(referent)
    return total
