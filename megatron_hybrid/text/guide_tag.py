"""Reads structural tags: texts with tags in them, whose contents have a form.

They are those of xgrammar. Its formats and their fields are on a list here, and all others are
refused by name. Schemas and patterns in them are held as those of other guides are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hybrid.text import guide_regex, guide_schema
from megatron_hybrid.text.guide_grammar import (
    EMPTY,
    MAX_REPEATS,
    AnyText,
    Node,
    Regex,
    Repeat,
    Rule,
    alt,
    ebnf,
    json_node,
    optional,
    seq,
)
from megatron_hybrid.validation import is_int

MAX_DEPTH = 32
"""Most formats inside of each other."""
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
"""Fields of `json_schema` -> what they always are."""
_TEXTS = ("value", "begin", "end", "separator", "grammar", "pattern")
_LISTS = ("elements", "tags", "triggers", "excludes")
_CAN_MISS = ("excludes",)
"""Of the fields that are lists or texts."""
_TIMES = {"optional": (0, 1), "plus": (1, None), "star": (0, None)}


def grammar_of(tag: Any) -> dict[str, Node]:
    """Return the rules of a structural tag, a JSON value.

    Raises:
        ValueError: it is wrong, or has what cannot be kept to.
    """
    reader = _Reader()
    root = reader.node(format_of(tag), 0)
    return {"root": root, **reader.rules}


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
    structures = tag["structures"]
    if not isinstance(structures, list):
        raise ValueError(f"'structures' must be a list, got {structures!r:.80}")
    form["tags"] = list(map(_tag_of, structures))
    return form


def _tag_of(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, Mapping):
        raise ValueError(f"a structure must be an object, got {structure!r:.80}")
    content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
    return {"begin": structure.get("begin"), "content": content, "end": structure.get("end")}


class _Reader:
    """Makes nodes of formats, and rules of the grammars in them."""

    def __init__(self) -> None:
        self.rules: dict[str, Node] = {}
        self._num_grammars = 0

    def node(self, form: Any, depth: int, kind: str | None = None) -> Node:
        """Return the node of a format. kind: where it may be left out."""
        if not isinstance(form, Mapping):
            raise ValueError(f"a format must be an object, got {form!r:.80}")
        if depth > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_DEPTH} formats inside of each other")
        kind = form.get("type", kind)
        _check_format(kind, form)
        make = getattr(self, f"_{kind}", self._repeated)
        return make(form, depth + 1)

    def _any_text(self, form: Mapping[str, Any], depth: int) -> Node:
        return AnyText(tuple(form.get("excludes", ())))

    def _const_string(self, form: Mapping[str, Any], depth: int) -> Node:
        return seq(form["value"])

    def _regex(self, form: Mapping[str, Any], depth: int) -> Node:
        return Regex(guide_regex.full_match(form["pattern"]))

    def _json_schema(self, form: Mapping[str, Any], depth: int) -> Node:
        return json_node(guide_schema.prepared(form.get("json_schema", True)))

    def _grammar(self, form: Mapping[str, Any], depth: int) -> Node:
        self._num_grammars += 1
        prefix = f"{self._num_grammars}."
        self.rules |= ebnf(form["grammar"], prefix)
        return Rule(f"{prefix}root")

    def _sequence(self, form: Mapping[str, Any], depth: int) -> Node:
        return seq(*(self.node(each, depth) for each in form["elements"]))

    def _or(self, form: Mapping[str, Any], depth: int) -> Node:
        return alt(self.node(each, depth) for each in form["elements"])

    def _repeated(self, form: Mapping[str, Any], depth: int) -> Node:
        times = _TIMES.get(form["type"]) or (form.get("min", 0), form.get("max"))
        if form["type"] == "repeat" and times[1] == -1:  # as xgrammar writes "no limit"
            times = times[0], None
        numbers = [each for each in times if each is not None]
        if not all(is_int(each) and each >= 0 for each in numbers):
            raise ValueError(f"'min' and 'max' must be integers >= 0, got {times}")
        if max(numbers, default=0) > MAX_REPEATS:
            raise ValueError(f"it repeats a part over {MAX_REPEATS} times: use 'star' or 'plus'")
        if times[1] is not None and times[0] > times[1]:
            raise ValueError(f"'min' must be at most 'max', got {times}")
        return Repeat(self.node(form.get("content"), depth), *times)

    def _tag(self, form: Mapping[str, Any], depth: int) -> Node:
        content = self.node(form.get("content"), depth)
        if isinstance(content, AnyText) and form["end"]:
            content = AnyText((*content.excludes, form["end"]))  # the first one ends the tag
        return seq(form["begin"], content, form["end"])

    def _tags_with_separator(self, form: Mapping[str, Any], depth: int) -> Node:
        tag = alt(self.node(each, depth, "tag") for each in form["tags"])
        more = EMPTY
        if not form.get("stop_after_first", False):
            more = Repeat(seq(form["separator"], tag), 0)
        return seq(tag, more) if form.get("at_least_one", False) else optional(seq(tag, more))

    def _triggered_tags(self, form: Mapping[str, Any], depth: int) -> Node:
        triggers = form["triggers"]
        for tag in form["tags"]:
            begin = tag.get("begin") if isinstance(tag, Mapping) else None
            if not isinstance(begin, str) or not begin.startswith(tuple(triggers)):
                raise ValueError(f"the tag that begins with {begin!r:.80} has none of the triggers")
        tags = [self.node(each, depth, "tag") for each in form["tags"]]
        between = AnyText((*triggers, *form.get("excludes", ())))
        first = [alt(tags)] if form.get("at_least_one", False) else []
        behind = alt(seq(between, tag) for tag in tags)
        if not form.get("stop_after_first", False):
            return seq(*first, Repeat(behind, 0), between)
        return first[0] if first else alt([behind, between])


def _check_format(kind: Any, form: Mapping[str, Any]) -> None:
    """Raise ValueError for a format or a field that is not known, or a field's value that is none."""
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise ValueError(f"the format {kind!r:.80} is not supported: use {', '.join(_FIELDS)}")
    fields = _FIELDS[kind]
    for name, value in form.items():
        is_neutral = kind == "json_schema" and value == _NEUTRAL.get(name)
        if name not in (*fields, "type") and not is_neutral:
            raise ValueError(f"{name!r} of the format {kind!r} is not supported: leave it out")
    for name in fields:
        value = form.get(name)
        if name in _CAN_MISS and name not in form:
            continue
        if name in _TEXTS and not isinstance(value, str):
            raise ValueError(f"the format {kind!r} needs {name!r}, a text, got {value!r:.80}")
        if name in _LISTS and not (isinstance(value, list) and value):
            raise ValueError(f"{name!r} must be a list that is not empty, got {value!r:.80}")
        if name in ("triggers", "excludes") and not all(
            isinstance(each, str) and each for each in value
        ):
            raise ValueError(f"{name!r} must be texts that are not empty, got {value!r:.80}")
        if name in ("at_least_one", "stop_after_first") and value not in (None, False, True):
            raise ValueError(f"{name!r} must be true or false, got {value!r:.80}")
