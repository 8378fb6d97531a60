"""A progress bar for what takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

BAR_SECONDS = 1.0
"""What ends within this time has no bar."""
LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""


@contextmanager
def progress(
    description: str,
    total: int,
    in_bytes: bool = True,
    has_lines: bool = True,
    is_shown: bool = True,
    console: Console | None = None,
) -> Iterator[Callable[[int], None]]:
    """Yield `advance(count)`. A terminal shows a bar, which vanishes at the end.

    Args:
        description: stands before the bar.
        total: sum of all counts.
        in_bytes: counts are bytes; else they are numbers of things.
        has_lines: without a terminal there is a line from time to time; else there is nothing.
        is_shown: False on the ranks that show nothing.
        console: default stderr.
    """
    console = console or Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(description, total=total)
    began = last_line = monotonic()

    def advance(count: int) -> None:
        nonlocal last_line
        bar.advance(task, count)
        now = monotonic()
        if not is_shown:
            return
        if console.is_terminal:
            if now - began >= BAR_SECONDS:
                bar.start()  # no effect on one that has started
        elif has_lines and now - last_line >= LINE_SECONDS:
            last_line = now
            console.print(f"{description}: {bar.tasks[0].percentage:.0f} %", markup=False)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
