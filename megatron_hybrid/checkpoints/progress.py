"""A progress bar for reading and writing large files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(
    description: str,
    total_bytes: int,
    minimum_bytes: int = 1 << 30,
    console: Console | None = None,
) -> Iterator[Callable[[int], None]]:
    """Yield `advance(num_bytes)`. The bar vanishes at the end.

    Args:
        minimum_bytes: below this total, which is read at once, there is no bar.
        console: default stderr. Without a terminal there is no bar.
    """
    console = console or Console(stderr=True)
    if total_bytes < minimum_bytes or not console.is_terminal:
        yield lambda num_bytes: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)
