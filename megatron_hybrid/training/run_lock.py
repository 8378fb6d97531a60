"""RunLock: one run at a time in a folder."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

logger = logging.getLogger(__name__)

LOCK = "run.lock"
_CANNOT_BE_WRITTEN = "the folder {} of the run cannot be written{}. Name another one."
_held: set[int] = set()


class RunLock:
    """The lock of a run's folder, which ends with the process, however that ends. Two runs in one
    folder would remove each other's unfinished saves.

    Args:
        folder: that of the run, which is made if it is missing.

    Raises:
        OSError: another run has the folder, perhaps in this process; or it cannot be written.
    """

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self._descriptor, self._pid = self._acquire(), os.getpid()
        _held.add(self._descriptor)
        holder = {"pid": self._pid, "host": socket.gethostname(), "began": time.time()}
        self.text = json.dumps(holder)
        """The content of the file."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self.text.encode(), 0)

    def _acquire(self) -> int:
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise OSError(_CANNOT_BE_WRITTEN.format(self.path.parent, f" ({error})")) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    logger.warning(
                        "%s cannot be locked (%s): start no second run in its folder, each would "
                        "remove saves of the other",
                        *(self.path, error),
                    )
                    return descriptor
                holder = _describe(os.pread(descriptor, 4096, 0))
                os.close(descriptor)
                raise OSError(
                    f"the folder {self.path.parent} belongs to a run that is under way, {holder}. "
                    "Wait for it or stop it to go on there, or name another folder."
                ) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                    return descriptor
            os.close(descriptor)  # its run has removed the file meanwhile

    def release(self) -> None:
        """Unlock the folder for another run. In a fork this does nothing."""
        if self._descriptor in _held and os.getpid() == self._pid:
            _held.discard(self._descriptor)
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)


def check_shared(folder: Path, text: str) -> None:
    """Raise OSError unless this rank can write to the folder that another one has locked.

    text: that of the lock.
    """
    try:
        is_same = (folder / LOCK).read_text() == text
    except OSError:
        is_same = False
    if not is_same:
        raise OSError(
            f"the folder {folder} of the run is another one than that of the first rank: all ranks "
            "write to it. Name one on a disk that all machines share."
        )
    if not os.access(folder, os.W_OK):
        raise OSError(_CANNOT_BE_WRITTEN.format(folder, ""))


def _describe(text: bytes) -> str:
    try:
        found = json.loads(text)
        age = timedelta(seconds=max(0, round(time.time() - found["began"])))
        return f"by process {found['pid']} on {found['host']}, for {age} (hours:minutes:seconds)"
    except (ValueError, KeyError, TypeError):  # the holder has not written it yet
        return "by another process"


def _let_go() -> None:
    """Close the locks in a fork, which would otherwise keep that of a killed run."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
