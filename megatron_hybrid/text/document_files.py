"""Files of documents: JSONL, text and parquet, read in chunks that several processes share."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hybrid.utils.validation import check_text

JSONL, TEXT, PARQUET = (".jsonl", ".ndjson", ".json"), (".txt", ".text", ".md"), (".parquet",)
CHUNK_BYTES = 1 << 20
"""Text of a chunk, about: some tenths of a second of work."""
LARGEST_RECORD = 16 << 20
"""Bytes of a line, a text or a row, at most: to encode a text takes some 150 times its size."""
_PARQUET_ROWS = 256


class BrokenRecordError(ValueError):
    """A record of a file is no document."""


@dataclass(frozen=True)
class Chunk:
    """Some records of one file, in order."""

    path: Path
    first: int
    """Number of the first record from 1: a line of the file, or a row of parquet."""
    records: list[bytes] | list[dict[str, Any]]
    """Lines, the whole of a text file, or rows of parquet."""
    bytes_read: int
    """Bytes of the file, compressed as it is, since the chunk before."""

    def place(self, index: int) -> str:
        """Name of a record, for errors."""
        between = ", row " if _format(self.path) in PARQUET else ":"
        return f"{self.path}{between}{self.first + index}"

    def parse(self, index: int, key: str) -> dict[str, Any] | None:
        """The fields of a record. Of a text, its own under `key`. None: an empty line.

        Raises:
            BrokenRecordError: it has no fields, or not the one of this key, or is too large.
        """
        fields = self.records[index]
        if isinstance(fields, bytes):
            if len(fields) > LARGEST_RECORD:
                raise BrokenRecordError(_TOO_LARGE)
            try:
                text = fields.decode("utf-8-sig" if self.first + index == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise BrokenRecordError(f"is not UTF-8: {error}") from error
            if _format(self.path) in TEXT:
                return {key: text}
            if not text.strip():
                return None
            try:
                fields = json.loads(text)
            except RecursionError as error:
                raise BrokenRecordError("is nested too deeply") from error
            except ValueError as error:
                raise BrokenRecordError(f"is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BrokenRecordError(f"is not an object with a field {key!r}")
        if key not in fields:
            named = ", ".join(map(repr, fields)) or "none"
            raise BrokenRecordError(f"has no field {key!r}, but {named:.200}; choose one by --key")
        return fields

    def texts(self, key: str) -> Iterator[str | BrokenRecordError]:
        """Return the text of each record, or the error that names the record; "" where it is empty
        or null. Empty lines are no records."""
        for index in range(len(self.records)):
            try:
                fields = self.parse(index, key)
                if fields is None:
                    continue
                text = "" if fields[key] is None else fields[key]
                if not isinstance(text, str):
                    raise BrokenRecordError(f"has no text in {key!r}, but {text!r:.80}")
                if len(text) > LARGEST_RECORD:
                    raise BrokenRecordError(_TOO_LARGE)
                check_text(f"has a {key!r} that", text)
            except ValueError as error:
                yield BrokenRecordError(f"{self.place(index)} {error}")
            else:
                yield text


_TOO_LARGE = (
    f"has more than {LARGEST_RECORD >> 20} MiB, the most of one document: cut it into several"
    " (of a text file --one-per-line makes each line one)"
)


def check_files(paths: Sequence[str | os.PathLike]) -> list[Path]:
    """The files as paths.

    Raises:
        ValueError: one does not exist, or is of no format that `read_chunks` knows.
        ImportError: parquet files need pyarrow.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a file; name files, as in data/*.jsonl")
        if _format(path) not in (*JSONL, *TEXT, *PARQUET):
            raise ValueError(
                f"{path} has none of the endings {', '.join((*JSONL, *TEXT))} (also with .gz) and "
                f"{', '.join(PARQUET)}"
            )
    if any(_format(path) in PARQUET for path in paths):
        _import_parquet()
    return paths


def read_chunks(path: Path, one_per_line: bool = False) -> Iterator[Chunk]:
    """Read a file that `check_files` knows.

    Args:
        one_per_line: each line of a text file is a document; else the file is one.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        if _format(path) in PARQUET:
            yield from _read_rows(path)
            return
        with path.open("rb") as file:
            content = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            if _format(path) in TEXT and not one_per_line:
                yield Chunk(path, 1, [content.read(LARGEST_RECORD + 1)], path.stat().st_size)
                return
            seen, line = 0, 1
            while lines := content.readlines(CHUNK_BYTES):
                if _format(path) in TEXT:
                    lines = [each.rstrip(b"\r\n") for each in lines]
                cut = [each[: LARGEST_RECORD + 1] for each in lines]  # the encoder tells it
                yield Chunk(path, line, cut, file.tell() - seen)
                seen, line = file.tell(), line + len(lines)
    except (OSError, EOFError) as error:  # what gzip raises, too
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_texts(paths: Sequence[Path], key: str, one_per_line: bool = False) -> Iterator[str]:
    """The texts of files, in order.

    Raises:
        ValueError: a file cannot be read, or a record has no text.
    """
    for path in paths:
        for chunk in read_chunks(path, one_per_line):
            for text in chunk.texts(key):
                if isinstance(text, BrokenRecordError):
                    raise text
                if text:
                    yield text


def _read_rows(path: Path) -> Iterator[Chunk]:
    parquet = _import_parquet()
    try:
        with parquet.ParquetFile(path) as file:
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            row = 1
            for batch in file.iter_batches(_PARQUET_ROWS):
                yield Chunk(path, row, batch.to_pylist(), round(share * len(batch)))
                row += len(batch)
    except ValueError as error:  # what pyarrow raises for a file that is torn
        raise ValueError(f"{path} cannot be read: {error}") from error


def _import_parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("parquet files need pyarrow: pip install pyarrow") from error
    return parquet


def _format(path: Path) -> str:
    """Ending of a file without that of compression; parquet compresses by itself."""
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    return "" if plain != path and plain.suffix in PARQUET else plain.suffix
