"""PageFile: numbered pages in one file that one process has locked."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from megatron_hybrid.offload.disk_index import CacheFolderError


class PageFile:
    """Reads and writes pages, and hands out the free ones.

    Args:
        path: created if it does not exist.
        page_bytes: bytes of a page.

    Raises:
        CacheFolderError: another process, or another object of this one, has locked it.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, page_bytes: int):
        self._page_bytes = page_bytes
        self._free: list[int] = []
        self.num_pages = 0
        """Number of pages up to the last one in use."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # In addition to sqlite's lock, which ends when this process closes the file anywhere.
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder_of(self._file)
            os.close(self._file)
            if not isinstance(error, BlockingIOError):
                raise
            raise CacheFolderError(
                f"{path.parent} is in use by another engine{holder}, or by one that was "
                f"not closed (`engine.close()`); give each its own folder"
            ) from None

    def close(self, *, unlocks: bool = True) -> None:
        """Close the file, unless that is done; after an interrupt, call it again. unlocks: whether
        to unlock it even if a forked process has it open."""
        if self._file < 0:
            return
        if unlocks:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        file, self._file = self._file, -1
        os.close(file)

    def take(self, count: int) -> np.ndarray:
        """Return the numbers of free pages, ascending, and use them. Free pages before the end of
        the file come first."""
        more = max(0, count - len(self._free))
        new = range(self.num_pages, self.num_pages + more)
        self.num_pages += more
        reused = [self._free.pop() for _ in range(count - more)]
        return np.array(sorted([*reused, *new]), dtype=np.int64)

    def give_back(self, pages: Sequence[int]) -> None:
        self._free += pages

    def used_from(self, first: int) -> np.ndarray:
        """Return the numbers of the pages in use from `first` on."""
        return np.setdiff1d(np.arange(first, self.num_pages), self._free)

    def cut(self, used: Sequence[np.ndarray]) -> None:
        """Cut the file after the last page in use. All other pages before it become free."""
        numbers = np.concatenate([*used, np.empty(0, dtype=np.int64)])
        self.num_pages = int(numbers.max(initial=-1)) + 1
        is_free = np.ones(self.num_pages, dtype=bool)
        is_free[numbers] = False
        self._free = np.flatnonzero(is_free)[::-1].tolist()
        os.ftruncate(self._file, self.num_pages * self._page_bytes)

    def lost(self, records: Sequence[np.ndarray]) -> set[int]:
        """Return the indices of records, given by their pages, that have a page which is not in the
        file, or belongs to a later record."""
        rows = np.repeat(np.arange(len(records)), [len(each) for each in records])
        pages = np.concatenate([*records, np.empty(0, dtype=np.int64)])
        owners = np.full(os.fstat(self._file).st_size // self._page_bytes, -1)
        is_there = (pages >= 0) & (pages < len(owners))
        owners[pages[is_there]] = rows[is_there]
        is_there[is_there] = owners[pages[is_there]] == rows[is_there]
        return set(rows[~is_there].tolist())

    def write(self, numbers: np.ndarray, pages: np.ndarray) -> None:
        """Write pages, uint8 [n, page_bytes]."""
        for row, number, count in _runs_of(numbers):
            part = memoryview(pages[row : row + count]).cast("B")
            offset = number * self._page_bytes
            while part:
                written = os.pwrite(self._file, part, offset)
                part, offset = part[written:], offset + written

    def read(self, numbers: np.ndarray, pages: np.ndarray) -> int | None:
        """Read pages into `pages`, uint8 [n, page_bytes]. Return the first page of a run that is
        not whole in the file, or None if all were read."""
        target = memoryview(pages).cast("B") if pages.size else memoryview(b"")
        for row, number, count in _runs_of(numbers):
            part = target[row * self._page_bytes : (row + count) * self._page_bytes]
            offset = number * self._page_bytes
            while part:  # one call reads at most 2 GiB
                read = os.preadv(self._file, [part], offset)
                if not read:
                    return number
                part, offset = part[read:], offset + read
        return None

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        os.fdatasync(self._file)


def _holder_of(descriptor: int) -> str:
    """Return ", process ..." for the process that has locked a file, or "" if it is unknown."""
    file = os.fstat(descriptor)
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with suppress(OSError):  # Linux has it
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, process, where, *_ = line.split()
            if (kind, where) == ("FLOCK", name):
                return f", process {process}"
    return ""


def _runs_of(numbers: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first number, count) of each run of consecutive numbers."""
    if not len(numbers):
        return
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    for start, end in zip(starts, [*starts[1:], len(numbers)]):
        yield int(start), int(numbers[start]), int(end - start)
