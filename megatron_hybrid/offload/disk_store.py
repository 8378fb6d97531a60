"""DiskStore: the bytes of the disk tier's records, in a folder that outlives the process.

    cache.json   fingerprint of the model (`fingerprint.py`), and the size of a page
    pages.bin    pages, in any order
    index.log    one line per written or dropped record (`disk_log.py`)
    lock         locked by the engine that uses the folder

Crash safety: a record's pages are written before its line, and the record is valid once the line is
complete; the line of a drop is written before the pages are reused. So a crash loses only pending
writes. Every line and every record has a checksum; damaged ones are logged and never used. A
record's checksum includes the fingerprint, so bytes from other weights never match.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from megatron_hybrid.interrupts import interrupts_wait, poll_until
from megatron_hybrid.offload.disk_log import DiskLog, Placed, runs_of, size_of_log, write_whole
from megatron_hybrid.offload.page_mover import HostPages
from megatron_hybrid.offload.tier import RETRY_SECONDS, Record
from megatron_hybrid.processes import HomeProcess

logger = logging.getLogger(__name__)

FORMAT = 3
"""Version of the folder and of a page's content; increased when either changes."""
MAX_WAITING_BYTES = 1 << 30
"""The store accepts no further state or prompt while more bytes are waiting to be written."""
MAX_PROBLEMS = 1000
_THREADS = "cache-disk"
_NO_SPACE = errno.ENOSPC, errno.EDQUOT
_HEAD, _PAGES, _LOG, _LOCK = "cache.json", "pages.bin", "index.log", "lock"


