"""Files that are replaced as a whole."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
