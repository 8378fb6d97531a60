"""DiskStore: the bytes of the disk tier's records, in a folder that outlives the process.

    index.sqlite3   fingerprint of the model (`fingerprint.py`), the records, and their pages
    pages.bin       pages, in any order; locked by the engine that uses the folder

Crash safety: pages are on the disk before a transaction adds their records to the index, and
records have left the index before their pages are reused. So a crash, or a power failure, loses
only pending writes. Every record has a checksum; damaged ones are logged and never used. It
includes the fingerprint, so bytes from other weights never match.
"""

import errno
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from megatron_hybrid.offload.disk_index import (
    CacheFolderError,
    DamagedIndexError,
    DiskIndex,
    Placed,
)
from megatron_hybrid.offload.page_file import PageFile
from megatron_hybrid.offload.page_mover import HostPages
from megatron_hybrid.offload.tier import RETRY_SECONDS, Record
from megatron_hybrid.utils.fork_guard import ForkGuard
from megatron_hybrid.utils.interrupts import defer_sigint, poll_until

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 1 << 30
"""The store accepts no further state or prompt while more bytes are waiting to be written."""
MAX_BATCH, MAX_BATCH_BYTES = 256, 64 << 20
"""Most jobs of one transaction, and most bytes before its last record. Flushing each record takes
longer, and larger transactions hold Python's lock for longer."""
SPARE_BYTES = 64 << 10
"""Bytes that are freed for sqlite's next transactions when the disk has no room for them."""
MAX_PROBLEMS = 1000
_THREADS = "cache-disk"
_NO_SPACE = errno.ENOSPC, errno.EDQUOT
_PAGES, _INDEX, _LOG = "pages.bin", "index.sqlite3", "index.sqlite3-wal"
_OLD_HEAD = "cache.json"
"""File of formats up to 3, which had no sqlite."""


def real_path(folder: str | os.PathLike) -> Path:
    """Return the absolute path of a folder, without links; it need not exist.

    Raises:
        CacheFolderError: the name is not possible for a folder.
    """
    try:
        return Path(folder).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # cyclic links, NUL, half a character
        raise CacheFolderError(
            f"{str(folder)!r} cannot be used as a cache folder: {error}. Name another one, in "
            "cache_dir or for save_cache"
        ) from None


