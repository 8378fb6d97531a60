"""Plots of docs/plots, for light and dark pages, and the chart of README.md. Words stay text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.drawings.svg import dark_style

ROOT = Path(__file__).parents[1]
RESULTS, FOLDER = ROOT / "benchmarks" / "results", ROOT / "docs" / "plots"
COLOURS = (
    ("#ffffff", "#1e2129"),
    ("#1f2328", "#e6edf3"),
    ("#656d76", "#9198a1"),
)
"""Paper, ink, and what is fainter, each on light and on dark pages."""
OURS, INT8, REST = "#2da44e", "#1f883d", "#8c959f"
ROWS = (
    ("short prompts, a cache of 1 GB", "short-classify", 1),
    ("chats, a cache of 4 GB", "chat", 4),
    ("agents, a cache of 16 GB", "agent", 16),
    ("questions to documents, a cache of 8 GB", "rag-fork", 8),
)
"""What it is called, workload, size of the cache."""
BARS = (
    ("vLLM 0.33", ("vllm", "vllm-fine", "vllm-junctions"), "#afb8c1"),
    ("SGLang's rule", ("sglang",), "#9aa2ab"),
    ("megatron-core 0.19", ("mcore",), "#8c959f"),
    ("Marconi", ("marconi",), "#6e7781"),
    ("megatron_hybrid", ("ours",), OURS),
    ("the same, int8 states", ("ours-int8",), INT8),
    ("an infinite cache", ("ceiling",), "#b9a4e0"),
)
"""What it is called, engines of which the better one counts, colour."""


def pyplot():
    """Import matplotlib.pyplot, without a display."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots need matplotlib: `pip install matplotlib`") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def drawn(name: str, draw: Callable, folder: Path = FOLDER) -> Path:
    """The file of a plot. draw: `(matplotlib.pyplot, colour of the fainter words) -> figure`."""
    plt, path = pyplot(), folder / f"{name}.svg"
    (paper, _), (ink, _), (faint, _) = COLOURS
    parts = ("text", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {f"{part}.color" if part == "text" else part: ink for part in parts}
    style |= {"figure.facecolor": paper, "axes.facecolor": paper, "legend.labelcolor": ink}
    style |= {"svg.fonttype": "none", "svg.hashsalt": name, "grid.color": faint}
    style |= {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}
    style |= {"legend.frameon": False, "grid.alpha": 0.3}
    with plt.rc_context(style):
        figure = draw(plt, faint)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
    light = path.read_text(encoding="utf-8")
    path.write_text(light.replace("<defs>", dark_style(COLOURS) + "<defs>", 1), encoding="utf-8")
    return path


def skipped(cells: Sequence[dict], workload: str, gigabytes: int, engines: Sequence[str]) -> float:
    """Percent of the prompt tokens that the best of some engines skips, one request at a time. An
    infinite cache has no size."""
    return max(
        cell["skipped_percent"]
        for cell in cells
        if cell["workload"] == workload
        and cell["engine"] in engines
        and cell["in_flight"] == 1
        and cell["budget_gb"] in (gigabytes, None)
    )


def chart(cells: Sequence[dict], folder: Path = FOLDER) -> Path:
    """Bars of the skipped share, for each workload one of each engine: README.md's picture."""

    def draw(plt, faint: str):
        figure, axes = plt.subplots(
            len(ROWS), 1, figsize=(8, 8.2), sharex=True, layout="constrained"
        )
        for axis, (title, workload, gigabytes) in zip(axes, ROWS, strict=True):
            percents = [skipped(cells, workload, gigabytes, engines) for _, engines, _ in BARS]
            names, _, colours = zip(*BARS, strict=True)
            bars = axis.barh(names, percents, color=colours, height=0.8)
            axis.bar_label(bars, [f"{percent:.0f}" for percent in percents], padding=4, fontsize=9)
            axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
            axis.invert_yaxis()
            axis.set_xlim(0, 100)
            axis.xaxis.set_visible(False)
            axis.spines[:].set_visible(False)
            axis.tick_params(length=0, labelsize=9)
        figure.suptitle("Prompt tokens that need no computation, in %", fontweight="bold")
        note = "A replay of request traces in Nemotron-H-8B's sizes: no model runs."
        figure.supxlabel(note, fontsize=9, color=faint)
        return figure

    return drawn("skipped", draw, folder)
