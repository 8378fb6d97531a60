"""docs/how/code.md names every file of the package and the tests of every invariant."""

import re
from pathlib import Path

import megatron_hybrid

PACKAGE = Path(megatron_hybrid.__file__).parent
TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "how" / "code.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_every_file_has_a_place_in_the_map():
    """Of folders whose files are all of a kind, such as mixers, the folder."""
    told: dict[str, set[str]] = {}
    for folder, names in re.findall(
        r"^\| (?:`(.+?)/`|the top) \| .* \| (.*) \|$", section("Where a thing lives"), re.MULTILINE
    ):
        told.setdefault(folder, set()).update(re.findall(r"`(\w+)`", names))
    for folder, names in told.items():
        entries = [path for path in (PACKAGE / folder).iterdir() if path.suffix in ("", ".py")]
        found = {path.stem for path in entries} - {"__init__", "__pycache__"}
        found -= {other.rpartition("/")[2] for other in told if other.rpartition("/")[0] == folder}
        assert names == found, folder
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders <= told.keys()


def test_every_invariant_names_its_tests():
    told = {
        (number, name)
        for number, names in re.findall(r"^\| (\d) \|.*\| (.*) \|$", section("Invariants"), re.M)
        for name in re.findall(r"`(.+?)`", names)
    }
    found = {
        (number, str(path.relative_to(TESTS)))
        for path in TESTS.glob("**/test_*.py")
        for number in re.findall(r"def test_invariant_(\d)_", path.read_text(encoding="utf-8"))
    }
    assert told == found and {number for number, _ in told} == set("123456789")


OF_THE_WHOLE = {
    "code_map",
    "docs",
    "imports",
    "lines",
    "packaging",
    "process_state",
    "public_names",
}
"""Unit tests of no module alone, at the top."""


def test_every_unit_test_has_the_place_and_name_of_its_module():
    """`test_engine_bits.py` of `engine.py` or `engine/`; the folder's own name may come first."""
    roots = {"benchmarks": PACKAGE.parent, "docs_tools": PACKAGE.parent}
    for path in (TESTS / "unit").rglob("test_*.py"):
        place = path.parent.relative_to(TESTS / "unit")
        folder = roots.get(place.parts[0] if place.parts else "", PACKAGE) / place
        name = path.stem.removeprefix("test_")
        allowed = {entry.stem for entry in folder.iterdir()} | {folder.name}
        assert any(name == module or name.startswith(f"{module}_") for module in allowed) or (
            folder == PACKAGE and name in OF_THE_WHOLE
        ), path
