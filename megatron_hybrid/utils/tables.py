"""Formats sizes and tables for commands to print."""

GB = 10**9


def size(num_bytes: float) -> str:
    """Format a number of bytes in its largest unit."""
    for unit, factor in (("GB", GB), ("MB", 10**6), ("kB", 1000)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.4g} {unit}"
    return f"{num_bytes} B"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Format a table in lines. The first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    return [
        "  ".join(
            f"{cell:{'>' if i else ''}{width}}"
            for i, (cell, width) in enumerate(zip(cells, widths))
        )
        for cells in (heads, *rows)
    ]
