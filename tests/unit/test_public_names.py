"""`import megatron_hybrid`: the names it offers, and what it does not wait for."""

import ast
from importlib import import_module
from pathlib import Path

import pytest
from commands import run_python

import megatron_hybrid


def names_for_type_checkers() -> dict[str, str]:
    """Name -> module, of the imports that only a type checker or an editor runs."""
    body = ast.parse(Path(megatron_hybrid.__file__).read_text()).body
    (block,) = [node for node in body if isinstance(node, ast.If)]
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_type_checkers_see_the_names_that_are_there():
    known = names_for_type_checkers()
    assert {*known, "__version__"} == set(megatron_hybrid.__all__)
    assert set(megatron_hybrid.__all__) <= set(dir(megatron_hybrid))
    for name, module in known.items():
        assert getattr(megatron_hybrid, name) is getattr(import_module(module), name)


def test_an_unknown_name_cannot_be_imported():
    with pytest.raises(ImportError, match="cannot import name 'Engine'"):
        exec("from megatron_hybrid import Engine")


@pytest.mark.parametrize(
    "script",
    [
        "import megatron_hybrid; dir(megatron_hybrid)",
        "from megatron_hybrid import MissReason",
        "from megatron_hybrid.cli import build_parser; build_parser().format_help()",
    ],
)
def test_starts_without_torch_and_megatron_core(script):
    loaded = "[name for name in ('torch', 'megatron', 'rich', 'tokenizers') if name in sys.modules]"
    result = run_python(f"import sys; {script}; print({loaded})", check=True)
    assert result.stdout == "[]\n"


def test_a_missing_megatron_core_is_explained_wherever_it_is_first_needed():
    script = """
import importlib, sys
sys.modules["megatron.core"] = None
names = "models.mixers.base", "inference.engine", "distributed.ranks", "checkpoints.checkpoint"
for name in names:
    try:
        importlib.import_module(f"megatron_hybrid.{name}")
    except ImportError as error:
        print(str(error).split(",")[0])
"""
    result = run_python(script, check=True)
    assert result.stdout == "megatron_hybrid is built on megatron-core\n" * 4
