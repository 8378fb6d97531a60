"""The chart of README.md: `python -m benchmarks.pictures` writes it into docs/.

It is made from `benchmarks/results/replay.json`, which `make bench-replay` measures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 760
FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, FAINT, GREEN, GREY = "#1f2328", "#656d76", "#2da44e", "#afb8c1"
BOLD = "font-weight='bold'"
ROWS = (
    ("short prompts, a cache of 1 GB", "short-classify", 1),
    ("chats, a cache of 4 GB", "chat", 4),
    ("agents, a cache of 16 GB", "agent", 16),
    ("questions to documents, a cache of 8 GB", "rag-fork", 8),
)
"""What it is called, workload, size of the cache."""
BARS = (
    ("vLLM 0.33", ("vllm", "vllm-fine"), GREY),
    ("megatron-core 0.19", ("mcore",), "#8c959f"),
    ("Marconi", ("marconi",), "#6e7781"),
    ("megatron_hybrid", ("ours",), GREEN),
    ("the same, int8 states", ("ours-int8",), "#1a7f37"),
    ("an infinite cache", ("ceiling",), "#d0d7de"),
)
"""What it is called, engines of which the better one counts, colour."""


def text(x: float, y: float, words: str, size: int = 13, colour: str = INK, more: str = "") -> str:
    """A line of text with its baseline at y."""
    return f"<text x='{x}' y='{y}' font-size='{size}' fill='{colour}' {FONT} {more}>{words}</text>"


def box(x: float, y: float, width: float, height: float, colour: str, more: str = "") -> str:
    """A filled rectangle."""
    size = f"width='{width:.1f}' height='{height}'"
    return f"<rect x='{x:.1f}' y='{y}' {size} fill='{colour}' rx='2' {more}/>"


def picture(title: str, height: int, parts: Sequence[str]) -> str:
    """An SVG file on white, so that it can be read on a dark page, too."""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img'>"
    lines = [head, f"<title>{title}</title>", box(0, 0, WIDTH, height, "#ffffff"), *parts]
    return "\n".join([*lines, "</svg>\n"])


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


def chart(cells: Sequence[dict]) -> str:
    """Bars of the skipped share, for each workload one of each engine."""
    left, right, height = 218, 700, 16
    parts = [
        text(16, 26, "Prompt tokens that need no computation, in %", 15, more=BOLD),
        text(
            16, 46, "A replay of request traces in Nemotron-H-8B's sizes: no model runs.", 12, FAINT
        ),
    ]
    y = 66
    for name, workload, gigabytes in ROWS:
        parts.append(text(16, y + 13, name, 13, more=BOLD))
        for what, engines, colour in BARS:
            percent = skipped(cells, workload, gigabytes, engines)
            is_own = "ours" in engines[0]
            parts.append(
                text(left - 8, y + 29, what, 12, INK if is_own else FAINT, "text-anchor='end'")
            )
            width = (right - left) * percent / 100
            parts.append(box(left, y + 18, width, height - 3, colour))
            parts.append(text(round(left + width + 6, 1), y + 29, f"{percent:.0f}", 12))
            y += height
        y += 32
    return picture("Share of prompt tokens that need no computation", y, parts)


def main() -> None:
    """Write it."""
    replay = ROOT / "benchmarks" / "results" / "replay.json"
    cells = json.loads(replay.read_text(encoding="utf-8"))["cells"]
    (ROOT / "docs" / "skipped.svg").write_text(chart(cells), encoding="utf-8")


if __name__ == "__main__":
    main()
