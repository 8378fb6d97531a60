"""AdapterCalls: the adapters of an engine, for requests to choose from."""

import os
from concurrent.futures import Future

from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.rank_calls import on_all_ranks
from megatron_hybrid.inference.requests.options import LoadedAdapter
from megatron_hybrid.inference.worker.adapter_bank import ReadAdapter
from megatron_hybrid.utils.daemon_threads import DaemonThreads


class AdapterCalls:
    """Loads and drops adapters of an engine between steps. Make its calls on all ranks, or on the
    leading one (`lead`).

    Args:
        parts, live: of the engine.
    """

    def __init__(self, parts: EngineParts, live: LiveRequests):
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._live, self._scheduler, self._bank = live, parts.scheduler, parts.adapters
        self._thread = DaemonThreads("adapters", 1)
        self._reading: Future[ReadAdapter] | None = None

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """Adapters that requests can choose, in the order of their loading. Any thread may ask."""
        return list(self._bank.loaded.values())

    def load(self, name: str, folder: str | os.PathLike[str]) -> LoadedAdapter:
        """Load a low-rank adapter from a folder in PEFT's format, for requests whose
        `RequestOptions.adapter` is `name`.

        Raises:
            ValueError: all of `config.max_adapters` are in use, the name is taken, or the folder
                cannot be read, is of another model, or of a rank above `config.max_adapter_rank`;
                nothing has changed.
            RuntimeError: a step of the engine is running, or it is closed.
        """
        self.begin_load(name, folder)
        return self.end_load(name)

    # The two parts of `load`: a caller with steps to run can run them in between.

    @on_all_ranks
    def begin_load(self, name: str, folder: str | os.PathLike[str]) -> Future[ReadAdapter]:
        """Begin to read an adapter in another thread; it replaces one that is not loaded yet."""
        self._refuse("adapters.load")
        read = self._bank.reader(name, folder, self._used_slots())
        self._reading = self._thread.submit(read)
        return self._reading

    @on_all_ranks
    def end_load(self, name: str) -> LoadedAdapter:
        """Wait until the adapter is read on all ranks, and load it."""
        self._refuse("adapters.load")
        reading, self._reading = self._reading, None
        return self._bank.put(name, reading.result(), self._used_slots())

    @on_all_ranks
    def unload(self, name: str) -> None:
        """Drop an adapter: new requests cannot choose it, and requests that have it are answered
        with it. Its cached prefixes stay, for when the same values are loaded again.

        Raises:
            ValueError: there is none of this name; nothing has changed.
            RuntimeError: as `load`.
        """
        self._refuse("adapters.unload")
        self._bank.unload(name)

    def close(self) -> None:
        """Let the model compute as it did before."""
        self._bank.close()

    def _used_slots(self) -> set[int]:
        live = (*self._scheduler.waiting, *self._scheduler.running)
        return {each.adapter.slot for each in live if each.adapter is not None}

    def _refuse(self, name: str) -> None:
        self._guard.refuse_inside_step(name)
        self._guard.refuse_closed(name)
