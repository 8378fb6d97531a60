"""Errors of megatron-core in words: many of its checks are assertions, some without a message."""

import ast
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any


@contextmanager
def core_refusals(what: str, values: dict[str, Any] | None = None) -> Iterator[None]:
    """Make a context in which an assertion of megatron-core becomes a ValueError with its meaning.

    Args:
        what: subject of the refusal, for the error.
        values: values, by name, of attributes that checks of core may read. With them any error of
            core counts, and the message has the values that the check reads.

    Raises:
        ValueError: core refuses something.
    """
    kinds = AssertionError if values is None else Exception
    try:
        yield
    except kinds as error:
        place = _last_of_core(error.__traceback__)
        if place is None or (values is None and place.tb_next is not None):
            raise
        condition, read = _check_at(place)
        named = [
            f"{name}={value!r}"
            for name, value in (values or {}).items()
            if name in read or name in str(error)
        ]
        meaning = str(error) or f"it needs `{condition}`"
        file = Path(place.tb_frame.f_code.co_filename).name
        raise ValueError(
            f"megatron-core refuses {', '.join(named) or what}: {meaning} ({file}:"
            f"{place.tb_lineno})"
        ) from error


def _last_of_core(traceback: TracebackType | None) -> TracebackType | None:
    found = None
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").startswith("megatron.core."):
            found = traceback
        traceback = traceback.tb_next
    return found


def _check_at(place: TracebackType) -> tuple[str, set[str]]:
    """Return the condition of the assertion at a place, and the attributes that it and the branches
    around it read."""
    line = place.tb_lineno
    source = "".join(linecache.getlines(place.tb_frame.f_code.co_filename))
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If | ast.Assert) and node.lineno <= line <= node.end_lineno
    ]
    read = {
        part.attr
        for node in around
        for part in ast.walk(node.test)
        if isinstance(part, ast.Attribute)
    }
    conditions = [ast.unparse(node.test) for node in around if isinstance(node, ast.Assert)]
    return "".join(conditions[-1:]).replace("self.", ""), read