class DiskStore:
    """Records' pages in a folder.

    Args:
        folder: created if it does not exist.
        page_bytes: bytes of a page.
        fingerprint: hashes of everything that the records depend on, by name.
        pin_memory: read into pinned memory, for asynchronous copies to a CUDA device.

    Raises:
        CacheFolderError: the folder holds other files, was created for another model or
            configuration, or another engine uses it. Nothing in it has changed.
    """

    def __init__(
        self,
        folder: str | Path,
        page_bytes: int,
        fingerprint: dict[str, str],
        pin_memory: bool = False,
    ):
        self.folder = real_path(folder)  # the working directory may change
        self.page_bytes = page_bytes
        self._pin_memory = pin_memory
        self._head = {**fingerprint, "page_bytes": page_bytes}
        self._placed: dict[bytes, Placed] = {}
        self._dropped: list[int] = []  # numbers of rows that are still in the index
        self._freed: list[int] = []  # their pages
        self._last_number = 0
        self._jobs: deque[tuple[str, Record, HostPages | None]] = deque()
        self._batch: list[tuple[str, Record, HostPages | None]] = []  # the jobs that run now
        self._waiting: dict[bytes, HostPages] = {}
        self.waiting_bytes = 0
        """Bytes of host memory of pending writes."""
        self._mutex = threading.Lock()  # no Condition, see `interrupts.py`
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closing = self._is_writing = False
        self._home = ForkGuard()
        self._error: Exception | None = None  # the last write error since `recover`
        self._retry_at: float | None = None  # None while writing works
        self._unwritten: list[Record] = []
        self._is_full = False  # since the last `was_full`
        self._has_shed = False  # since writing worked
        self.num_unwritten = 0
        """Records that could not be written, since the start."""
        self.problems: deque[str] = deque(maxlen=MAX_PROBLEMS)
        """The last logged problems: damaged, unreadable or unwritable parts."""
        self._head_hash = self._hash_head()
        self._pages, self._index = self._open_folder()
        self._files = {name: os.stat(self.folder / name) for name in (_PAGES, _INDEX, _LOG)}
        self._readers = ThreadPoolExecutor(2, thread_name_prefix=f"{_THREADS}-read")
        self._writer = threading.Thread(target=self._write_jobs, name=_THREADS, daemon=True)

    # ---- opening ----

    def _open_folder(self) -> tuple[PageFile, DiskIndex]:
        """Open the folder. Return the file of the pages, and the index."""
        pages, had_pages = None, (self.folder / _PAGES).exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check_files()
            if not (self.folder / _INDEX).exists():
                (self.folder / _INDEX).touch(0o600)
            pages = PageFile(self.folder / _PAGES, self.page_bytes)
            return pages, self._open_index()
        except BaseException as error:
            if pages is not None:
                pages.close(unlocks=False)
                if not had_pages:  # a folder that is refused stays as it was
                    (self.folder / _PAGES).unlink()
            if isinstance(error, OSError):
                raise CacheFolderError(
                    f"{self.folder} cannot be used as a cache folder: {error}. It must be a folder "
                    f"that can be written, on a disk with free space; else name another one"
                ) from None
            raise

    def _open_index(self) -> DiskIndex:
        try:
            return DiskIndex(self.folder / _INDEX, self._head)
        except DamagedIndexError as error:
            self._warn(_INDEX, f"damaged, so its records are lost ({error})")
        (self.folder / _LOG).unlink(missing_ok=True)
        os.truncate(self.folder / _INDEX, 0)
        return DiskIndex(self.folder / _INDEX, self._head)

    def _check_files(self) -> None:
        """Raise CacheFolderError if the folder holds other files, before anything is written."""
        entries = {entry.name: entry for entry in self.folder.iterdir()}
        if entries and _INDEX not in entries:
            is_older = {_OLD_HEAD, _PAGES} <= entries.keys()
            what = "an older version wrote it" if is_older else "it is no cache folder"
            raise CacheFolderError(
                f"{self.folder} holds {sorted(entries)[0]!r} and no {_INDEX}: {what}; name a new "
                "or an empty one"
            )
        for name in (_PAGES, _INDEX, _LOG):
            entry = entries.get(name)
            # A link may point to any file, which would be overwritten.
            if entry is not None and (entry.is_symlink() or not entry.is_file()):
                what = "a link" if entry.is_symlink() else "no file"
                raise CacheFolderError(
                    f"{entry} is {what}: {self.folder} is no cache folder, or was damaged; remove "
                    f"it, or name another one"
                )

    @defer_sigint()
    def load(self) -> list[tuple[Record, bytes | None]]:
        """Start the writer, and return the records of the folder, parents first, each with its
        parent's key. Call it once, before anything else. It also works on a full disk.

        Raises:
            CacheFolderError: the index cannot be read.
        """
        try:
            found = self._index.read(self.page_bytes)
        except OSError as error:
            raise CacheFolderError(
                f"{self.folder / _INDEX} cannot be read ({error}); remove {self.folder}, or name "
                f"another folder"
            ) from None
        self._last_number = found[-1][0].number if found else 0
        lost = self._pages.lost([placed.slots for placed, _ in found])
        if lost:
            self._warn(_INDEX, f"{len(lost)} records are not used, their pages are lost")
        self._dropped = [found[row][0].number for row in lost]
        found = [each for row, each in enumerate(found) if row not in lost]
        self._placed = {placed.record.key: placed for placed, _ in found}
        try:
            self._cut_pages()
            if self._dropped:
                self._commit()
        except OSError as error:
            self._note_failure(error)
        self._is_writing = True
        try:
            self._writer.start()
        except BaseException:
            self._is_writing = False
            raise
        return [(placed.record, parent) for placed, parent in found]

    def _renew(self, *, may_shed: bool = False) -> None:
        """Write what the index lacks since writing failed: the head, and dropped records. Pages
        without a record become free.

        may_shed: whether to drop the records with the last pages if the index has no room.

        Raises:
            OSError: writing failed, or the folder's files were removed or replaced.
        """
        self._check_ours()
        # Cut first, since the index may need the space after the last record. A crash in between is
        # safe: records whose pages were cut off fail the check of the file's size, or a checksum.
        self._cut_pages()
        try:
            self._commit(head=self._head)
        except OSError as error:
            if not may_shed or self._has_shed or error.errno not in _NO_SPACE:
                raise
            self._has_shed = True  # only once: other processes may take the freed space
            self._shed_for_index()
            self._commit(head=self._head)
        self._has_shed = False

    def _commit(self, added: Sequence[Placed] = (), head: dict | None = None) -> None:
        """Write dropped and added records to the index. Pages of dropped records become free."""
        self._index.write(self._dropped, added, head)
        self._pages.give_back(self._freed)
        self._dropped, self._freed = [], []
        self._placed.update({placed.record.key: placed for placed in added})

    def _cut_pages(self) -> None:
        """Cut the file after the last record's pages, and list the free pages before that. They may
        be reused once no record of the index has them."""
        self._freed = []
        self._pages.cut([placed.slots for placed in self._placed.values()])

    def _shed_for_index(self) -> None:
        """Drop the records in the last bytes of the file, as many bytes as sqlite's log has, which
        it moves into the index, and `SPARE_BYTES` more."""
        num_bytes = os.path.getsize(self.folder / _LOG) + SPARE_BYTES
        limit = self._pages.num_pages - -(-num_bytes // self.page_bytes)
        gone = [placed for placed in self._placed.values() if (placed.slots >= limit).any()]
        for placed in gone:
            self._forget(placed.record)
        with self._mutex:
            self._unwritten += [placed.record for placed in gone]
            self.num_unwritten += len(gone)
        self._cut_pages()

    def _check_ours(self) -> None:
        """Raise OSError if the folder's files are no longer the opened ones."""
        for name, opened in self._files.items():
            is_ours = False
            with suppress(FileNotFoundError):
                is_ours = os.path.samestat(os.stat(self.folder / name), opened)
            if not is_ours:
                raise OSError(
                    f"{self.folder / name} was removed or replaced while an engine used it; its "
                    f"records are lost (close the engine and open a new one)"
                )

    def _warn(self, what: str, why: str) -> None:
        problem = f"{self.folder / what}: {why}"
        self.problems.append(problem)
        logger.warning(problem)

    # ---- as the store of a tier ----

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process, which lacks the threads that read and write, so
        that waiting for them would never end."""
        own = "an engine of its own, with a folder of its own,"
        self._home.require(f"the cache folder {self.folder}", own)

    def accepts(self) -> bool:
        self.check_process()
        has_failed = self._retry_at is not None and time.monotonic() < self._retry_at
        return not has_failed and self.waiting_bytes < MAX_WAITING_BYTES

    def put(self, record: Record, data: HostPages) -> None:
        self.check_process()
        with self._mutex:
            self._waiting[record.key] = data
            self.waiting_bytes += record.num_bytes
            self._jobs.append(("put", record, data))
        self._wake.put(None)

    def drop(self, record: Record) -> None:
        self.check_process()
        self._jobs.append(("drop", record, None))
        self._wake.put(None)

    def take_lost(self) -> list[Record]:
        """Return the records that could not be written since the last call."""
        with self._mutex:
            taken, self._unwritten = self._unwritten, []
        return taken

    def was_full(self) -> bool:
        """Return whether the disk or a quota was full since the last call."""
        with self._mutex:
            was_full, self._is_full = self._is_full, False
        return was_full

    def free_bytes(self) -> int:
        """Return the free bytes for more records, without their rows in the index."""
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize * 7 // 8

    def get(self, record: Record) -> Future[HostPages | None]:
        """Return a future of the record's pages, or of None if they are damaged or dropped. The
        future has an error if they cannot be read now."""
        self.check_process()
        waiting = self._waiting.get(record.key)
        if waiting is not None:
            future: Future[HostPages | None] = Future()
            future.set_result(waiting)
            return future
        return self._readers.submit(self._read_or_warn, record)

    def _read_or_warn(self, record: Record) -> HostPages | None:
        try:
            return self._read(record)
        except Exception as error:
            self._warn(_PAGES, f"reading the record at position {record.position} failed ({error})")
            raise

    def _read(self, record: Record) -> HostPages | None:
        placed = self._placed.get(record.key)
        if placed is None:  # it could not be written
            return None
        shape = len(placed.slots), self.page_bytes
        data = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pin_memory)
        if (page := self._pages.read(placed.slots, data.numpy())) is not None:
            self._warn(f"{_PAGES} page {page}", "not used, the file is too short")
            return None
        if self._checksum(record, data.numpy()) != placed.checksum:
            what = f"{_PAGES} pages {placed.slots.tolist()[:4]}... (position {record.position})"
            self._warn(what, "not used, their checksum is wrong")
            return None
        return HostPages(data)

    def _checksum(self, record: Record, pages: np.ndarray) -> bytes:
        """Hash a record's bytes, the fields of its row, and the fingerprint."""
        parent = record.parent.key if record.parent is not None else b""
        row = record.key, parent, record.position, record.is_state
        digest = blake2b(repr(row).encode(), digest_size=16, key=self._head_hash)
        digest.update(np.ascontiguousarray(pages))
        return digest.digest()

    def _hash_head(self) -> bytes:
        return blake2b(json.dumps(self._head, sort_keys=True).encode(), digest_size=32).digest()

    # ---- writing, in a thread ----

    def _write_jobs(self) -> None:
        try:
            while self._jobs or not self._closing:
                self._wake.get()
                while self._jobs:
                    self._run_batch()
        finally:
            self._is_writing = False

    def _run_batch(self) -> None:
        """Run waiting jobs: first the drops, then the puts of records that were not dropped."""
        puts: dict[bytes, tuple[Record, HostPages]] = {}
        num_bytes = 0
        while self._jobs and len(self._batch) < MAX_BATCH and num_bytes < MAX_BATCH_BYTES:
            operation, record, data = job = self._jobs[0]
            self._batch.append(job)  # before `popleft`: others wait until both are empty
            self._jobs.popleft()
            if operation == "put":
                puts[record.key] = record, data
                num_bytes += record.num_bytes
            elif puts.pop(record.key, None) is None:
                self._forget(record)
        unwritten = self._write(list(puts.values()))
        with self._mutex:
            self._unwritten += unwritten
            self.num_unwritten += len(unwritten)
        for operation, record, data in self._batch:
            if operation == "put":
                with self._mutex:  # once for each record: callers wait for this lock
                    self.waiting_bytes -= record.num_bytes
                    if self._waiting.get(record.key) is data:
                        del self._waiting[record.key]
        self._batch.clear()

    def _write(self, puts: list[tuple[Record, HostPages]]) -> list[Record]:
        """Write drops and records. Return the records that were not written. After a failure
        nothing is written for a while."""
        added: list[Placed] = []
        try:
            if self._retry_at is not None:
                if time.monotonic() < self._retry_at:
                    return [record for record, _ in puts]
                self._renew(may_shed=True)
                self._retry_at = None
            if self._dropped:
                self._commit()  # before their pages are reused
            for put in puts:
                added.append(self._place(*put))
        except Exception as error:  # the thread must continue: others wait for it
            self._note_failure(error)
        try:
            if added:
                self._pages.sync()
                self._commit(added)
        except Exception as error:
            self._note_failure(error)
            added = []
        return [record for record, _ in puts[len(added) :]]

    def _note_failure(self, error: Exception) -> None:
        """Note a write error. Nothing is written until a `_renew` succeeds. Until then no page is
        reused, so the files stay valid."""
        self._error = error
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            with self._mutex:
                self._is_full = True
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._warn("", f"writing failed ({error}); next attempt in {RETRY_SECONDS:.0f} s")

    def _place(self, record: Record, data: HostPages) -> Placed:
        """Write a record's pages, but not its row."""
        pages = data.numpy()
        slots = self._pages.take(len(pages))
        self._pages.write(slots, pages)
        self._last_number += 1
        return Placed(record, self._last_number, slots, self._checksum(record, pages))

    def _forget(self, record: Record) -> None:
        placed = self._placed.pop(record.key, None)
        if placed is not None:
            self._dropped.append(placed.number)
            self._freed += placed.slots[::-1].tolist()

    # ---- ending ----

    def rebind(self, fingerprint: dict[str, str]) -> None:
        """Bind the folder, which holds no records, to another fingerprint.

        Raises:
            OSError: writing failed, or the folder's files were removed or replaced. The files stay
                valid for the old fingerprint, and nothing is written until `recover` succeeds.
        """
        self._wait_for_jobs()
        self._head.update(fingerprint)
        self._head_hash = self._hash_head()
        self._rewrite()

    def shrink(self, max_bytes: int) -> None:
        """Move the pages of pages.bin after max_bytes to free pages before, and cut the file there.
        The records must fit. If the disk is full, the file does not change."""
        self._wait_for_jobs()
        limit = max_bytes // self.page_bytes
        if self._retry_at is not None or self._pages.num_pages <= limit:
            return
        try:
            self._commit()  # dropped records must have left the index before
            places = np.arange(self._pages.num_pages)
            beyond = self._pages.used_from(limit)
            places[beyond] = self._pages.take(len(beyond))
            page = np.empty((1, self.page_bytes), dtype=np.uint8)
            for old, new in zip(beyond, places[beyond]):
                self._pages.read(old[None], page)
                self._pages.write(new[None], page)
            moved = [
                replace(placed, slots=places[placed.slots])
                for placed in self._placed.values()
                if (placed.slots >= limit).any()
            ]
            self._pages.sync()
            self._index.write([placed.number for placed in moved], moved)
            self._placed.update({placed.record.key: placed for placed in moved})
            self._cut_pages()
        except OSError as error:
            self._note_failure(error)

    def recover(self) -> None:
        """Resume writing after a failure.

        Raises:
            OSError: writing failed again, or the folder's files were removed or replaced.
        """
        self._wait_for_jobs()
        if self._error is not None:
            self._rewrite()
        self._check_ours()

    def _rewrite(self) -> None:
        try:
            self._renew()
        except OSError as error:
            self._note_failure(error)
            raise self._write_error(error) from error
        self._error = self._retry_at = None

    def _write_error(self, error: Exception) -> OSError:
        return OSError(f"writing to {self.folder} failed: {error}; fix that, then call it again")

    def _wait_for_jobs(self, let_in: Callable[[], None] = lambda: None) -> None:
        self.check_process()
        self._wake.put(None)  # an interrupt may have come between a job and its wake-up
        poll_until(lambda: not ((self._jobs or self._batch) and self._is_writing), let_in)

    def flush(self, let_in: Callable[[], None] = lambda: None) -> None:
        """Wait until all records are on the disk, safe from a power failure. let_in: as for
        `poll_until`.

        Raises:
            OSError: writing failed since the last `recover`, or the folder's files were removed or
                replaced.
        """
        self._wait_for_jobs(let_in)
        if self._error is not None:
            raise self._write_error(self._error) from self._error
        self._check_ours()

    @defer_sigint()
    def close(self) -> None:
        """Finish pending writes, cancel pending reads and unlock the folder. In a forked process
        the folder stays locked by the parent. After an interrupt, call it again."""
        is_ours = self._home.is_here
        if is_ours:
            self._closing = True
            self._wake.put(None)
            self._wait_for_writer()
            self._readers.shutdown(cancel_futures=True)
            self._index.close()
        self._pages.close(unlocks=is_ours)

    def _wait_for_writer(self) -> None:
        # Not by `join`: after an interrupt in it, a running thread may count as ended.
        poll_until(lambda: not self._is_writing)

    def close_from_anywhere(self) -> None:
        """Call `close` for the garbage collector, which may run in a thread of this store. There,
        waiting for that thread would never end."""
        if threading.current_thread().name.startswith(_THREADS):
            threading.Thread(target=self.close, name="cache-close").start()
        else:
            self.close()
