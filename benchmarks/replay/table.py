"""Results as text: tables for the terminal, and Markdown for the docs."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.replay.sweep import Cell

AHEAD = 0.1
"""Points from which on an engine counts as ahead."""
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
"""Lines around results in a page, by what they are of."""
TIMED = ("ours", "ours-int8", "vllm", "vllm-fine", "mcore", "marconi")
"""Engines whose bookkeeping a page shows: the others are models of a rule."""

_ENGINE_WIDTH, _BUDGET_WIDTH = 22, 26
"""Columns of a terminal for the longest name, and for a budget's two numbers."""


def grouped(cells: Sequence[Cell]) -> Iterator[tuple[str, list[float], dict[str, list[Cell]]]]:
    """Yield for each workload, geometry and number in flight a title, the budgets, and for each
    engine its cells in order of the budgets (an engine without a limit repeats its one)."""
    groups = by(cells, "workload", "geometry", "in_flight")
    for (workload, geometry, in_flight), group in groups.items():
        title = (
            f"{workload}, {geometry}, {in_flight} in flight: {group[0].requests:,} requests, "
            f"{group[0].prompt_tokens:,} prompt tokens"
        )
        budgets = sorted({cell.budget_gb for cell in group if cell.budget_gb is not None})
        engines = {}
        for engine in dict.fromkeys(cell.engine for cell in group):
            row = {cell.budget_gb: cell for cell in group if cell.engine == engine}
            engines[engine] = [row.get(budget, row.get(None)) for budget in budgets or [None]]
        yield title, budgets, engines


def terminal_tables(cells: Sequence[Cell], width: int) -> Iterator[Table]:
    """Make for each workload, geometry and number in flight as many tables as it takes for all
    budgets to fit into so many columns; one row per engine."""
    at_once = max(1, (width - _ENGINE_WIDTH) // _BUDGET_WIDTH)
    for title, budgets, engines in grouped(cells):
        heads = [f"{budget:g} GB" for budget in budgets] or ["no limit"]
        for start in range(0, len(heads), at_once):
            part = slice(start, start + at_once)
            table = Table(title=title, title_justify="left")
            table.add_column("engine", no_wrap=True)
            for head in heads[part]:
                table.add_column(f"{head}, %", justify="right", no_wrap=True)
                table.add_column("us", justify="right")
            for engine, row in engines.items():
                shown = [(f"{c.skipped_percent:.1f}", micros(c)) for c in row[part]]
                table.add_row(engine, *(text for pair in shown for text in pair))
            yield table


def micros(cell: Cell) -> str:
    return f"{cell.micros_median:.0f} / {cell.micros_p95:.0f}"


def markdown(cells: Sequence[Cell]) -> str:
    """Return the same as Markdown: per geometry and number in flight a table of
    tokens skipped, with a column for each workload and its budgets, and one of the bookkeeping at
    the middle budget."""
    lines = []
    for (geometry, in_flight), group in by(cells, "geometry", "in_flight").items():
        tables = {workload: table for (workload,), table in by(group, "workload").items()}
        shapes = {name: next(grouped(table))[1:] for name, table in tables.items()}
        heads = [
            joined([name, *map("{:g}".format, budgets)]) for name, (budgets, _) in shapes.items()
        ]
        engines = dict.fromkeys(cell.engine for cell in group)
        lines += [f"**{geometry}, {in_flight} in flight: % of the prompt tokens skipped**", ""]
        lines.append(header("engine (GB)", heads))
        for engine in engines:
            rows = [shape.get(engine, []) for _, shape in shapes.values()]
            texts = [[f"{skipped(cell):.1f}" for cell in row] for row in rows]
            shown = (joined(text if len(set(text)) > 1 else text[:1]) for text in texts)
            lines.append(f"| {engine} | {' | '.join(shown)} |")
        timed = [engine for engine in engines if engine in TIMED]
        if timed:
            lines += [
                "",
                "**Microseconds of a request at the middle size, median / 95th percentile**",
            ]
            lines += ["", header("engine", list(shapes))]
        for engine in timed:
            rows = [shape[engine] for _, shape in shapes.values() if engine in shape]
            lines.append(f"| {engine} | {' | '.join(micros(row[len(row) // 2]) for row in rows)} |")
        lines.append("")
    return "\n".join(lines)


def header(first: str, others: Sequence[str]) -> str:
    """The first two lines of a Markdown table; all columns but the first stand to the right."""
    return f"| {first} | {' | '.join(others)} |\n| --- |{' ---: |' * len(others)}"


def cells_behind(cells: Sequence[Cell]) -> str:
    """A Markdown table of the cells in which a rival skips more than ours. All keep exact states;
    ours with int8 states stands next to them by its name."""
    rows, compared = [], 0
    for where, group in by(cells, "workload", "geometry", "in_flight", "budget_gb").items():
        own = {cell.engine: cell for cell in group}
        ours, other = own.get("ours"), max(filter(is_rival, group), key=skipped, default=None)
        if ours is None or other is None:
            continue
        compared += 1
        lead = skipped(other) - skipped(ours)
        if lead >= AHEAD:
            workload, model, in_flight, budget = where
            int8 = f"{skipped(own['ours-int8']):.1f}" if "ours-int8" in own else "-"
            row = f"| {workload} | {model} | {in_flight} | {budget:g} | {skipped(ours):.1f} | "
            rows.append((-lead, f"{row}{skipped(other):.1f} | {other.engine} | {int8} |"))
    ahead = f"in {len(rows)} of {compared} cells, by {AHEAD} points or more"
    lines = [f"**Another engine is ahead {ahead}**", ""]
    if not rows:
        return lines[0] + "\n"
    lines.append("| workload | model | in flight | GB | ours | best other | which | ours-int8 |")
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | --- | ---: |")
    return "\n".join([*lines, *(row for _, row in sorted(rows)), ""])


def joined(parts: Iterable[str]) -> str:
    return "<br>".join(parts)


def skipped(cell: Cell) -> float:
    return cell.skipped_percent


def by(cells: Sequence[Cell], *names: str) -> dict[tuple, list[Cell]]:
    """The cells that agree in these fields, together, in order."""
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(getattr(cell, name) for name in names), []).append(cell)
    return groups


def is_rival(cell: Cell) -> bool:
    """Return whether an engine could be had in place of ours: not one that foresees or pays
    nothing."""
    return not cell.engine.startswith(("ours", "clairvoyant", "lru-free", "ceiling"))


def around_results(path: Path, name: str) -> tuple[str, str]:
    """Return what stands before and after results in a Markdown file, their two marks included.

    Args:
        name: of the results: "results", or "models" for many models.

    Raises:
        ValueError: there is no such file, or it lacks the marks.
    """
    begin, end = BEGIN.format(name), END.format(name)
    try:
        page = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist: results go into a page that is there, between the lines "
            f"{begin!r} and {end!r}"
        ) from None
    if begin not in page or end not in page:
        raise ValueError(f"{path} has no {begin!r} and {end!r}: add these lines where results go")
    before, rest = page.split(begin, 1)
    return before + begin, end + rest.split(end, 1)[1]
