"""Sentences and defaults of a class's fields, read from its source: a command's help must not wait
for torch."""

import ast
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGE = Path(__file__).parents[1]


class FieldHelp(NamedTuple):
    """What a reader is told of one field."""

    sentence: str
    default: Any
    """None: it is no literal, or there is none."""


@cache
def fields_help(dotted: str) -> dict[str, FieldHelp]:
    """Return the fields that a class declares, by name.

    dotted: the class, such as `megatron_hybrid.inference.config.InferenceConfig`.
    """
    module, _, class_name = dotted.rpartition(".")
    path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (body,) = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    found = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            sentence = " ".join(ast.literal_eval(after.value).split())
            default = node.value
            is_literal = isinstance(default, ast.Constant)
            found[node.target.id] = FieldHelp(sentence, default.value if is_literal else None)
    return found
