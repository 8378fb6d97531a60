"""Writes all drawings, each in light and in dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.drawings import cache, engine

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"
DRAWINGS: dict[str, Callable[[str], str]] = {
    "idea": cache.idea,
    "tree": cache.tree,
    "pages": cache.pages,
    "request": engine.request,
    "layers": engine.layers,
    "ranks": engine.ranks,
}
"""File name -> function of "light" or "dark"."""


def files() -> dict[str, str]:
    """File name -> content, of each drawing in light and in dark."""
    suffixes = {"light": "", "dark": "-dark"}
    return {
        f"{name}{suffix}.svg": draw(shade)
        for name, draw in DRAWINGS.items()
        for shade, suffix in suffixes.items()
    }


if __name__ == "__main__":
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
