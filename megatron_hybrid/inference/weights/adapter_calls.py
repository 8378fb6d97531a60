"""AdapterCalls: the adapters of an engine, for requests to choose from."""

from __future__ import annotations

import os

from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.rank_calls import on_all_ranks
from megatron_hybrid.inference.requests.options import LoadedAdapter


class AdapterCalls:
    """Loads and drops adapters of an engine between steps. Make its calls on all ranks, or on the
    leading one (`lead`).

    Args:
        parts, live: of the engine.
    """

    def __init__(self, parts: EngineParts, live: LiveRequests):
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._live, self._scheduler, self._bank = live, parts.scheduler, parts.adapters

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """Those that requests can choose, in the order that they came in. Any thread may ask."""
        return list(self._bank.loaded.values())

    @on_all_ranks
    def load(self, name: str, folder: str | os.PathLike[str]) -> LoadedAdapter:
        """Take up the low-rank adapter of a folder in PEFT's format, for requests whose
        `RequestOptions.adapter` is `name`.

        Raises:
            ValueError: all of `config.max_adapters` are in use, the name is taken, or the folder
                cannot be read, is of another model, or of a rank above `config.max_adapter_rank`;
                nothing has changed.
            RuntimeError: a step of the engine is running, or it is closed.
        """
        self._refuse("adapters.load")
        live = (*self._scheduler.waiting, *self._scheduler.running)
        used = {each.adapter.slot for each in live if each.adapter is not None}
        return self._bank.load(name, folder, used)

    @on_all_ranks
    def unload(self, name: str) -> None:
        """Drop an adapter: no further request can have it, and those that have it are answered by
        it. What is cached of it stays, for when the same values are loaded again.

        Raises:
            ValueError: there is none of this name; nothing has changed.
            RuntimeError: as `load`.
        """
        self._refuse("adapters.unload")
        self._bank.unload(name)

    def close(self) -> None:
        """Let the model compute as it did before."""
        self._bank.close()

    def _refuse(self, name: str) -> None:
        self._guard.refuse_inside_step(name)
        self._guard.refuse_closed(name)
