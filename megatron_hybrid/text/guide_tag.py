"""Reads structural tags: texts with tags in them, whose contents have a form.

They are those of xgrammar. Its formats and their fields are listed here, and all others are refused
by name. Schemas and patterns in them are enforced like those of other guides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from megatron_hybrid.text import guide_regex, guide_schema
from megatron_hybrid.text.guide_grammar import (
    MAX_REPEATS,
    AnyText,
    Json,
    Node,
    Regex,
    Repeat,
    alt,
    ebnf,
    seq,
    text,
)
from megatron_hybrid.utils.validation import Range, check_field, is_int

MAX_DEPTH = 32
"""Most formats that may be nested."""
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
"""Formats, and their fields in addition to `type`."""
_NEUTRAL = {"style": "json", "any_order": False}
"""Fields of `json_schema` -> the only values that they may have."""
_Text = Annotated[str, Range(ge=1)]
_VALUES: dict[str, Any] = {
    **dict.fromkeys(("value", "begin", "end", "separator", "grammar", "pattern"), str),
    **dict.fromkeys(("elements", "tags"), Annotated[list, Range(ge=1)]),
    **dict.fromkeys(("triggers", "excludes"), Annotated[list[_Text], Range(ge=1)]),
    **dict.fromkeys(("at_least_one", "stop_after_first"), bool | None),
}
"""Annotations of their values. Among texts and lists, only `excludes` may be missing."""
_TIMES = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}


def format_of(tag: Any) -> Any:
    """Return the format in a structural tag.

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
    check_field("structures", tag["structures"], list[Mapping])
    form["tags"] = [
        {
            "begin": each.get("begin"),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": each.get("end"),
        }
        for each in tag["structures"]
    ]
    return form


def node_of(form: Any, depth: int = 0, kind: str | None = None) -> Node:
    """Return the node of a format.

    Args:
        depth: number of formats around it.
        kind: its type, where that may be left out.

    Raises:
        ValueError: the format is wrong, or has a part that cannot be enforced.
    """
    if not isinstance(form, Mapping):
        raise ValueError(f"a format must be an object, got {form!r:.80}")
    if depth > MAX_DEPTH:
        raise ValueError(f"it has more than {MAX_DEPTH} formats inside of each other")
    kind = form.get("type", kind)
    _check_format(kind, form)

    def inner(form: Any, kind: str | None = None) -> Node:
        return node_of(form, depth + 1, kind)

    match kind:
        case "any_text":
            return AnyText(tuple(form.get("excludes", ())))
        case "const_string":
            return text(form["value"])
        case "regex":
            return Regex(guide_regex.full_match(form["pattern"]))
        case "grammar":
            return ebnf(form["grammar"])
        case "json_schema":
            return Json(json.dumps(guide_schema.prepared(form.get("json_schema", True))))
        case "sequence":
            return seq(*map(inner, form["elements"]))
        case "or":
            return alt(map(inner, form["elements"]))
        case "tag":
            content = inner(form.get("content"))
            if isinstance(content, AnyText) and form["end"]:  # the first one ends the tag
                content = AnyText((*content.excludes, form["end"]))
            return seq(form["begin"], content, form["end"])
        case "tags_with_separator" | "triggered_tags":
            tags = [inner(each, "tag") for each in form["tags"]]
            make = _separated if kind == "tags_with_separator" else _triggered
            return make(form, tags, form.get("at_least_one"), form.get("stop_after_first"))
    return Repeat(inner(form.get("content")), *_times(kind, form))


def _times(kind: str, form: Mapping[str, Any]) -> tuple[int, int | None]:
    low, high = _TIMES.get(kind) or (form.get("min", 0), form.get("max"))
    high = None if high == -1 else high  # as xgrammar writes it
    numbers = [low] if high is None else [low, high]
    if not all(is_int(each) and each >= 0 for each in numbers) or low > numbers[-1]:
        raise ValueError(f"'min' and 'max' must be integers, 0 <= min <= max, got {(low, high)}")
    if max(numbers) > MAX_REPEATS:
        raise ValueError(f"it repeats a part over {MAX_REPEATS} times: use 'star' or 'plus'")
    return low, high


def _separated(form: Mapping[str, Any], tags: list[Node], some: bool, one: bool) -> Node:
    tag = alt(tags)
    found = tag if one else seq(tag, Repeat(seq(form["separator"], tag), 0))
    return found if some else Repeat(found, 0, 1)


def _triggered(form: Mapping[str, Any], tags: list[Node], some: bool, one: bool) -> Node:
    """Return tags with text between them. If a tag must come, the answer begins with it."""
    for tag in form["tags"]:
        if not tag["begin"].startswith(tuple(form["triggers"])):
            raise ValueError(f"the tag that begins with {tag['begin']!r:.80} has no trigger")
    between = AnyText((*form["triggers"], *form.get("excludes", ())))
    after_text = alt(seq(between, tag) for tag in tags)
    if one:
        return alt(tags) if some else alt([after_text, between])
    return seq(*([alt(tags)] if some else []), Repeat(after_text, 0), between)


def _check_format(kind: Any, form: Mapping[str, Any]) -> None:
    """Raise ValueError for a format or a field that is unknown, or has an illegal value."""
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"the format {kind!r:.80} is not supported: use {', '.join(_FIELDS)}")
    fields = _FIELDS[kind]
    for name, value in form.items():
        is_neutral = kind == "json_schema" and value == _NEUTRAL.get(name)
        if name not in (*fields, "type") and not is_neutral:
            raise ValueError(f"{name!r} of the format {kind!r} is not supported: leave it out")
    for name in _VALUES.keys() & fields:
        if name in form or name != "excludes":
            check_field(f"{kind}.{name}", form.get(name), _VALUES[name])
