"""Files that are replaced as a whole, and why others cannot be read."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LFS_POINTER = b"version https://git-lfs"


def read_failure(path: Path, error: object) -> str:
    """Say why a file that is there cannot be read: what is known of it, else the error."""
    if path.is_symlink() and not path.exists():
        return f"it is a link to {os.readlink(path)}, where nothing is: copy the file itself"
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "it is a pointer of Git LFS: run `git lfs pull` in its repository"
    return str(error)


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


def temporary_path(path: Path) -> Path:
    """Return where a process writes what will become the file `path`: next to it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
