"""The package's imports run one way, without a circle. Those inside of functions count, too."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import megatron_hybrid

ROOT = Path(megatron_hybrid.__file__).parent

FOUNDATION = {"compat": (), "utils": (), "version": (), "distributed": ("compat", "utils")}
"""What everybody may import -> what it may import."""

BELOW = {
    "cache": set(),
    "offload": {"cache"},
    "ops": set(),
    "models": {"ops"},
    "text": set(),
    "checkpoints": {"text", "models", "ops"},
    "inference": {"offload", "cache", "checkpoints", "text", "models", "ops"},
}
"""Wing -> the wings that it may import."""

DOORS = {
    "serving": set(),
    "training": set(),
    "megatron": {"serving"},
    "tools": set(),
    "commands": {"serving", "tools", "training"},
    "cli": {"commands"},
    "__main__": {"cli"},
    "dynamo": {"cli", "commands", "serving"},
}
"""What users come in by -> the other doors that it may import, in addition to every wing. `dynamo`
is a program of its own, as it needs Dynamo before it can read its options."""

MOST_FILES, MOST_METHODS = 20, 40
OF_A_KIND = {"checkpoints/huggingface", "models/mixers", "serving/parsers"}
"""Folders with one file for each thing of a kind, which may have more."""


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted name without the package's own -> file; the package itself is "__init__"."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def imported_names(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, of modules and of what is in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import, which this test cannot follow"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_imports(root: Path, package: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Module -> modules of the package that it imports, and -> top names of other packages."""
    modules = modules_of(root)
    inside: dict[str, set[str]] = {name: set() for name in modules}
    outside: dict[str, set[str]] = {name: set() for name in modules}
    for module, path in modules.items():
        for name in imported_names(path):
            top, _, rest = name.partition(".")
            if top != package:
                outside[module].add(top)
                continue
            while rest and rest not in modules:  # a name in a module
                rest = rest.rpartition(".")[0]
            inside[module].add(rest or "__init__")
    return inside, outside


@pytest.fixture(scope="module")
def imports() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Those of the package; read once, and not where these tests are only collected."""
    return read_imports(ROOT, "megatron_hybrid")


def wing(module: str) -> str:
    return module.partition(".")[0]


def may_import(importer: str, imported: str) -> bool:
    if importer == imported or importer == "__init__":
        return True
    if imported in FOUNDATION:
        return importer not in FOUNDATION or imported in FOUNDATION[importer]
    if importer in DOORS:
        return imported in BELOW or imported in DOORS[importer]
    return imported in BELOW.get(importer, ())


def first_circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_every_module_has_a_place_in_the_order(imports):
    inside, _ = imports
    assert {wing(name) for name in inside} <= {"__init__", *FOUNDATION, *BELOW, *DOORS}


def test_imports_run_one_way(imports):
    inside, _ = imports
    upward = {
        (module, imported)
        for module, names in inside.items()
        for imported in names
        if not may_import(wing(module), wing(imported))
    }
    assert upward == set()


def test_there_is_no_circle(imports):
    inside, _ = imports
    assert first_circle(inside) == []


def test_there_is_no_circle_of_rooms(imports):
    """Rooms are the folders inside of wings."""
    inside, _ = imports
    rooms = {
        name: ".".join(path.relative_to(ROOT).parts[:-1][:2])
        for name, path in modules_of(ROOT).items()
    }
    graph: dict[str, set[str]] = {}
    for module, names in inside.items():
        graph.setdefault(rooms[module], set()).update(rooms[name] for name in names)
    graph = {room: others - {room} for room, others in graph.items() if "." in room}
    assert first_circle(graph) == []


def test_the_map_of_the_code_has_this_order():
    page = (ROOT.parent / "docs" / "how" / "code.md").read_text(encoding="utf-8")
    imports = page.partition("## Imports")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", imports, re.MULTILINE)
    told = {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows}
    assert told == BELOW | {name: DOORS[name] for name in DOORS.keys() - {"__main__"}}
    assert {name for name, others in rows if "the seven above" in others} == told.keys() - BELOW
    assert len(BELOW) == 7


def test_a_folder_has_few_files():
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in ROOT.rglob("*.py"))
    assert {name for name, count in counts.items() if count > MOST_FILES} <= OF_A_KIND


def test_a_class_has_few_methods():
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    counts = {
        f"{path.relative_to(ROOT)}: {node.name}": sum(
            isinstance(each, functions) for each in node.body
        )
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in counts.items() if count > MOST_METHODS} == {}


def test_the_wings_below_import_each_other_in_one_direction():
    assert first_circle(BELOW) == []


def test_the_cache_needs_numpy_and_the_standard_library_alone(imports):
    inside, outside = imports
    reached, waiting = set(), [name for name in inside if wing(name) == "cache"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += inside[module]
    needed = {name for module in reached for name in outside[module]}
    assert needed - sys.stdlib_module_names == {"numpy"}


def test_megatron_core_comes_in_by_compat(imports):
    """Both wings that use it import compat, which explains what is missing, before all else; but
    for its kernels, which only a backend imports when it runs."""
    inside, outside = imports
    importers = {module for module, names in outside.items() if "megatron" in names}
    importers = {module for module in importers if not module.endswith(".mcore")}
    assert {wing(name) for name in importers} == {"compat", "models", "training"}
    assert "compat" in inside["models"] and "compat" in inside["training"]


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"a": "from p import b", "b": "def f():\n    from p.a import g"}, True),
        ({"a": "import p.w.b", "w/b": "from p.a import f"}, True),
        ({"a": "from p import b\nfrom p.b import f", "b": "import os.path"}, False),
    ],
)
def test_circles_are_found(files, circle, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    inside, _ = read_imports(tmp_path, "p")
    found = first_circle(inside)
    assert bool(found) == circle
    assert all(a in inside[b] or b in inside[a] for a, b in pairwise(found))
