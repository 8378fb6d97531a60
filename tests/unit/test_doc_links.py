"""Relative links and anchors of README.md and the docs lead to what exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("megatron_hybrid/**/*.md")]


def without_code(text: str) -> str:
    """A page without its blocks of code, in which brackets and # mean something else."""
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """Targets of links and pictures within the repository."""
    plain = re.sub(r"(`+).+?\1", "", without_code(text), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", plain):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """What headings are called in links, by GitHub's rule."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_code(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = found[name] = found.get(name, -1) + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def broken_links(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    text, broken = page.read_text(encoding="utf-8"), []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        found = target.exists()
        if found and anchor:
            found = anchor in anchors(target.read_text(encoding="utf-8"))
        if not found:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_relative_links_lead_to_files_and_headings(page):
    assert broken_links(page) == []


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# One `two`: three\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#one-two-three) [c](other.md#twice-1) [d](#here) "
        "[e](https://example.org/x) `[f](gone.md)`\n```\n# no-heading\n[g](gone.md)\n```\n"
        "[h](gone.md) [i](other.md#twice-2) ![j](gone.png) [k](#no-heading)\n"
    )
    assert broken_links(page) == ["gone.md", "other.md#twice-2", "gone.png", "#no-heading"]


def test_tests_that_a_page_names_exist():
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named and [name for name in named if f"def {name}(" not in tests] == []
