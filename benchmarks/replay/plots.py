"""`python -m benchmarks.replay.plots` draws the results in benchmarks/results anew (matplotlib)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plots import FOLDER, OURS, REST, RESULTS, ROOT, chart, drawn
from benchmarks.replay.sweep import Cell, Cliff
from benchmarks.replay.table import by, is_rival, skipped

STYLES = {
    "ours": (OURS, "-", 2.4),
    "ours-int8": (OURS, "--", 2.0),
    "vllm": ("#d4762c", "-", 1.6),
    "sglang": ("#e05c8a", "-", 1.6),
    "mcore": ("#a475f9", "-", 1.6),
    "marconi": ("#3b82c4", "-", 1.6),
}
"""Colour, dashes and width of the engines that are drawn. More lines hide one another; the results
have all engines."""
BEST = "best other"


def hit_rates(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Prompt tokens skipped over the memory budget: per geometry and number in flight one plot,
    with a panel for each workload."""
    paths = []
    for (geometry, in_flight), group in by(cells, "geometry", "in_flight").items():
        panels = by(group, "workload")

        def draw(plt, faint: str, panels=panels, geometry=geometry, in_flight=in_flight):
            columns = min(3, len(panels))
            rows = -(-len(panels) // columns)
            size = (2.5 * columns, 2.4 * rows)
            figure, axes = plt.subplots(
                rows, columns, figsize=size, squeeze=False, layout="constrained"
            )
            for axis, ((workload,), panel) in zip(axes.flat, panels.items()):
                points = {engine: _points(panel, engine) for engine in STYLES}
                _panel(axis, {engine: row for engine, row in points.items() if row})
                axis.set_title(workload)
                axis.set_xlabel("cache, GB")
                axis.set_ylabel("% of prompt tokens")
            for axis in axes.flat[len(panels) :]:
                axis.set_visible(False)
            _legend(figure, axes)
            figure.suptitle(f"Prompt tokens skipped, {geometry}, {in_flight} in flight")
            return figure

        paths.append(drawn(f"replay_{geometry}_{in_flight}_in_flight", draw, folder))
    return paths


def models(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """The same of many models: per number in flight one plot, with a row for each workload and a
    column for each model; ours, and the best of the others at each budget."""
    paths = []
    for (in_flight,), group in by(cells, "in_flight").items():
        panels = by(group, "workload", "geometry")
        workloads, geometries = (list(dict.fromkeys(names)) for names in zip(*panels))

        def draw(plt, faint: str, panels=panels, rows=workloads, columns=geometries, n=in_flight):
            size = (1.5 * len(columns), 1.3 * len(rows) + 1)
            figure, axes = plt.subplots(
                len(rows),
                len(columns),
                figsize=size,
                squeeze=False,
                sharey=True,
                layout="constrained",
            )
            for (workload, geometry), panel in panels.items():
                axis = axes[rows.index(workload), columns.index(geometry)]
                best = {
                    budget: max(map(skipped, rivals))
                    for (budget,), at in by(panel, "budget_gb").items()
                    if (rivals := [cell for cell in at if is_rival(cell)])
                }
                ours = {engine: _points(panel, engine) for engine in ("ours", "ours-int8")}
                _panel(axis, {BEST: best, **{name: row for name, row in ours.items() if row}})
            for axis, geometry in zip(axes[0], columns, strict=True):
                axis.set_title(geometry, fontsize=9)
            for axis, workload in zip(axes[:, 0], rows, strict=True):
                axis.set_ylabel(workload)
            _legend(figure, axes)
            figure.suptitle(f"% of prompt tokens skipped over GB of cache, {n} in flight")
            return figure

        paths.append(drawn(f"replay_models_{in_flight}_in_flight", draw, folder))
    return paths


def _points(cells: Sequence[Cell], engine: str) -> dict[float, float]:
    return {c.budget_gb: c.skipped_percent for c in cells if c.engine == engine}


def _panel(axis, lines: dict[str, dict[float, float]]) -> None:
    for name, points in lines.items():
        colour, dashes, width = STYLES.get(name, (REST, "-", 1.6))
        xs = sorted(points)
        ys = [points[x] for x in xs]
        axis.plot(xs, ys, linestyle=dashes, color=colour, lw=width, marker=".", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(xs, [f"{budget:g}" for budget in xs])
    axis.minorticks_off()
    axis.set_ylim(0, 100)
    axis.grid(visible=True)


def _legend(figure, axes) -> None:
    lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    place = {"loc": "outside lower center", "ncols": len(lines), "fontsize": 9}
    figure.legend(lines.values(), lines.keys(), **place)


def cliffs(found: Sequence[Cliff], folder: Path) -> list[Path]:
    """Tokens computed again over length, one plot per geometry."""
    paths = []
    for (geometry,), group in by(found, "geometry").items():

        def draw(plt, faint: str, group=group, geometry=geometry):
            figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.6), layout="constrained")
            for cliff in group:
                if cliff.engine not in STYLES:
                    continue
                colour, dashes, width = STYLES[cliff.engine]
                for axis, values in zip(axes, (cliff.repeated, cliff.forked), strict=True):
                    style = {"linestyle": dashes, "color": colour, "lw": width}
                    axis.plot(cliff.lengths, values, label=cliff.engine, **style)
            axes[0].set_title("the same prompt again")
            axes[0].set_xlabel("prompt tokens")
            axes[0].set_ylabel("tokens computed the second time")
            axes[1].set_title("a first fork after a shared prefix")
            axes[1].set_xlabel("shared tokens")
            axes[1].set_ylabel("shared tokens computed again")
            for axis in axes:
                axis.grid(visible=True)
            axes[0].legend(fontsize=9)
            figure.suptitle(geometry)
            return figure

        paths.append(drawn(f"replay_cliff_{geometry}", draw, folder))
    return paths


def main() -> None:
    """Draw all that the replay measured."""

    def read(name: str) -> dict:
        return json.loads((RESULTS / name).read_text(encoding="utf-8"))

    replay, five = read("replay.json"), read("replay_models.json")
    paths = [chart(replay["cells"])]
    paths += hit_rates([Cell(**cell) for cell in replay["cells"]], FOLDER)
    paths += cliffs([Cliff(**cliff) for cliff in replay["cliffs"]], FOLDER)
    paths += models([Cell(**cell) for cell in five["cells"]], FOLDER)
    for path in paths:
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
