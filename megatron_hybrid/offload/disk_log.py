"""DiskLog: `index.log`, the records of a cache folder and their pages.

One line per written or dropped record: a checksum, then JSON. A line is valid once it is complete;
a damaged line is logged and skipped.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_hybrid.offload.tier import Record

MAX_STALE_LINES = 10_000
"""The log is compacted when it has this many more lines of dropped records than of present ones."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A record on the disk, and its pages."""

    record: Record
    parent: bytes | None
    """Key of the record before it."""
    slots: np.ndarray
    """int64 [n]: pages of pages.bin."""
    checksum: str


class DiskLog:
    """The log of one folder.

    Args:
        path: of the file, which need not exist. The first `compact` opens it.
        page_bytes: bytes of a page.
        warn: callback with the damaged part ("index.log line 7") and the reason.
    """

    def __init__(self, path: Path, page_bytes: int, warn: Callable[[str, str], None]):
        self.descriptor: int | None = None
        """Descriptor of the open file; None before the first `compact`."""
        self._path = path
        self._page_bytes = page_bytes
        self._warn = warn
        self._num_lines = 0

    def read(self) -> list[tuple[str, Placed]]:
        """Return the present records, parents first, each with the name of its line.

        Raises:
            OSError: the file cannot be read.
        """
        entries: dict[bytes, tuple[str, Placed]] = {}
        for line, text in self._whole_lines():
            try:
                key, placed = self._parse(text)
            except (ValueError, TypeError, KeyError, MemoryError) as error:
                self._warn(line, f"not used, it cannot be parsed ({error!r})")
                continue
            entries.pop(key, None)  # a rewritten record is ordered behind its parent
            if placed is not None:
                entries[key] = line, placed
        return list(entries.values())

    def _whole_lines(self) -> Iterator[tuple[str, bytes]]:
        """Yield names and texts of the undamaged lines."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                name = f"{self._path.name} line {number}"
                checksum, _, text = line.rstrip(b"\n").partition(b" ")
                if not line.endswith(b"\n"):
                    self._warn(name, "not used, it is incomplete")
                elif checksum != b"%08x" % zlib.crc32(text):
                    self._warn(name, "not used, its checksum is wrong")
                else:
                    yield name, text

    def _parse(self, text: bytes) -> tuple[bytes, Placed | None]:
        """Return the key of a line, and its record's place; None if the record was dropped.

        Raises:
            ValueError, TypeError, KeyError, MemoryError: not a line of this format.
        """
        entry = json.loads(text)
        key = bytes.fromhex(entry["key"])
        if entry["op"] != "put":
            return key, None
        runs = [np.arange(first, first + count) for first, count in entry["slots"]]
        slots = np.concatenate([*runs, np.empty(0, dtype=np.int64)])
        if slots.dtype != np.int64 or (slots < 0).any():
            raise ValueError(f"slots {entry['slots']}")
        num_bytes = len(slots) * self._page_bytes
        record = Record(key, None, int(entry["position"]), num_bytes, bool(entry["state"]))
        record.saved_work, record.cost_bytes = float(entry["saved"]), int(entry["cost"])
        parent = bytes.fromhex(entry["parent"]) if entry["parent"] else None
        return key, Placed(record, parent, slots, entry["sum"])

    def put(self, placed: Placed) -> None:
        """Log a written record.

        Raises:
            OSError: writing failed; also raised by `drop`.
        """
        self._append(_put_line(placed))

    def drop(self, key: bytes) -> None:
        """Log a dropped record."""
        self._append(_line({"op": "drop", "key": key.hex()}))

    def _append(self, line: bytes) -> None:
        write_all(self.descriptor, line)
        self._num_lines += 1

    def is_stale(self, num_records: int) -> bool:
        """Return whether most lines are of dropped records. num_records: number of present ones."""
        return self._num_lines > 2 * num_records + MAX_STALE_LINES

    def compact(self, placed: Iterable[Placed]) -> None:
        """Rewrite the log with these records only. The old log is kept until the new one is
        complete.

        Raises:
            OSError: writing failed; the old log is still in use.
        """
        lines = [_put_line(each) for each in placed]
        write_whole(self._path, b"".join(lines))
        self._num_lines = len(lines)
        old, self.descriptor = self.descriptor, os.open(self._path, os.O_WRONLY | os.O_APPEND)
        if old is not None:
            os.close(old)


def size_of_log(placed: Iterable[Placed]) -> int:
    """Return the bytes of a log of these records only."""
    return sum(len(_put_line(each)) for each in placed)


def _put_line(placed: Placed) -> bytes:
    record = placed.record
    return _line(
        {
            "op": "put",
            "key": record.key.hex(),
            "parent": placed.parent.hex() if placed.parent else "",
            "state": record.is_state,
            "position": record.position,
            "saved": record.saved_work,
            "cost": record.cost_bytes,
            "slots": [[int(slot), int(count)] for _, slot, count in runs_of(placed.slots)],
            "sum": placed.checksum,
        }
    )


def _line(entry: dict) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def runs_of(slots: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (row, first slot, count) of each run of consecutive slots."""
    if not len(slots):
        return
    starts = np.flatnonzero(np.diff(slots, prepend=slots[0] - 2) != 1)
    for start, end in zip(starts, [*starts[1:], len(slots)]):
        yield int(start), int(slots[start]), int(end - start)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`; one call may write less."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file's content atomically: after a crash it has the old or the new content."""
    new = path.with_name(path.name + ".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)  # a partial file would take space from the next attempt
        raise
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name must survive a power failure, too
    finally:
        os.close(folder)
