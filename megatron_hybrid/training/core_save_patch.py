"""A patch of megatron-core's saves: writers are threads, and no process passes on their results."""

from __future__ import annotations

import multiprocessing.dummy
import pickle
import queue
import secrets
import tempfile
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_hybrid.utils.files import replace_file


class SaveResults:
    """A queue of one value, in a file, for the results of a save.

    Core's own queue is in another process of each rank. A launcher's SIGTERM to all processes ends
    that one, and the saves after it fail; it lives on where its rank is killed; and it imports
    torch to pass on what it is given.
    """

    def __init__(self) -> None:
        name = f"megatron_hybrid_save_{secrets.token_hex(16)}"
        self._path = Path(tempfile.gettempdir()) / name

    def put(self, value: Any) -> None:
        """Give the value, in any process."""
        replace_file(self._path, lambda path: path.write_bytes(pickle.dumps(value)))

    def get_nowait(self) -> Any:
        """Take the value.

        Raises:
            queue.Empty: there is none.
        """
        try:
            value = self._path.read_bytes()
        except FileNotFoundError:
            raise queue.Empty from None
        self._path.unlink()
        return pickle.loads(value)


class _Threads:
    """Stands in for `multiprocessing` of core's writers, which are threads in newer releases,
    too. It forks them where a thread of a queue has just begun: now and then one of them waits for
    ever for a lock that no thread of it holds, and with it the whole run."""

    @staticmethod
    def get_context(_: str) -> Any:
        return multiprocessing.dummy


def patch_saves() -> None:
    """Let core save so in this process."""
    if hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc"):
        filesystem_async.mp = _Threads
    if vars(filesystem_async).get("_results_queue", "of another release") is None:
        filesystem_async._results_queue = SaveResults()
