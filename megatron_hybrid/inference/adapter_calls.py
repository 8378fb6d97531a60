"""AdapterCalls: an engine's calls that load adapters, and drop them."""

from __future__ import annotations

import os

from megatron_hybrid.inference.adapters import LoadedAdapter
from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.rank_calls import on_all_ranks


class AdapterCalls:
    """Changes the adapters of an engine between steps. Its methods have the names and effects of
    the engine's.

    Args:
        parts, live: of the engine.
    """

    def __init__(self, parts: EngineParts, live: LiveRequests):
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._live, self._scheduler, self._bank = live, parts.scheduler, parts.adapters

    @on_all_ranks
    def load_adapter(self, name: str, folder: str | os.PathLike) -> LoadedAdapter:
        self._guard.refuse_inside_step("load_adapter")
        self._guard.refuse_closed("load_adapter")
        return self._bank.load(name, folder)

    @on_all_ranks
    def unload_adapter(self, name: str) -> None:
        self._guard.refuse_inside_step("unload_adapter")
        self._guard.refuse_closed("unload_adapter")
        adapter = self._bank.require(name)
        live = [*self._scheduler.waiting, *self._scheduler.running]
        if (count := sum(each.adapter == adapter for each in live)) > 0:
            raise ValueError(
                f"{count} requests have the adapter {name!r}: cancel them, or wait for them"
            )
        self._bank.unload(name)
