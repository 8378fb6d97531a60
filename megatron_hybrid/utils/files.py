"""Files that are replaced as a whole, and why others cannot be read."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LFS_POINTER = b"version https://git-lfs"
_READ_WHOLE, _NUM_SAMPLES = 64 << 20, 64
"""Bytes of a file of which `digest_of_files` reads all; of a larger one so many samples."""


def read_failure(path: Path, error: object) -> str:
    """Say why a file that is there cannot be read: what is known of it, else the error."""
    if path.is_symlink() and not path.exists():
        return f"it is a link to {os.readlink(path)}, where nothing is: copy the file itself"
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "it is a pointer of Git LFS: run `git lfs pull` in its repository"
    return str(error)


def read_json(path: Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises `error` where it does not."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as broken:
        raise error(f"{path} cannot be read as JSON: {read_failure(path, broken)}") from broken
    if not isinstance(values, dict):
        raise error(f"{path} holds a {type(values).__name__}, not a JSON object.")
    return values


@contextmanager
def no_new_folders(folder: Path) -> Iterator[None]:
    """Remove a folder and its parents after an error, as far as they are new and empty."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in new:
                each.rmdir()
        raise


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file next to `path`, then put it in its place, as a whole or not at all.

    The file gets the mode that the umask gives.
    """
    temporary = temporary_path(path)
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask allows; some writers choose their own
        write(temporary)
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file by one that holds a JSON object."""
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def temporary_path(path: Path) -> Path:
    """Return where a process writes what will become the file `path`: next to it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def digest_of_files(paths: Iterable[str | os.PathLike]) -> str:
    """A digest of files, by which other ones are known. Of a file above 64 MiB it has the size and
    64 samples of 1 MiB over its whole length."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        size, starts = os.path.getsize(path), [0]
        length = size
        if size > _READ_WHOLE:
            length = _READ_WHOLE // _NUM_SAMPLES
            starts = [i * (size - length) // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)]
        digest.update(size.to_bytes(8, "little"))
        with open(path, "rb") as file:
            for start in starts:
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()
