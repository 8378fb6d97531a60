"""Structural tags to grammars of guides: texts with tags in them, whose contents have a form.

xgrammar writes them as a grammar. Its formats and their fields are on a list here, and all others
are refused by name. Schemas and patterns in them are held as those of other guides are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_hybrid.text import guide_regex, guide_schema
from megatron_hybrid.text.guide_grammar import MAX_REPEATS, Node, check_ebnf, told, written
from megatron_hybrid.validation import is_int

MAX_DEPTH = 32
"""Most formats inside of each other: xgrammar reads them by recursion."""
_WHOLE = {"type", "format", "structures", "triggers", "at_least_one"}
_TAGS = ("tags", "at_least_one", "stop_after_first")
_FIELDS: dict[str, tuple[str, ...]] = {
    "any_text": ("excludes",),
    "const_string": ("value",),
    "grammar": ("grammar",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    **dict.fromkeys(("or", "sequence"), ("elements",)),
    **dict.fromkeys(("optional", "plus", "star"), ("content",)),
    "repeat": ("content", "min", "max"),
    "tag": ("begin", "content", "end"),
    "tags_with_separator": (*_TAGS, "separator"),
    "triggered_tags": (*_TAGS, "triggers", "excludes"),
}
"""Formats, and their fields beside `type`."""
_INNER = ("content", "elements", "tags")
"""Fields that hold formats."""
_NEUTRAL = {"style": "json", "any_order": False}
"""Fields of `json_schema` -> what they always are."""


def grammar_of(tag: Any) -> str:
    """The grammar of a structural tag, a JSON value.

    Raises:
        ValueError: it is wrong, or has what cannot be kept to.
    """
    import xgrammar

    whole = {"type": "structural_tag", "format": _held(format_of(tag), 0)}
    try:
        return str(xgrammar.Grammar.from_structural_tag(whole))
    except (RuntimeError, ValueError) as error:
        raise ValueError(told(error)) from None


def format_of(tag: Any) -> Any:
    """The format in a structural tag.

    Raises:
        ValueError: it is no structural tag.
    """
    if not isinstance(tag, Mapping):
        raise ValueError(f"it must be an object, got {tag!r:.80}")
    if others := tag.keys() - _WHOLE:
        raise ValueError(f"{min(others)!r} is not supported: leave it out")
    if "structures" not in tag:
        return tag.get("format")
    form: dict[str, Any] = {"type": "triggered_tags", "triggers": tag.get("triggers")}  # older
    form["at_least_one"] = tag.get("at_least_one", False)
    form["tags"] = [_tag_of(each) for each in _list(tag["structures"], "structures")]
    return form


def _tag_of(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, Mapping):
        raise ValueError(f"a structure must be an object, got {structure!r:.80}")
    content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end")}


def _held(form: Any, depth: int, kind: str | None = None) -> dict[str, Any]:
    """A format, with grammars in place of schemas and patterns. kind: where it may be left out."""
    if not isinstance(form, Mapping):
        raise ValueError(f"a format must be an object, got {form!r:.80}")
    if depth > MAX_DEPTH:
        raise ValueError(f"it has more than {MAX_DEPTH} formats inside of each other: flatten it")
    kind = form.get("type", kind)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"the format {kind!r} is not supported: use {', '.join(_FIELDS)}")
    found: dict[str, Any] = {"type": kind}
    for name, value in form.items():
        if name in _FIELDS[kind]:
            found[name] = value
        elif name != "type" and (kind != "json_schema" or value != _NEUTRAL.get(name)):
            raise ValueError(f"{name!r} of the format {kind!r} is not supported: leave it out")
    for name in _INNER:
        if name not in found:
            continue
        inner, inner_kind = found[name], "tag" if name == "tags" else None
        if name == "content":
            found[name] = _held(inner, depth + 1)
        else:
            found[name] = [_held(each, depth + 1, inner_kind) for each in _list(inner, name)]
    if any(is_int(found.get(name)) and found[name] > MAX_REPEATS for name in ("min", "max")):
        raise ValueError(f"it repeats a part over {MAX_REPEATS} times: use 'star' or 'plus'")
    for name in ("excludes", "triggers"):
        if "" in _list(found.get(name, []), name):
            raise ValueError(f"{name!r} has an empty text: leave it out")
    for name in ("grammar", "pattern"):
        if name in _FIELDS[kind] and not isinstance(found.get(name), str):
            raise ValueError(f"the format {kind!r} needs {name!r}, a text")
    if kind == "grammar":
        check_ebnf(found["grammar"])
    make: Callable[[], Mapping[str, Node]] | None = {
        "json_schema": lambda: guide_schema.grammar_of(found.get("json_schema", True)),
        "regex": lambda: {"root": guide_regex.full_match(found["pattern"])},
    }.get(kind)
    return found if make is None else {"type": "grammar", "grammar": _written(make)}


def _written(make: Callable[[], Mapping[str, Node]]) -> str:
    grammar = written(make())
    if grammar is None:
        raise ValueError("no text fits a schema or a pattern of it")
    return grammar


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name!r} must be a list, got {value!r:.80}")
    return value
