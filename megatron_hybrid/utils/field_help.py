"""Sentences and defaults of a class's fields, read from its source, as a command's help must not
wait for torch."""

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hybrid.utils.validation import LARGEST_INT, WHOLE, Range

_KINDS = {"int": int, "float": float}
_PACKAGE = Path(__file__).parents[1]


class FieldHelp(NamedTuple):
    """The help of one field."""

    sentence: str
    default: Any
    """The default, or None if there is none or it is not a literal."""
    kind: type | None
    """int or float, or None for fields that are no number, or not a number alone."""
    limits: Range
    """Limits of a number, and none of another field."""

    @property
    def wanted(self) -> str:
        """What a number must be, in words, and an empty text for another field."""
        words = {int: "a whole number", float: "a number"}.get(self.kind)
        return f"{words} {self.limits}".strip() if words else ""


@cache
def fields_help(dotted: str) -> dict[str, FieldHelp]:
    """Return the fields that a class declares, by name.

    dotted: the class, such as `megatron_hybrid.inference.config.InferenceConfig`.
    """
    module, _, class_name = dotted.rpartition(".")
    tree = _source_of(module)
    (body,) = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    found = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            sentence = " ".join(ast.literal_eval(after.value).split())
            default = node.value.value if isinstance(node.value, ast.Constant) else None
            found[node.target.id] = FieldHelp(sentence, default, *_number(node.annotation, module))
    return found


@cache
def _source_of(module: str) -> ast.Module:
    path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _number(annotation: ast.expr, module: str) -> tuple[type | None, Range]:
    """Return the kind and the limits of an annotated number; follow names to other modules."""
    match annotation:
        case ast.BinOp(left=left, right=ast.Constant(None)):
            return _number(left, module)
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([kind, ast.Call(keywords=given)])):
            if not (number := _number(kind, module)[0]):
                return None, Range()
            limits = {str(each.arg): eval(ast.unparse(each.value)) for each in given}
            shown = {name: limit for name, limit in limits.items() if abs(limit) <= LARGEST_INT}
            return number, Range(**shown)
        case ast.Name(name) if name in _KINDS:
            return _KINDS[name], Range(ge=WHOLE.ge) if name == "int" else Range()
        case ast.Name(name):
            for node in _source_of(module).body:
                match node:
                    case ast.Assign([ast.Name(target)]) if target == name:
                        return _number(node.value, module)
                    case ast.ImportFrom(str(source)) if source.startswith(f"{_PACKAGE.name}."):
                        if any(name == each.name for each in node.names):
                            return _number(annotation, source)
    return None, Range()
