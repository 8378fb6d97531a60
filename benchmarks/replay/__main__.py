"""`python -m benchmarks.replay`: request traces through prefix caches, without a model.

docs/measured/replay.md says what the columns mean.
"""

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.plots import pyplot
from benchmarks.replay import plots, table, traces
from benchmarks.replay.engines import ENGINES
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.sweep import Cell, measure_cliff, run_cells
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.commands.arguments import gigabytes, whole_number
from megatron_hybrid.tools.replay.protocol import Request

TRACE_BUDGETS_GB = (16, 64, 256)
CLIFF_GEOMETRY = "qwen3.5-4b"
CLIFF_LENGTHS = range(16, 2401, 16)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    engines = "\n".join(f"  {name:18} {entry.what}" for name, entry in ENGINES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay",
        description=__doc__.splitlines()[0],
        epilog=f"engines:\n{engines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    names = {"nargs": "+", "metavar": "NAME"}
    add(
        "--workloads",
        choices=WORKLOADS,
        help="Replay these workloads. The default is all, or none with --trace.",
        **names,
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Replay the recorded trace in this file (docs/measured/replay.md).",
    )
    add(
        "--geometry",
        choices=GEOMETRIES,
        default=["nemotron-h-8b"],
        help="Replay for these models. The default is %(default)s.",
        **names,
    )
    add(
        "--engines",
        choices=ENGINES,
        help="Compare these engines. The default is those that are installed.",
        **names,
    )
    add(
        "--budgets",
        nargs="+",
        type=gigabytes,
        metavar="GB",
        help="Give caches these sizes, in GB. The default is each workload's own sizes.",
    )
    add(
        "--in-flight",
        nargs="+",
        type=whole_number,
        default=[1],
        metavar="N",
        help="Run N requests at a time. Several numbers are replayed one after the other.",
    )
    add("--limit", type=whole_number, metavar="N", help="Replay only the first N requests.")
    add(
        "--full",
        action="store_true",
        help="Replay all workloads and models, with 1 and 8 requests at a time.",
    )
    add("--json", type=Path, metavar="FILE", help="Write the numbers to this file.")
    add("--plots", type=Path, metavar="DIR", help="Write SVG plots into this folder.")
    add(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="Write the tables into this page; with --full, the cells where others are ahead.",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    try:
        run(options)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"python -m benchmarks.replay: {error}") from error


def run(options: argparse.Namespace) -> None:
    # What can fail fails now, not after the replays.
    if options.plots:
        pyplot()
        options.plots.mkdir(parents=True, exist_ok=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.open("a").close()
    of = "models" if options.full else "results"
    page = table.around_results(options.markdown, of) if options.markdown else None
    trace = list(traces.load(options.trace, options.limit)) if options.trace else []
    console = Console()
    engines = chosen_engines(options, console)
    cells: list[Cell] = []
    for name, requests, budgets in sources(options, trace):
        for geometry in GEOMETRIES if options.full else options.geometry:
            for in_flight in (1, 8) if options.full else options.in_flight:
                found = run_cells(name, requests, geometry, budgets, engines, in_flight)
                for each in table.terminal_tables(found, console.width):
                    console.print(each)
                cells += found
    results = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cells": [asdict(cell) for cell in cells],
    }
    if options.plots and options.full:
        for path in plots.models(cells, options.plots):
            console.print(f"wrote {path}")
    elif options.plots:
        found = [measure_cliff(CLIFF_GEOMETRY, engine, CLIFF_LENGTHS) for engine in engines]
        results["cliffs"] = [asdict(each) for each in found]
        for path in plots.hit_rates(cells, options.plots) + plots.cliffs(found, options.plots):
            console.print(f"wrote {path}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if page:
        tables = table.cells_behind(cells) if options.full else table.markdown(cells)
        text = f"{page[0]}\n{tables}{page[1]}"
        options.markdown.write_text(text, encoding="utf-8")


def chosen_engines(options: argparse.Namespace, console: Console) -> Sequence[str]:
    """Return those that are asked for and installed; says which are not."""
    names = options.engines or list(ENGINES)
    missing = [name for name in names if not ENGINES[name].installed]
    if missing and options.markdown:
        raise ValueError(
            f"{options.markdown} would lose its rows of {', '.join(missing)}, for which "
            f"{ENGINES[missing[0]].module} is not installed: install it, name the engines that are "
            "to be in the page with --engines, or leave --markdown out"
        )
    for name in missing:
        console.print(f"left out: {name} ({ENGINES[name].module} is not installed)")
    installed = [name for name in names if name not in missing]
    if not installed:
        raise ValueError("none of the engines is installed: name another one with --engines")
    return installed


def sources(
    options: argparse.Namespace, trace: list[Request]
) -> Iterator[tuple[str, list[Request], Sequence[float]]]:
    """Name, requests and budgets in GB of all that is to be replayed."""
    for name in options.workloads or ([] if options.trace and not options.full else WORKLOADS):
        workload = WORKLOADS[name]
        limit = {} if options.limit is None else {"limit": options.limit}
        requests = list(workload.generate(**limit))
        yield name, requests, options.budgets or workload.budgets_gb
    if options.trace:
        yield options.trace.stem, trace, options.budgets or TRACE_BUDGETS_GB


if __name__ == "__main__":
    main()
