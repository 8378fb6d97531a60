"""Replaces files as a whole, and says why others cannot be read."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LFS_POINTER = b"version https://git-lfs"
_READ_WHOLE, _NUM_SAMPLES = 64 << 20, 64
"""Most bytes of a file that `digest_of_files` reads whole, number of samples of a larger one."""


def read_failure(path: Path, error: object) -> str:
    """Return why an existing file cannot be read: a known cause, or else the error."""
    if path.is_symlink() and not path.exists():
        return f"it is a link to {os.readlink(path)}, where nothing is: copy the file itself"
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "it is a pointer of Git LFS: run `git lfs pull` in its repository"
    return str(error)


def read_json(path: Path, error: type[ValueError] = ValueError) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raise `error` if it does not."""
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
    """Let `write` fill a file next to `path`, then move it to `path`, as a whole or not at all. The
    file gets the mode that the umask gives."""
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
    """Return where a process writes the file that will replace `path`, next to it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def digest_of_files(paths: Iterable[str | os.PathLike]) -> str:
    """Hash files, so that changed ones are noticed. Of a file above 64 MiB, the hash covers the
    size and 64 samples of 1 MiB over its whole length."""
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
