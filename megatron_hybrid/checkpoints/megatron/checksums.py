"""Checksums of what we write for Megatron, which itself would load flipped bytes as numbers.

`checksums.txt` lies in the folder of an iteration: its own CRC-32, and, as JSON, that of each file
that is no file of pieces and of each piece. Megatron reads past it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_hybrid.checkpoints.tensor_files import CheckpointError

CHECKSUMS_FILE = "checksums.txt"


def write_checksums(folder: Path, names: Iterable[str], pieces: Mapping[str, Any]) -> None:
    """Write the checksums of a folder that was just written.

    Args:
        names: files that are summed whole.
        pieces: name of each tensor or state, saved in one piece -> where it lies, as in
            `Metadata.storage_data`.
    """
    sums = {name: zlib.crc32((folder / name).read_bytes()) for name in names}
    for name, where in pieces.items():
        with (folder / where.relative_path).open("rb") as file:
            file.seek(where.offset)
            sums[name] = zlib.crc32(file.read(where.length))
    text = json.dumps(sums)
    (folder / CHECKSUMS_FILE).write_text(f"{zlib.crc32(text.encode())}\n{text}", encoding="utf-8")


class Checksums:
    """The checksums of a folder; those that others wrote have none.

    Raises:
        CheckpointError: they cannot be read.
    """

    def __init__(self, folder: Path):
        self._path = folder / CHECKSUMS_FILE
        self._sums: dict[str, int] = {}
        if self._path.is_file():
            try:
                own, _, text = self._path.read_text(encoding="utf-8").partition("\n")
                self._sums = json.loads(text)
                self._sums[CHECKSUMS_FILE] = int(own)
            except (OSError, ValueError, TypeError) as error:
                raise CheckpointError(f"{self._path} cannot be read: {error}") from error
            self.check(CHECKSUMS_FILE, text.encode())

    def check(self, name: str, content: bytes) -> None:
        """Raise CheckpointError unless a file or a piece has the bytes that were written."""
        if name in self._sums and self._sums[name] != zlib.crc32(content):
            raise CheckpointError(
                f"{name} in {self._path.parent} does not have the bytes that were written: it was "
                "damaged or changed since. Copy or convert the folder again."
            )
