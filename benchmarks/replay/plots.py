"""PNG plots of the results (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay.cliff import Cliff
from benchmarks.replay.sweep import Cell
from megatron_hybrid.tools.plots import pyplot

STYLES = {
    "ours": ("C0", "-", 2.4),
    "ours-int8": ("C0", "--", 2.0),
    "vllm": ("C1", "-", 1.6),
    "mcore": ("C2", "-", 1.6),
    "marconi": ("C3", "-", 1.6),
}
"""Colour, dashes and width of the engines that are drawn. More lines hide one another; the tables
have all engines."""


def hit_rates(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """Prompt tokens skipped over the memory budget: per geometry and number in flight one file,
    with a panel for each workload."""
    plt = pyplot("--plots")
    pictures: dict[tuple[str, int], dict[str, list[Cell]]] = {}
    for cell in cells:
        panels = pictures.setdefault((cell.geometry, cell.in_flight), {})
        panels.setdefault(cell.workload, []).append(cell)
    paths = []
    for (geometry, in_flight), panels in pictures.items():
        columns = min(4, len(panels))
        rows = -(-len(panels) // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(4.4 * columns, 3.6 * rows), squeeze=False, layout="constrained"
        )
        for axis, (workload, panel) in zip(axes.flat, panels.items()):
            _hit_rate_panel(axis, panel)
            axis.set_title(workload)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        lines = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
        # As wide as the panels.
        place = {"loc": "outside lower center", "ncols": 2 * columns, "fontsize": 8}
        figure.legend(lines.values(), lines.keys(), **place)
        figure.suptitle(f"Prompt tokens skipped, {geometry}, {in_flight} in flight")
        paths.append(folder / f"replay_{geometry}_{in_flight}_in_flight.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


def _hit_rate_panel(axis, cells: list[Cell]) -> None:
    budgets = sorted({cell.budget_gb for cell in cells if cell.budget_gb is not None})
    for engine, (color, dashes, width) in STYLES.items():
        points = {c.budget_gb: c.skipped_percent for c in cells if c.engine == engine}
        if not points:
            continue
        if None in points:
            points = dict.fromkeys(budgets, points[None])
        xs = sorted(points)
        ys = [points[x] for x in xs]
        axis.plot(xs, ys, linestyle=dashes, color=color, lw=width, marker=".", label=engine)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axis.set_xlabel("cache, GB")
    axis.set_ylabel("% of prompt tokens")
    axis.set_ylim(0, 100)
    axis.grid(alpha=0.3)


def cliffs(found: Sequence[Cliff], folder: Path) -> list[Path]:
    """Tokens computed again over length, one file per geometry."""
    plt = pyplot("--plots")
    paths = []
    for geometry in dict.fromkeys(cliff.geometry for cliff in found):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for cliff in found:
            if cliff.geometry != geometry or cliff.engine not in STYLES:
                continue
            color, dashes, width = STYLES[cliff.engine]
            for axis, values in zip(axes, (cliff.repeated, cliff.forked)):
                style = {"linestyle": dashes, "color": color, "lw": width}
                axis.plot(cliff.lengths, values, label=cliff.engine, **style)
        axes[0].set_title("the same prompt again")
        axes[0].set_xlabel("prompt tokens")
        axes[0].set_ylabel("tokens computed the second time")
        axes[1].set_title("a first fork after a shared prefix")
        axes[1].set_xlabel("shared tokens")
        axes[1].set_ylabel("shared tokens computed again")
        for axis in axes:
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)
        figure.suptitle(geometry)
        paths.append(folder / f"replay_cliff_{geometry}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths
