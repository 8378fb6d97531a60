"""A progress bar for work that takes seconds."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

_drawn = random.getstate()
from rich.console import Console  # noqa: E402
from rich.progress import (  # noqa: E402
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

random.setstate(_drawn)  # rich draws when it is first imported

BAR_SECONDS = 1.0
"""Work that ends within this time has no bar."""
LINE_SECONDS = 10.0
"""Time between two lines where there is no terminal."""


@contextmanager
def progress(
    description: str,
    total: int | None,
    in_bytes: bool = True,
    has_lines: bool = True,
    is_shown: bool = True,
) -> Iterator[Callable[[int], None]]:
    """Show progress, and yield `advance(count)`, which is to be called at least every few seconds,
    with 0 if nothing is done. A terminal shows a bar, which vanishes at the end.

    Args:
        description: text before the bar.
        total: sum of all counts, if it is known.
        in_bytes: whether counts are bytes; else they are numbers of things.
        has_lines: whether there is a line from time to time without a terminal.
        is_shown: False on the ranks that show nothing.
    """
    began = last_line = monotonic()
    done, bar, console = 0, None, None

    def advance(count: int) -> None:
        nonlocal last_line, done, bar, console
        done += count
        now = monotonic()
        if not is_shown or now - began < BAR_SECONDS:
            return  # most ends here, and needs neither a console nor a bar
        console = console or Console(stderr=True)
        if console.is_terminal:
            if bar is None:
                bar = new_bar(description, total, in_bytes, console)
                bar.start()
            bar.update(bar.task_ids[0], completed=done)
        elif has_lines and now - last_line >= LINE_SECONDS:
            last_line = now
            shown = f"{100 * done / total:.0f} %" if total else f"{done:,}"
            console.print(f"{description}: {shown}", markup=False)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def new_bar(description: str, total: int | None, in_bytes: bool, console: Console) -> Progress:
    """Make a bar with one task, which shows nothing without a terminal."""
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    bar.add_task(description, total=total)
    return bar
