"""The pages of the docs: links lead somewhere, words stay few, and the site has every page."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs_tools.reference import expand

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = sorted(DOCS.rglob("*.md"))
OTHERS = [
    path for part in ("", "examples/", "megatron_hybrid/**/") for path in ROOT.glob(f"{part}*.md")
]
PAGES = [*SITE, *OTHERS]
MOST_WORDS, MOST_WORDS_OF_A_PAGE = 15_000, 1_200
FRAGMENT = re.compile(r'^ *r?"""(As|At|Behind|Beside|Between|By|Of|That|To)\b.*', re.MULTILINE)


def without_code(text: str) -> str:
    """A page without its blocks of code, in which brackets and # mean something else."""
    return re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def read(page: Path) -> str:
    """A page, with its generated parts."""
    return expand(page.read_text(encoding="utf-8"))


def links(text: str) -> Iterator[str]:
    """Targets of links and pictures within the repository."""
    plain = re.sub(r"(`+).+?\1", "", without_code(text), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", plain):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """What headings are called in links. The site and GitHub number equal headings differently, so
    only the first of them counts."""
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_code(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        names.add(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return names


def broken_links(page: Path) -> list[str]:
    """Links of a page that lead nowhere, or from the site to what is not on it."""
    broken = []
    for link in links(read(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        found = target.exists() and (DOCS not in page.parents or DOCS in target.parents)
        # A picture's anchor says which colours it is for; that of a name is made by the site.
        if anchor and target.suffix == ".md" and not anchor.startswith("megatron_hybrid."):
            found = found and anchor in anchors(read(target))
        if not found:
            broken.append(link)
    return broken


def prose(text: str) -> list[str]:
    """Words outside of code, tables, headings, pictures and comments, of what is not generated."""
    text = re.sub(
        r"<!-- generated:[^\n]*|<!--.*?-->|!\[[^\]]*\]\([^)]*\)(\{[^}]*\})?|^:::([^\n]+\n)+",
        "",
        without_code(text),
        flags=re.S | re.M,
    )
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    lines = [line for line in text.split("\n") if not re.match(r"\s*(\||#|:::|<)", line)]
    return [word for word in " ".join(lines).split() if re.search(r"\w", word)]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_relative_links_lead_to_files_and_headings(page):
    assert broken_links(page) == []


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# One `two`: three\n\n## Twice\n\n## Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#one-two-three) [c](other.md#twice) [d](#here) "
        "[e](https://example.org/x) `[f](gone.md)`\n```\n# no-heading\n[g](gone.md)\n```\n"
        "[h](gone.md) [i](other.md#twice-1) ![j](gone.png) [k](#no-heading)\n"
    )
    assert broken_links(page) == ["gone.md", "other.md#twice-1", "gone.png", "#no-heading"]


def test_links_from_the_site_to_the_code_are_broken(monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "DOCS", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "code.py").write_text("")
    page = tmp_path / "docs" / "page.md"
    page.write_text("[a](../code.py) [b](page.md)\n")
    assert broken_links(page) == ["../code.py"]


def test_the_site_has_every_page_once():
    named = re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == {str(page.relative_to(DOCS)) for page in SITE}


def test_every_example_is_listed():
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    found = {path.name for path in (ROOT / "examples").iterdir()} - {"README.md", "__pycache__"}
    assert found and [name for name in sorted(found) if f"({name})" not in listed] == []


@pytest.mark.parametrize("page", SITE, ids=[str(page.relative_to(DOCS)) for page in SITE])
def test_a_page_begins_with_what_it_is_for_and_is_short(page):
    text = page.read_text(encoding="utf-8")
    head = re.match(r"# [^\n]+\n\n(\S.*?)(?:\n\n|\Z)", text, re.DOTALL)
    assert head and len(prose(head[1])) >= 5, "the first paragraph says what the reader can do"
    assert len(prose(text)) <= MOST_WORDS_OF_A_PAGE


def test_all_pages_together_are_short():
    assert sum(len(prose(page.read_text(encoding="utf-8"))) for page in SITE) <= MOST_WORDS


def test_words_of_prose_are_counted():
    page = "# A\n\nOne [two](x.md) `three`\n\n| b |\n```text\nc\n```\n<!-- d\ne -->![f](g.svg)\n"
    assert prose(page) == ["One", "two", "`three`"]


def test_a_generated_part_links_to_its_source_for_readers_of_a_clone():
    for page in SITE:
        text = page.read_text(encoding="utf-8")
        links = dict(re.findall(r"\[(\w+)\]\(((?:\.\./)+megatron_hybrid/[\w/]+\.py)\)", text))
        for name in re.findall(r"^(?:<!-- .*|:::) megatron_hybrid[\w.]*\.(\w+)", text, re.M):
            source = (page.parent / links[name]).read_text(encoding="utf-8")
            assert re.search(rf"^(class|def) {name}\b|^{name}\b.*=", source, re.MULTILINE), name


def test_tests_that_a_page_names_exist():
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    assert named and [name for name in named if f"def {name}(" not in tests] == []


def test_pages_that_the_code_names_exist():
    folders = ("megatron_hybrid", "benchmarks", "examples", "docs_tools")
    files = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*.py")]
    text = "".join(path.read_text() for path in (*files, ROOT / "Makefile", ROOT / "setup.py"))
    named = set(re.findall(r"(?<![\w/])docs/[\w/]+\.md\b", text))
    assert named and [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    for path in (ROOT / "megatron_hybrid").rglob("*.py"):
        found = FRAGMENT.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: say what it is that is meant: {found[0].strip()}"


def test_classes_and_constants_that_a_docstring_names_exist():
    """`Name`, if any code has it, and `module.NAME`, if the module's has it."""
    words: dict[str, set[str]] = {"": {"LLMEngine", "LRUPolicy"}}  # of vLLM, of an example
    docstrings = ""
    for path in (ROOT / "megatron_hybrid").rglob("*.py"):
        parts = re.split(r'"""(.*?)"""', path.read_text(encoding="utf-8"), flags=re.DOTALL)
        docstrings += "".join(parts[1::2])
        found = set(re.findall(r"\w+", " ".join(parts[::2])))
        words[path.stem] = words.get(path.stem, set()) | found
        words[""] |= found
    names = r"`(?:([a-z_]+)\.)?(?!\w+For[A-Z])([A-Z]\w*[a-z]\w*|[A-Z_]{4,})`"
    named = {pair for pair in re.findall(names, docstrings) if pair[0] not in ("nn", "torch")}
    assert named and {pair for pair in named if pair[1] not in words.get(pair[0], ())} == set()
