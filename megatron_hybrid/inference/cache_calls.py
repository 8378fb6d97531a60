"""CacheCalls: the calls of an engine that suspend it, and that save or clear its cache."""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.rank_calls import on_all_ranks
from megatron_hybrid.inference.weight_calls import WeightCalls
from megatron_hybrid.inference.weights.fingerprint import open_folder
from megatron_hybrid.offload.disk_store import real_path
from megatron_hybrid.offload.offload import disk_tier
from megatron_hybrid.offload.tier import Tier
from megatron_hybrid.utils.interrupts import defer_sigint


@dataclass(frozen=True)
class CacheSaved:
    """Content of a cache folder on this rank after `save_cache`."""

    states: int
    kv_blocks: int
    num_bytes: int


class CacheCalls:
    """Gives back the memory of pool and live slots for a while, and saves or clears what is cached.
    Its methods have the names and effects of the engine's.

    Args:
        parts, live, weights: of the engine.
    """

    def __init__(self, parts: EngineParts, live: LiveRequests, weights: WeightCalls):
        self._parts, self._live, self._weights = parts, live, weights
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._memory, self._epochs = parts.runner.memory, parts.epochs

    @on_all_ranks
    def suspend(self, keep_cache: str = "drop") -> None:
        self._control.note("suspend()", {"keep_cache": keep_cache})
        if keep_cache not in ("drop", "host", "disk"):
            raise ValueError(f"keep_cache is {keep_cache!r}; use 'drop', 'host' or 'disk'")
        self._guard.refuse_inside_step("suspend")
        if self._guard.is_suspended:
            return
        self._weights.require("suspend")
        offload, cache = self._parts.offload, self._parts.cache
        if keep_cache == "disk" and offload.disk is None:
            raise ValueError(
                "keep_cache='disk' needs a folder to write to: set config.cache_dir, or use 'host'"
            )
        with defer_sigint() as let_in:
            if keep_cache == "disk":
                self._epochs.check()
                with self._ranks.raise_on_all("writing the cache"):
                    offload.save_to(offload.disk, let_in)
            self._live.cancel_abandoned()
            if keep_cache == "host":
                offload.fetches.give_up_all()
                self._keep_in_host_memory()
            elif keep_cache == "disk":
                self._epochs.start_over()
                offload.fetches.give_up_all()
                cache.clear()
            else:
                self._epochs.start_over()
                with self._ranks.raise_on_all("dropping the cache"):
                    self._epochs.clear()
            self.release_memory()

    def release_memory(self) -> None:
        self._parts.runner.drop_graphs()
        self._memory.release()
        self._guard.is_suspended = True

    def _keep_in_host_memory(self) -> None:
        """Copy the pages of requests and of the cache, and live slots of requests, on all ranks or
        on none."""
        pages = self._parts.cache.allocator
        slots = [request.slot for request in self._parts.scheduler.running]
        used = np.flatnonzero(pages.ref_counts + pages.cached_counts), np.array(slots, dtype=int)
        try:
            with self._ranks.raise_on_all("keeping the cache in host memory"):
                self._memory.keep(used)
        except BaseException:
            self._memory.keep(None)
            raise

    @defer_sigint()
    @on_all_ranks
    def resume(self) -> None:
        self._weights.require("resume")
        if self._guard.is_suspended:
            self._epochs.check()  # first: old bytes need not come back
            try:
                with self._ranks.raise_on_all("taking the memory of the cache again"):
                    self._memory.reacquire()
                    self._memory.refill()
            except BaseException:
                self._memory.release()
                raise
            self._memory.keep(None)
            self._parts.runner.capture_graphs()
            self._guard.is_suspended = False

    @on_all_ranks
    def save_cache(self, folder: str | PathLike[str] | None = None) -> CacheSaved:
        self._guard.refuse_suspended("save_cache")
        self._weights.require("save_cache")
        offload, mode = self._parts.offload, self._parts.cache.mode
        if folder == "" or (folder is None and offload.disk is None):
            raise ValueError(
                f"save_cache needs a folder, it is {folder!r}; None stands for the "
                f"config.cache_dir of an engine that has one and is not closed"
            )
        if mode != "restore":
            raise ValueError(
                f"save_cache needs prefix_caching='restore', it is {mode!r}: where "
                "every token is computed nothing is fetched"
            )
        with defer_sigint() as let_in:
            self._epochs.check()
            tier = self._save(folder, let_in)
        return CacheSaved(tier.num_states, tier.num_blocks, tier.used_bytes)

    def _save(self, folder: str | PathLike[str] | None, let_in: Callable[[], None]) -> Tier:
        """Write all that is cached, and return the tier of the folder."""
        parts, offload, name = self._parts, self._parts.offload, self._ranks.name
        tier = offload.disk
        if tier is not None and (
            folder is None or real_path(Path(folder) / name) == tier.store.folder
        ):
            offload.save_to(tier, let_in)
            return tier
        store = open_folder(folder, name, parts.model, parts.cache.spec, parts.config)
        try:
            tier = disk_tier(store, offload.spec, parts.config.disk_cache_bytes, shrinks=False)
            offload.save_to(tier, let_in)
        finally:
            store.close()
        return tier

    @defer_sigint()
    @on_all_ranks
    def clear_cache(self) -> None:
        self._guard.refuse_suspended("clear_cache")
        self._weights.require("clear_cache")
        self._live.cancel_abandoned()
        scheduler = self._parts.scheduler
        running = scheduler.num_unanswered
        if running or scheduler.waiting:
            raise RuntimeError(
                f"{running} requests run and {len(scheduler.waiting)} wait: clear the cache "
                "when all are answered, or cancel them"
            )
        scheduler.retire_closing()
        self._epochs.clear()
