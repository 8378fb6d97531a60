"""Writes all drawings."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.drawings import cache, engine

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"
DRAWINGS: dict[str, Callable[[], str]] = {
    "idea": cache.idea,
    "tree": cache.tree,
    "pages": cache.pages,
    "request": engine.request,
    "layers": engine.layers,
    "ranks": engine.ranks,
}
"""File name -> function that draws it."""


def files() -> dict[str, str]:
    """File name -> content, of each drawing."""
    return {f"{name}.svg": draw() for name, draw in DRAWINGS.items()}


if __name__ == "__main__":
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
