"""Reads classes and tables from the package's source, without importing it: torch and megatron-core
are not where the site is built."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LIMITS = {
    "ge": "{} or more",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "min_length": "length {} or more",
    "max_length": "length at most {}",
}


@dataclass(frozen=True)
class Field:
    """One field of a class. name: as callers write it; default: source text, None: the field is
    needed."""

    name: str
    type: str
    default: str | None
    about: str


@dataclass(frozen=True)
class Class:
    """One class: its docstring, the dotted names of its bases that are in the package, and the
    fields that it declares itself."""

    about: str
    bases: tuple[str, ...]
    fields: tuple[Field, ...]


@cache
def module(name: str) -> ast.Module:
    """The syntax tree of a module of the package."""
    path = ROOT.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def table(module_name: str, name: str) -> dict:
    """The value of a module's constant that is written as a literal."""
    return ast.literal_eval(_assigned(module_name)[name])


def read_class(dotted: str) -> Class:
    """A class by its dotted name.

    Raises:
        LookupError: the module has no such class.
    """
    module_name, _, name = dotted.rpartition(".")
    tree = module(module_name)
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    if not found:
        raise LookupError(f"{module_name} has no class {name}: mend the name in the page")
    (node,) = found
    home = _imported(module_name)
    bases = (base.id for base in node.bases if isinstance(base, ast.Name))
    known = tuple(home[base] for base in bases if home.get(base, "").startswith("megatron_hybrid."))
    return Class(ast.get_docstring(node) or "", known, tuple(_fields(module_name, node)))


def _fields(module_name: str, node: ast.ClassDef) -> Iterator[Field]:
    for each, after in zip(node.body, [*node.body[1:], None]):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(each.annotation):
            continue
        about = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            about = " ".join(str(after.value.value).split())
        name, default = each.target.id, each.value
        if isinstance(default, ast.Call) and getattr(default.func, "id", "") == "declared":
            of, *more = map(ast.literal_eval, default.args)
            about = " ".join([_sentences()[of], *more])
            default = next((word.value for word in default.keywords), ast.Constant(None))
        if isinstance(default, ast.Call) and getattr(default.func, "id", "") in ("field", "Field"):
            keywords = {word.arg: word.value for word in default.keywords}
            name = ast.literal_eval(keywords["alias"]) if "alias" in keywords else name
            factory = keywords.get("default_factory")
            default = next(iter(default.args), factory)
            if isinstance(default, ast.Lambda):
                default = default.body
            elif isinstance(default, ast.Name):  # a class: of a list, or of fields by name
                default = ast.parse("[]" if default.id == "list" else "{}", mode="eval").body
        text = None if default is None else ast.unparse(default)
        yield Field(name, shown_type(module_name, each.annotation), text, about)


@cache
def _sentences() -> dict[str, str]:
    """Sentences of what `declared` fields of HTTP set in the engine."""
    options = "requests.options.RequestOptions", "sampling_params.SamplingParams"
    classes = (read_class(f"megatron_hybrid.inference.{name}") for name in options)
    return {field.name: field.about for each in classes for field in each.fields}


def shown_type(module_name: str, node: ast.expr) -> str:
    """An annotation with the module's own names spelled out: `int (1 or more)`."""
    if isinstance(node, ast.Name):
        own = _assigned(module_name).get(node.id)
        if own is None and (origin := _imported(module_name).get(node.id, "")):
            module_name, _, name = origin.rpartition(".")
            is_ours = module_name.startswith("megatron_hybrid.")
            own = _assigned(module_name).get(name) if is_ours else None
        return node.id if own is None else shown_type(module_name, own)
    if isinstance(node, ast.BinOp):
        return f"{shown_type(module_name, node.left)} | {shown_type(module_name, node.right)}"
    if isinstance(node, ast.Subscript):
        name, inner = ast.unparse(node.value), node.slice
        if name == "Annotated":
            kind, *marks = inner.elts
            limits = [limit for mark in marks for limit in _limits(mark)]
            shown = shown_type(module_name, kind)
            return f"{shown} ({', '.join(limits)})" if limits else shown
        if name == "Literal":
            values = inner
            if isinstance(inner, ast.Name):
                values = _assigned(module_name)[inner.id]
            return " | ".join(ast.unparse(value) for value in getattr(values, "elts", [values]))
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        return f"{name}[{', '.join(shown_type(module_name, part) for part in parts)}]"
    return ast.unparse(node)


def _limits(mark: ast.expr) -> Iterator[str]:
    if isinstance(mark, ast.Call) and getattr(mark.func, "id", "") in ("Field", "Range"):
        for word in mark.keywords:
            if word.arg in _LIMITS:
                yield _LIMITS[word.arg].format(_number(word.value))


def _number(node: ast.expr) -> str:
    """A bound as text: `1 << 64` is 2^64."""
    return re.sub(r"\(?1 << (\d+)\)?", r"2^\1", ast.unparse(node))


@cache
def _assigned(module_name: str) -> dict[str, ast.expr]:
    """Name -> value, of the module's own assignments."""
    found: dict[str, ast.expr] = {}
    for node in module(module_name).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node.value
    return found


@cache
def _imported(module_name: str) -> dict[str, str]:
    """Name -> dotted name, of the module's imports and its own classes."""
    found: dict[str, str] = {}
    for node in module(module_name).body:
        if isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.ClassDef):
            found[node.name] = f"{module_name}.{node.name}"
    return found
