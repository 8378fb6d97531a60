"""Files of documents: JSONL, text and tables, read in chunks that several processes share."""

import gzip
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hybrid.utils.validation import check_text, json_value

JSONL, TEXT = (".jsonl", ".ndjson", ".json"), (".txt", ".text", ".md")
TABLES, COMPRESSED = (".parquet", ".arrow"), (".gz", ".zst")
STDIN = Path("-")
"""The standard input, which has JSONL."""
CHUNK_BYTES = 1 << 20
"""About how many bytes a chunk has: some tenths of a second of work."""
LARGEST_RECORD = 16 << 20
"""Most bytes of a line, a text or a row: to encode a text takes some 150 times its size."""
BY_KEY = "; choose one by --key"
_ROWS = 256


class BrokenRecordError(ValueError):
    """A record of a file is no document."""


@dataclass(frozen=True)
class Chunk:
    """Some records of one file, in order."""

    path: Path
    first: int
    """Number of the first record, from 1: a line of the file, or a row of the table."""
    records: list[bytes] | list[dict[str, Any]]
    """Lines, the whole of a text file, or rows of a table."""
    bytes_read: int
    """Bytes read of the file, in its compressed form, since the chunk before."""

    def place(self, index: int) -> str:
        """Return the name of a record, for errors."""
        between = ", row " if _format(self.path) in TABLES else ":"
        return f"{self.path}{between}{self.first + index}"

    def parse(self, index: int, key: str, remedy: str = "") -> dict[str, Any] | None:
        """Return the fields of a record, or None for an empty line. A text is the field `key`.
        `remedy` ends the error for a record that lacks this field.

        Raises:
            BrokenRecordError: the record has no fields, lacks this one, or is too large.
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
                fields = json_value(text)
            except ValueError as error:
                raise BrokenRecordError(f"is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BrokenRecordError(f"is not an object with a field {key!r}")
        if key not in fields:
            named = ", ".join(map(repr, fields)) or "none"
            raise BrokenRecordError(f"has no field {key!r}, but {named:.200}{remedy}")
        return fields

    def texts(self, key: str) -> Iterator[str | BrokenRecordError]:
        """Yield the text of each record, "" if it is empty or null, or an error that names the
        record. Empty lines are not records."""
        for index in range(len(self.records)):
            try:
                fields = self.parse(index, key, BY_KEY)
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


def check_files(paths: Sequence[str | os.PathLike], with_stdin: bool = False) -> list[Path]:
    """Return the files as paths. A folder of Hugging Face `datasets` stands for its files.

    with_stdin: "-" is the standard input.

    Raises:
        ValueError: a file does not exist, or has a format that `read_chunks` does not know.
        ImportError: tables and .zst need pyarrow, which is missing.
    """
    found = []
    for path in map(Path, paths):
        found += _files_of_dataset(path) if path.is_dir() else [path]
    for path in found:
        if not path.is_file() and not (with_stdin and path == STDIN):
            raise ValueError(f"{path} is not a file; name files, as in data/*.jsonl")
        if _format(path) not in (*JSONL, *TEXT, *TABLES):
            raise ValueError(
                f"{path} has none of the endings {', '.join((*JSONL, *TEXT))} (also with "
                f"{' or '.join(COMPRESSED)}) and {', '.join(TABLES)}"
            )
        if path.suffix in (".zst", *TABLES):
            _import_pyarrow()
    return found


def _files_of_dataset(folder: Path) -> list[Path]:
    """Return the files of a folder that `Dataset.save_to_disk` wrote, in their order."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return [folder / each["filename"] for each in state["_data_files"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        splits = sorted(each.parent.name for each in folder.glob("*/state.json"))
        raise ValueError(
            f"{folder} is not a file, nor a folder of `Dataset.save_to_disk` with a state.json: "
            + (f"name one of its splits {', '.join(splits)}" if splits else "name files")
        ) from error


def read_chunks(path: Path, one_per_line: bool = False) -> Iterator[Chunk]:
    """Yield the chunks of a file that `check_files` has accepted.

    Args:
        one_per_line: each line of a text file is a document; otherwise the whole file is one.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        if _format(path) in TABLES:
            row = 1
            for batch, bytes_read in _batches_of_rows(path):
                of = [(each.name, each.type) for each in batch.schema]
                rows = [{n: _value(each[n], t) for n, t in of} for each in _rows(batch)]
                yield Chunk(path, row, rows, bytes_read)
                row += len(batch)
            return
        with nullcontext(sys.stdin.buffer) if path == STDIN else path.open("rb") as file:
            content = file
            if path.suffix == ".gz":
                content = gzip.GzipFile(fileobj=file)
            elif path.suffix == ".zst":
                content = io.BufferedReader(_import_pyarrow().CompressedInputStream(file, "zstd"))
            if _format(path) in TEXT and not one_per_line:
                yield Chunk(path, 1, [content.read(LARGEST_RECORD + 1)], path.stat().st_size)
                return
            seen, line = 0, 1
            while lines := content.readlines(CHUNK_BYTES):
                if _format(path) in TEXT:
                    lines = [each.rstrip(b"\r\n") for each in lines]
                cut = [each[: LARGEST_RECORD + 1] for each in lines]  # the encoder reports it
                place = seen + sum(map(len, lines)) if path == STDIN else file.tell()
                yield Chunk(path, line, cut, place - seen)
                seen, line = place, line + len(lines)
    except (OSError, EOFError, ValueError) as error:  # what gzip and pyarrow raise, too
        raise ValueError(f"{path} cannot be read: {error}") from error


def read_texts(paths: Sequence[Path], key: str, one_per_line: bool = False) -> Iterator[str]:
    """Yield the texts of files, in order.

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


def _batches_of_rows(path: Path) -> Iterator[tuple[Any, int]]:
    pyarrow = _import_pyarrow()
    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(_ROWS):
                yield batch, round(share * len(batch))
        return
    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
        for batch in stream:
            for rows in (batch.slice(start, _ROWS) for start in range(0, len(batch), _ROWS)):
                yield rows, rows.nbytes


def _rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch. A value that Python cannot hold, such as a time after the year
    9999 or a text that is not UTF-8, becomes its error, as other fields may be all that is asked
    for."""
    try:
        return batch.to_pylist()
    except Exception:
        columns = [[_value_or_error(value) for value in column] for column in batch.columns]
        return [dict(zip(batch.schema.names, row)) for row in zip(*columns)]


def _value_or_error(value: Any) -> Any:
    try:
        return value.as_py()
    except Exception as error:
        return ValueError(str(error))


def _value(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type as JSONL has it: what `datasets` keeps as JSON is parsed, and
    mappings lose the null fields that Arrow adds because other rows have them."""
    if isinstance(value, dict):
        fields = ((each.name, each.type) for each in kind)
        return {name: _value(value[name], of) for name, of in fields if value[name] is not None}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_value(each, kind.value_type) for each in value]
    is_json = isinstance(value, str) and getattr(kind, "extension_name", None) == "arrow.json"
    try:
        return json_value(value) if is_json else value
    except ValueError as error:
        return error


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "parquet, .arrow and .zst files need pyarrow: pip install pyarrow"
        ) from error
    return pyarrow


def _format(path: Path) -> str:
    """Return a file's ending before that of compression; "" for a table with such an ending."""
    if path == STDIN:
        return ".jsonl"
    plain = path.with_suffix("") if path.suffix in COMPRESSED else path
    return "" if plain != path and plain.suffix in TABLES else plain.suffix
