"""A patch of megatron-core's saves: writers are threads, and no process passes on their results."""

import multiprocessing.dummy
import os
import pickle
import queue
import tempfile
from types import SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


class SaveResults:
    """A queue of one value, in a file without a name, for the results of a save.

    Core's own queue is in another process of each rank. A launcher's SIGTERM to all processes ends
    that process, and later saves fail; the process lives on when its rank is killed; and it imports
    torch to pass on the results.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def put(self, value: Any) -> None:
        """Put the value into the queue, in this process or a fork of it."""
        data = pickle.dumps(value)
        os.pwrite(self._file.fileno(), data, 8)
        os.pwrite(self._file.fileno(), len(data).to_bytes(8, "little"), 0)  # now it is whole

    def get_nowait(self) -> Any:
        """Take the value from the queue.

        Raises:
            queue.Empty: there is no value.
        """
        size = int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little")
        if not size:
            raise queue.Empty
        data = os.pread(self._file.fileno(), size, 8)
        self._file.truncate(0)
        return pickle.loads(data)


def patch_saves() -> None:
    """Patch core's saves in this process."""
    if hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc"):
        # Writers are threads in newer releases, too. This one forks them while a thread of a queue
        # begins: sometimes a fork waits for ever for a lock that none of its threads holds, and the
        # whole run waits with it.
        filesystem_async.mp = SimpleNamespace(get_context=lambda _: multiprocessing.dummy)
    if vars(filesystem_async).get("_results_queue", "of another release") is None:
        filesystem_async._results_queue = SaveResults()
