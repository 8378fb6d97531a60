"""DiskIndex: `index.sqlite3`, the records of a cache folder and the places of their pages.

sqlite writes ahead (WAL) and locks the file for one connection, so it shares no memory with other
processes. `synchronous` is FULL: a committed transaction survives a power failure. With NORMAL, a
dropped record could come back after its pages were overwritten.
"""

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hybrid.offload.tier import Record
from megatron_hybrid.utils.child_lifetime import never_free

try:
    import sqlite3
except ImportError:  # some builds of Python lack it, and most engines have no folder
    sqlite3 = None

FORMAT = 4
"""Version of the folder and of a page's content; increased when either changes."""
_SCHEMA = f"""
    BEGIN;
    CREATE TABLE head (name, value);
    CREATE TABLE records (number INTEGER PRIMARY KEY, key, parent, is_state, position, saved_work,
        cost_bytes, checksum, slots, CHECK (number < 1 << 62 AND typeof(key) = 'blob'
        AND typeof(position) = 'integer' AND typeof(saved_work) = 'real'
        AND typeof(cost_bytes) = 'integer' AND typeof(slots) = 'blob' AND length(slots) % 8 = 0));
    PRAGMA user_version = {FORMAT};
"""
_ADD_TO_HEAD = "INSERT INTO head VALUES (?, ?)"


class CacheFolderError(ValueError):
    """A cache folder cannot be used; the message names the file and the reason."""


class DamagedIndexError(Exception):
    """An index of this version cannot be read."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A record on the disk, and its pages."""

    record: Record
    number: int
    """Number of its row. Rows are numbered in order of arrival, so parents come first."""
    slots: np.ndarray
    """int64 [n]: pages of pages.bin."""
    checksum: bytes


class DiskIndex:
    """The index of one folder, for one thread at a time.

    Args:
        path: of an index, or of an empty file, which becomes one.
        head: values that the records depend on, by name.

    Raises:
        CacheFolderError: the index has another version or head. It has not changed.
        DamagedIndexError: an index of this version cannot be read.
        OSError: it cannot be used. All methods but `close` may raise it.
    """

    def __init__(self, path: Path, head: dict[str, str | int]):
        if sqlite3 is None:
            raise CacheFolderError(
                "a cache folder needs Python's module sqlite3: use a Python that has it, or leave "
                "out cache_dir"
            )
        self._path = path
        with self._os_errors():
            self._connection = sqlite3.connect(path, timeout=0, check_same_thread=False)
            never_free(self._connection)  # freed in a fork, it would remove the parent's log
            try:
                self._open(head)
            except BaseException:
                self.close()
                raise

    def _open(self, head: dict[str, str | int]) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # before the file is read: see above
        health, found, is_new = "ok", {}, False
        try:
            found["format"] = execute("PRAGMA user_version").fetchone()[0]
            if not found["format"]:
                is_new = not execute("SELECT * FROM sqlite_master").fetchone()
            elif found["format"] == FORMAT:
                found.update(execute("SELECT * FROM head").fetchall())
                health = execute("PRAGMA quick_check(1)").fetchone()[0]
        except sqlite3.DatabaseError as error:
            if not error.sqlite_errorname.startswith("SQLITE_CORRUPT"):
                raise
            health = str(error)
        for name, value in {} if is_new else {"format": FORMAT, **head}.items():
            there = found.get(name, None if health == "ok" else value)
            if there != value:
                raise CacheFolderError(
                    f"{self._path} was written for another {name.replace('_', ' ')}: {there!r} "
                    f"there, {value!r} here; use another folder, or remove {self._path.parent}"
                )
        if health != "ok":
            raise DamagedIndexError(" ".join(health.split()))
        for setting in ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 256"):
            execute(f"PRAGMA {setting}")
        if is_new:
            self._connection.executescript(_SCHEMA)
            self._connection.executemany(_ADD_TO_HEAD, head.items())
            self._connection.commit()

    @contextmanager
    def _os_errors(self) -> Iterator[None]:
        """Roll back a transaction that failed, and raise errors of sqlite as OSError."""
        try:
            yield
        except sqlite3.Error as error:
            is_full = getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
            number = errno.ENOSPC if is_full else errno.EIO
            raise OSError(number, str(error), str(self._path)) from error

    def read(self, page_bytes: int) -> list[tuple[Placed, bytes | None]]:
        """Return the records in order of arrival, each with its parent's key."""
        with self._os_errors():
            rows = self._connection.execute("SELECT * FROM records ORDER BY number").fetchall()
        slots = np.frombuffer(b"".join(row[-1] for row in rows), dtype="<i8").astype(np.int64)
        found, start = [], 0
        for number, key, parent, is_state, position, *worth, checksum, pages in rows:
            end = start + len(pages) // 8
            record = Record(key, None, position, (end - start) * page_bytes, bool(is_state))
            record.saved_work, record.cost_bytes = worth
            found.append((Placed(record, number, slots[start:end], checksum), parent))
            start = end
        return found

    def write(
        self,
        dropped: Iterable[int],
        added: Iterable[Placed],
        head: dict[str, str | int] | None = None,
    ) -> None:
        """Remove rows by number, add records, and replace the head if one is given, in one
        transaction. With a head, sqlite's log is emptied before, so that it has room."""
        connection = self._connection
        with self._os_errors():
            try:
                if head is not None:
                    connection.execute("PRAGMA wal_checkpoint")
                    connection.execute("DELETE FROM head")
                    connection.executemany(_ADD_TO_HEAD, head.items())
                numbers = ((number,) for number in dropped)
                connection.executemany("DELETE FROM records WHERE number = ?", numbers)
                marks = ", ".join("?" * 9)
                connection.executemany(f"INSERT INTO records VALUES ({marks})", map(_row, added))
                connection.commit()
            finally:
                connection.rollback()  # no effect after a commit

    def close(self) -> None:
        """Close the files. Rows that do not fit into the index now stay in sqlite's log."""
        self._connection.close()


def _row(placed: Placed) -> tuple:
    record, slots = placed.record, placed.slots.astype("<i8").tobytes()
    parent = record.parent.key if record.parent is not None else None
    worth = float(record.saved_work), int(record.cost_bytes)
    place = placed.checksum, slots
    return placed.number, record.key, parent, record.is_state, record.position, *worth, *place