class CacheFolderError(ValueError):
    """A cache folder cannot be used; the message names the file and the reason."""


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
        self._head = {"format": FORMAT, **fingerprint, "page_bytes": page_bytes}
        self._placed: dict[bytes, Placed] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self._jobs: deque[tuple[str, Record, HostPages | None]] = deque()
        self._waiting: dict[bytes, HostPages] = {}
        self.waiting_bytes = 0
        """Bytes of host memory of pending writes."""
        self._mutex = threading.Lock()  # no Condition, see `interrupts.py`
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._closing = self._closed = self._is_writing = False
        self._home = HomeProcess()
        self._error: Exception | None = None  # the last write error since `recover`
        self._retry_at: float | None = None  # None: writing works
        self._unwritten: list[Record] = []
        self._is_full = False  # since the last `was_full`
        self._has_shed = False  # since writing worked
        self.num_unwritten = 0
        """Records that could not be written, since the start."""
        self.problems: deque[str] = deque(maxlen=MAX_PROBLEMS)
        """The last logged problems: damaged, unreadable or unwritable parts."""
        self._head_hash = self._hash_head()
        self._lock, self._pages = self._open_folder()
        self._log = DiskLog(self.folder / _LOG, page_bytes, self._warn)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix=f"{_THREADS}-read")
        self._writer = threading.Thread(target=self._write_jobs, name=_THREADS, daemon=True)

    # ---- opening ----

    def _open_folder(self) -> tuple[int, int]:
        """Open the folder. Return the descriptors of the lock and of the pages."""
        lock = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._check_files()
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            self._take_lock(lock)
            self._check_head()
            return lock, os.open(self.folder / _PAGES, os.O_RDWR | os.O_CREAT, 0o600)
        except BaseException as error:
            if lock is not None:
                os.close(lock)
            if isinstance(error, OSError):
                raise CacheFolderError(
                    f"{self.folder} cannot be used as a cache folder: {error}. It must be a folder "
                    f"that can be written, on a disk with free space; else name another one"
                ) from None
            raise

    def _take_lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CacheFolderError(
                f"{self.folder} is in use by another engine, or by one that was not closed "
                f"(`engine.close()`); give each its own folder"
            ) from None

    def _check_files(self) -> None:
        """Raise CacheFolderError if the folder holds other files, before anything is written."""
        entries = {entry.name: entry for entry in self.folder.iterdir()}
        others = entries.keys() - {_LOCK, f"{_HEAD}.new"}
        if others and _HEAD not in entries:
            raise CacheFolderError(
                f"{self.folder} holds {sorted(others)[0]!r} and no {_HEAD}: it is no cache "
                f"folder; name a new or an empty one"
            )
        for name in (_HEAD, f"{_HEAD}.new", _PAGES, _LOG, f"{_LOG}.new", _LOCK):
            entry = entries.get(name)
            # A link may point to any file, which would be overwritten.
            if entry is not None and (entry.is_symlink() or not entry.is_file()):
                what = "a link" if entry.is_symlink() else "no file"
                raise CacheFolderError(
                    f"{entry} is {what}: {self.folder} is no cache folder, or was damaged; remove "
                    f"it, or name another one"
                )

    def _check_head(self) -> None:
        path = self.folder / _HEAD
        if not path.exists():
            self._write_head()
            return
        try:
            found = json.loads(path.read_bytes())
        except ValueError as error:
            raise CacheFolderError(f"{path} is damaged ({error}); remove {self.folder}") from None
        if not isinstance(found, dict):
            raise CacheFolderError(f"{path} is damaged (no JSON object); remove {self.folder}")
        for name, expected in self._head.items():
            if name not in found:
                raise CacheFolderError(f"{path} is damaged (no {name!r}); remove {self.folder}")
            if found[name] != expected:
                raise CacheFolderError(
                    f"{path} was written for another {name.replace('_', ' ')}: {found[name]!r} "
                    f"there, {expected!r} here; use another folder"
                )

    @interrupts_wait()
    def load(self) -> list[tuple[Record, bytes | None]]:
        """Return the records of the folder, parents first, each with its parent's key, and start
        the writer. Call it once, before anything else. It also works on a full disk.

        Raises:
            CacheFolderError: the log cannot be read.
        """
        try:
            entries = self._log.read()
        except OSError as error:
            raise CacheFolderError(
                f"{self.folder / _LOG} cannot be read ({error}); remove {self.folder}, or name "
                f"another folder"
            ) from None
        size = os.fstat(self._pages).st_size // self.page_bytes
        found, taken = [], np.zeros(size, dtype=bool)
        for line, placed in reversed(entries):  # the later of two records on one page is valid
            slots = placed.slots
            if (slots >= size).any() or taken[slots].any():
                self._warn(line, "not used, its pages are not there")
                continue
            taken[slots] = True
            found.append(placed)
        self._placed = {placed.record.key: placed for placed in reversed(found)}
        try:
            self._compact()
        except OSError as error:
            self._note_failure(error)
        self._is_writing = True
        try:
            self._writer.start()
        except BaseException:
            self._is_writing = False
            raise
        return [(placed.record, placed.parent) for placed in self._placed.values()]

    def _compact(self, *, may_shed: bool = False) -> None:
        """Rewrite the head, and the log without dropped records; the old files are kept until the
        new ones are complete. Pages without a record become free.

        may_shed: if there is no room for the log, shed the records with the last pages.

        Raises:
            OSError: writing failed, or the folder's files were removed or replaced.
        """
        self._check_ours((_LOCK, self._lock), (_PAGES, self._pages))
        # Cut first, since the new log may need the space behind the last record. A crash in between
        # is safe: old log lines of pages that were cut off fail the check of the file's size, or a
        # checksum.
        self._cut_pages()
        try:
            self._log.compact(self._placed.values())
        except OSError as error:
            if not may_shed or self._has_shed or error.errno not in _NO_SPACE:
                raise
            self._has_shed = True  # only once: other processes may take the freed space
            self._shed_for_log()
            self._log.compact(self._placed.values())
        self._has_shed = False
        self._write_head()

    def _cut_pages(self) -> None:
        """Cut the file behind the last record's pages, and list the free pages before that, which
        may be reused once no log line has them."""
        used = [placed.slots for placed in self._placed.values()]
        used = np.concatenate([*used, np.empty(0, dtype=np.int64)])
        self._num_slots = int(used.max(initial=-1)) + 1
        is_free = np.ones(self._num_slots, dtype=bool)
        is_free[used] = False
        self._free = np.flatnonzero(is_free)[::-1].tolist()
        os.ftruncate(self._pages, self._num_slots * self.page_bytes)

    def _shed_for_log(self) -> None:
        """Shed the records in the last bytes of the file, twice as many bytes as the log needs."""
        num_bytes = 2 * size_of_log(self._placed.values())
        limit = self._num_slots - -(-num_bytes // self.page_bytes)
        gone = [placed for placed in self._placed.values() if (placed.slots >= limit).any()]
        for placed in gone:
            del self._placed[placed.record.key]
        with self._mutex:
            self._unwritten += [placed.record for placed in gone]
            self.num_unwritten += len(gone)
        self._cut_pages()

    def _write_head(self) -> None:
        write_whole(self.folder / _HEAD, json.dumps(self._head, indent=1).encode())

    def _check_ours(self, *opened: tuple[str, int]) -> None:
        """Raise OSError if the folder's files are no longer the opened ones."""
        for name, descriptor in opened:
            try:
                is_ours = os.path.samestat(os.stat(self.folder / name), os.fstat(descriptor))
            except FileNotFoundError:
                is_ours = False
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
        """Raise RuntimeError in a forked process: it lacks the threads that read and write, so
        waiting for them would never end."""
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

    def put_lost(self, record: Record) -> None:
        with self._mutex:
            self._unwritten.append(record)

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
        """Return the free bytes for more records, without their lines in the log."""
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize * 7 // 8

    def get(self, record: Record) -> Future[HostPages | None]:
        """Return a future of the record's pages, or of None if they are damaged or dropped. The
        future raises if they cannot be read now."""
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
        target = memoryview(data.numpy()).cast("B") if data.numel() else memoryview(b"")
        for row, slot, count in runs_of(placed.slots):
            part = target[row * self.page_bytes : (row + count) * self.page_bytes]
            offset = slot * self.page_bytes
            while part:  # one call reads at most 2 GiB
                read = os.preadv(self._pages, [part], offset)
                if not read:
                    self._warn(f"{_PAGES} page {slot}", "not used, the file is too short")
                    return None
                part, offset = part[read:], offset + read
        if self._checksum(record, data.numpy()) != placed.checksum:
            what = f"{_PAGES} pages {placed.slots.tolist()[:4]}... (position {record.position})"
            self._warn(what, "not used, their checksum is wrong")
            return None
        return HostPages(data)

    def _checksum(self, record: Record, pages: np.ndarray) -> str:
        """Return a hash of a record's bytes, its key and the fingerprint."""
        digest = blake2b(record.key, digest_size=16, key=self._head_hash)
        digest.update(np.ascontiguousarray(pages))
        return digest.hexdigest()

    def _hash_head(self) -> bytes:
        return blake2b(json.dumps(self._head, sort_keys=True).encode(), digest_size=32).digest()

    # ---- writing, in a thread ----

    def _write_jobs(self) -> None:
        try:
            while self._jobs or not self._closing:
                self._wake.get()
                while self._jobs:
                    self._write_job(*self._jobs[0])
                    self._jobs.popleft()
        finally:
            self._is_writing = False

    def _write_job(self, operation: str, record: Record, data: HostPages | None) -> None:
        try:
            is_done = self._run_job(operation, record, data)
        except Exception as error:  # the thread must continue: others wait for it
            self._note_failure(error)
            is_done = False
        if operation == "put":
            with self._mutex:
                if not is_done:
                    self._unwritten.append(record)
                    self.num_unwritten += 1
                self.waiting_bytes -= record.num_bytes
                if self._waiting.get(record.key) is data:
                    del self._waiting[record.key]

    def _run_job(self, operation: str, record: Record, data: HostPages | None) -> bool:
        """Run a job. Return whether it was done: after a failure nothing is written for a while."""
        if operation == "drop":
            self._forget(record)
        elif self._retry_at is not None and time.monotonic() < self._retry_at:
            return False
        else:
            if self._retry_at is not None:
                self._compact(may_shed=True)
                self._retry_at = None
            self._write(record, data)
        if self._retry_at is None and self._log.is_stale(len(self._placed)):
            self._compact()
        return True

    def _note_failure(self, error: Exception) -> None:
        """Note a write error: nothing is written until a `_compact` succeeds. Until then no page is
        reused, so the files stay valid."""
        self._error = error
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            with self._mutex:
                self._is_full = True
        self._retry_at = time.monotonic() + RETRY_SECONDS
        self._warn("", f"writing failed ({error}); next attempt in {RETRY_SECONDS:.0f} s")

    def _write(self, record: Record, data: HostPages) -> None:
        pages = data.numpy()
        slots = self._take(len(pages))
        self._write_pages(slots, pages)
        parent = record.parent.key if record.parent is not None else None
        placed = Placed(record, parent, slots, self._checksum(record, pages))
        self._log.put(placed)
        self._placed[record.key] = placed

    def _write_pages(self, slots: np.ndarray, pages: np.ndarray) -> None:
        for row, slot, count in runs_of(slots):
            part = memoryview(pages[row : row + count]).cast("B")
            offset = slot * self.page_bytes
            while part:
                written = os.pwrite(self._pages, part, offset)
                part, offset = part[written:], offset + written

    def _take(self, count: int) -> np.ndarray:
        more = max(0, count - len(self._free))
        new = range(self._num_slots, self._num_slots + more)
        self._num_slots += more
        reused = [self._free.pop() for _ in range(count - more)]
        return np.array(sorted([*reused, *new]), dtype=np.int64)

    def _forget(self, record: Record) -> None:
        placed = self._placed.pop(record.key, None)
        if placed is not None and self._retry_at is None:
            self._log.drop(record.key)
            self._free += placed.slots[::-1].tolist()

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
        """Cut pages.bin to max_bytes: move the pages behind that size to free pages before it. The
        records must fit. If the disk is full, the file does not change."""
        self._wait_for_jobs()
        limit = max_bytes // self.page_bytes
        if self._retry_at is not None or self._num_slots <= limit:
            return
        try:
            self._compact()  # drops must be in the log before their pages are reused
            for key, placed in self._placed.items():
                behind = placed.slots[placed.slots >= limit]
                if len(behind):
                    slots = placed.slots.copy()
                    slots[slots >= limit] = self._take(len(behind))
                    for old, new in zip(behind, slots[placed.slots >= limit]):
                        page = os.pread(self._pages, self.page_bytes, int(old) * self.page_bytes)
                        self._write_pages(new[None], np.frombuffer(page, dtype=np.uint8)[None])
                    self._placed[key] = replace(placed, slots=slots)
            self._compact()
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
        self._check_ours((_LOCK, self._lock), (_PAGES, self._pages), (_LOG, self._log.descriptor))

    def _rewrite(self) -> None:
        try:
            self._compact()
        except OSError as error:
            self._note_failure(error)
            raise self._write_error(error) from error
        self._error = self._retry_at = None

    def _write_error(self, error: Exception) -> OSError:
        return OSError(f"writing to {self.folder} failed: {error}; fix that, then call it again")

    def _wait_for_jobs(self, let_in: Callable[[], None] = lambda: None) -> None:
        self.check_process()
        self._wake.put(None)  # an interrupt may have come between a job and its wake-up
        poll_until(lambda: not (self._jobs and self._is_writing), let_in)

    def flush(self, let_in: Callable[[], None] = lambda: None) -> None:
        """Wait until all records are on the disk, safe from a power failure. let_in: as
        `poll_until`.

        Raises:
            OSError: writing failed since the last `recover`, or the folder's files were removed or
                replaced.
        """
        self._wait_for_jobs(let_in)
        if self._error is not None:
            raise self._write_error(self._error) from self._error
        self._check_ours((_LOCK, self._lock), (_PAGES, self._pages), (_LOG, self._log.descriptor))
        os.fsync(self._pages)
        os.fsync(self._log.descriptor)

    @interrupts_wait()
    def close(self) -> None:
        """Finish pending writes, cancel pending reads and unlock the folder. In a forked process
        the folder stays locked by the parent. After an interrupt, call it again."""
        is_ours = self._home.is_here
        if is_ours:
            self._closing = True
            self._wake.put(None)
            self._wait_for_writer()
            self._readers.shutdown(cancel_futures=True)
        if self._closed:
            return
        self._closed = True
        if is_ours:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked process may have a copy open
        for descriptor in (self._pages, self._log.descriptor, self._lock):
            if descriptor is not None:
                os.close(descriptor)

    def _wait_for_writer(self) -> None:
        # Not by `join`: after an interrupt in it, a running thread may count as ended.
        poll_until(lambda: not self._is_writing)

    def close_from_anywhere(self) -> None:
        """`close` for the garbage collector, which may run in a thread of this store; there,
        waiting for that thread would never end."""
        if threading.current_thread().name.startswith(_THREADS):
            threading.Thread(target=self.close, name="cache-close").start()
        else:
            self.close()
