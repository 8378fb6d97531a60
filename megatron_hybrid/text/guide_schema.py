"""JSON Schema to grammars of guides.

Every keyword is on a list here, with what holds it; all others are refused by name. The grammars
write less than a schema allows, and nothing that it forbids: objects have their properties in the
order of the schema, and those alone that it declares, unless it asks for others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, permutations, product
from typing import Any
from urllib.parse import unquote

from megatron_hybrid.text import guide_numbers
from megatron_hybrid.text.guide_grammar import (
    ANY,
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Node,
    Ranges,
    Repeat,
    Rule,
    Seq,
    alt,
    among,
    minus,
    seq,
    text,
)
from megatron_hybrid.text.guide_regex import found_in, full_match
from megatron_hybrid.validation import is_int, is_number

MAX_WHITESPACE = 16
"""Most spaces and newlines in a row between two parts of a JSON answer. Without a limit a model may
write nothing else until its answer is full."""
MAX_DEPTH = 64
"""Most schemas inside of each other."""
_MAX_STATES = 10_000
"""Of an object: properties times how many have come, where their number is limited."""
_MAX_STEPS = 100_000
"""Schemas that are looked at while choices are told apart."""
_LARGEST_COUNT = 10**9
_LARGEST = 10**300
"""Of a bound."""

_ANNOTATIONS = {
    *("title", "description", "default", "example", "examples", "deprecated"),
    *("readOnly", "writeOnly", "$schema", "$id", "$comment", "$anchor", "$defs", "definitions"),
    "discriminator",
}
"""Keywords that forbid nothing. Schemas in `$defs` count where a `$ref` leads to them."""
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": _NUMERIC,
    "integer": _NUMERIC,
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("patternProperties", "propertyNames", "minProperties", "maxProperties"),
    ),
    "boolean": (),
    "null": (),
}
"""Those that are kept to, by the type that they are about."""
_CHOICES = ("anyOf", "oneOf", "allOf", "$ref")
_HELD = {"type", "enum", "const", *_CHOICES, *chain.from_iterable(_KEYWORDS.values())}
"""All that are kept to."""
_BESIDE_VALUES = {"type", "enum", "const", *_NUMERIC, "minLength", "maxLength", "format"}
"""Keywords by which the values of `enum` and `const` are picked."""
_COUNTS = {
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
}

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,5}}"
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_BY_FOUR = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_TIMES = "([0-9]{1,9}H([0-9]{1,9}M([0-9]{1,9}S)?)?|[0-9]{1,9}M([0-9]{1,9}S)?|[0-9]{1,9}S)"
_DAYS = "([0-9]{1,9}Y([0-9]{1,9}M([0-9]{1,9}D)?)?|[0-9]{1,9}M([0-9]{1,9}D)?|[0-9]{1,9}D)"
_URI_CHARACTER = rf"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%{_HEX}{{2}})"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P([0-9]{{1,9}}W|{_DAYS}(T{_TIMES})?|T{_TIMES})",
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"{_HEX}{{1,4}}(:{_HEX}{{1,4}}){{7}}",
    "hostname": _HOST,
    "email": rf"[a-zA-Z0-9_+-]{{1,30}}(\.[a-zA-Z0-9_+-]{{1,30}})?@{_HOST}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+.-]*://{_HOST}(:[0-9]{{1,4}})?(/{_URI_CHARACTER}*)?"
        rf"(\?({_URI_CHARACTER}|\?)*)?(#({_URI_CHARACTER}|\?)*)?"
    ),
}
"""Of strings, as regular expressions. Those of dates, times, durations, `uuid` and `ipv4` are the
formats (seconds from 0 to 59); the others are usual texts among the allowed: all eight parts of an
IPv6 address, host names of up to six parts, URIs with a host."""

_SPACE = Repeat(Chars(among(" \n\r\t")), 0, MAX_WHITESPACE)
_COMMA = seq(_SPACE, ",", _SPACE)
_COLON = seq(_SPACE, ":", _SPACE)
_CONTROLS: Ranges = ((0, 0x1F),)
_PLAIN = minus(ANY, (*_CONTROLS, *among('"'), *among("\\")))
_SHORT = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_HEX_DIGIT = Chars(among("0123456789abcdefABCDEF"))


# One character of a string without a pattern: as it is, or escaped. Two halves are one character.
_CHARACTER = alt(
    [
        Chars(_PLAIN),
        seq("\\", Chars(among('"\\/bfnrt'))),
        seq(
            "\\u",
            alt(
                [
                    seq(Chars(among("0123456789abcefABCEF")), Repeat(_HEX_DIGIT, 3, 3)),
                    seq(Chars(among("dD")), Chars(among("01234567")), Repeat(_HEX_DIGIT, 2, 2)),
                    seq(
                        *(Chars(among("dD")), Chars(among("89abAB")), Repeat(_HEX_DIGIT, 2, 2)),
                        *("\\u", Chars(among("dD")), Chars(among("cdefCDEF"))),
                        Repeat(_HEX_DIGIT, 2, 2),
                    ),
                ]
            ),
        ),
    ]
)
_SHARED: dict[str, Node] = {
    "character": _CHARACTER,
    "string": seq('"', Repeat(Rule("character"), 0), '"'),
    "space": _SPACE,
}


def grammar_of(schema: Any) -> dict[str, Node]:
    """The rules of a schema, a JSON value.

    Raises:
        ValueError: it is wrong, or has what cannot be kept to.
    """
    return _Schemas(schema).rules


def _refuse(what: str) -> None:
    raise ValueError(f"{what} is not supported: leave it out, and check the answer for it")


class _Schemas:
    """Makes rules of a schema and of those in it, each once.

    Args:
        root: of the schemas, to which a `$ref` is relative.
    """

    def __init__(self, root: Any):
        self._root = root
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[Any, str, int]] = []
        self._narrowed: dict[tuple[int, str], Any] = {}
        self._depth = self._num_steps = 0
        self.rules = dict(_SHARED)
        self.rules["root"] = self._value(root)
        while self._waiting:
            part, name, self._depth = self._waiting.pop()
            self.rules[name] = alt(self._bodies(part))

    def _value(self, schema: Any) -> Node:
        """What a schema allows, by a rule of its own."""
        if schema is False:
            return NOTHING
        if schema is True:
            schema = _ANYTHING
        if id(schema) not in self._names:
            if self._depth == MAX_DEPTH:
                raise ValueError(f"it has more than {MAX_DEPTH} schemas inside of each other")
            name = self._names[id(schema)] = f"schema_{len(self._names)}"
            self._waiting.append((schema, name, self._depth + 1))
        return Rule(self._names[id(schema)])

    def _new_rule(self, node: Node) -> Node:
        name = f"part_{len(self.rules)}"
        self.rules[name] = node
        return Rule(name)

    # Choices -------------------------------------------------------------------------------------

    def _leaves(self, schema: Any, seen: set[int] | None = None) -> Iterator[Mapping[str, Any]]:
        """The schemas without choices of which one must fit. seen: ids of those that were looked
        at: a second time they add nothing."""
        self._step()
        seen = set() if seen is None else seen
        if schema is True:
            schema = _ANYTHING
        if schema is False or id(schema) in seen:
            return
        if not isinstance(schema, Mapping):
            raise ValueError(f"a schema must be an object or a bool, got {schema!r}")
        self._check(schema)
        seen.add(id(schema))
        (name,) = {*_CHOICES} & schema.keys() or {None}
        if name is None:
            yield schema
        elif name == "$ref":
            yield from self._leaves(self._target(schema["$ref"]), seen)
        elif name == "oneOf":
            yield from self._one_of(schema, seen)
        else:
            for each in schema[name]:
                yield from self._leaves(each, seen)

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise ValueError("it has too many choices inside of each other: use fewer")

    def _check(self, schema: Mapping[str, Any]) -> None:
        """Raise ValueError for keywords that are not kept to, or not beside each other."""
        asserted = schema.keys() - _ANNOTATIONS
        asserted = {name for name in asserted if not str(name).startswith("x-")}
        for name in sorted(asserted - _HELD):
            _refuse(repr(name))
        for name in _CHOICES:
            if name in schema and (beside := asserted - {name}):
                _refuse(f"{min(beside)!r} beside {name!r}")
        for name in ("enum", "const"):
            if name in schema and (beside := asserted - _BESIDE_VALUES):
                _refuse(f"{min(beside)!r} beside {name!r}")
        if "$id" in schema and schema is not self._root:
            _refuse("'$id' in an inner schema")
        for name in asserted:
            _check_value(name, schema[name])

    def _target(self, ref: Any) -> Any:
        """The schema that a `$ref` leads to."""
        if not isinstance(ref, str) or not re.match("#(/|$)", ref):
            _refuse(f"a '$ref' out of the schema or to an anchor, {ref!r},")
        found = self._root
        for step in unquote(ref).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(step) if isinstance(found, list) else step]
            except (KeyError, IndexError, TypeError, ValueError):
                raise ValueError(f"the '$ref' {ref!r} leads nowhere") from None
            if isinstance(found, Mapping) and "$id" in found:
                _refuse("'$id' in an inner schema")
        return found

    def _one_of(self, schema: Mapping[str, Any], seen: set[int]) -> Iterator[Mapping[str, Any]]:
        """The leaves of a `oneOf`; no value may fit two of its parts."""
        groups = [list(self._leaves(each, set(seen))) for each in schema["oneOf"]]
        discriminator = schema.get("discriminator")
        if isinstance(discriminator, Mapping):
            key = discriminator.get("propertyName")
            groups = [[self._requiring(leaf, key) for leaf in group] for group in groups]
        for (index, group), (other_index, other) in permutations(enumerate(groups, 1), 2):
            if not all(self._excludes(*pair) for pair in product(group, other)):
                first, second = sorted((index, other_index))
                raise ValueError(
                    f"a value might fit both schema {first} and schema {second} of a 'oneOf': "
                    "use 'anyOf', or require a property with another 'const' in each"
                )
        yield from chain.from_iterable(groups)

    def _requiring(self, leaf: Mapping[str, Any], key: Any) -> Mapping[str, Any]:
        """The leaf, with a property that it declares required."""
        required = leaf.get("required", [])
        if key not in leaf.get("properties", {}) or key in required:
            return leaf
        narrowed = {**leaf, "required": [*required, key]}
        return self._narrowed.setdefault((id(leaf), key), narrowed)

    def _excludes(self, leaf: Mapping[str, Any], other: Mapping[str, Any], depth: int = 0) -> bool:
        """Whether it is sure that what is written for a leaf does not fit another one."""
        self._step()
        values = _values(leaf)
        if values is not None and all(not _fits(value, other) for value in values):
            return True
        if _values(other) is not None and values is None:
            return all(not _fits(value, leaf) for value in _values(other))
        kinds, other_kinds = set(_kinds(leaf)), set(_allowed_kinds(other))
        if "number" in other_kinds:
            other_kinds.add("integer")
        if "integer" in other_kinds and "number" in kinds:
            return False
        common = kinds & other_kinds
        if common != {"object"} or depth > 4:
            return not common
        names = leaf.get("properties", {})
        other_names, other_required = other.get("properties", {}), other.get("required", [])
        if not _is_open(leaf) and any(name not in names for name in other_required):
            return True
        for name in names:
            surely = name in leaf.get("required", ())
            if surely and name not in other_names and other.get("additionalProperties") is False:
                return "patternProperties" not in other
            if name in other_names and (surely or name in other_required):
                pairs = product(self._leaves(names[name]), self._leaves(other_names[name]))
                if all(self._excludes(*pair, depth + 1) for pair in pairs):
                    return True
        return False

    # Values --------------------------------------------------------------------------------------

    def _bodies(self, schema: Any, only: str | None = None) -> Iterator[Node]:
        """Each way to write a value. only: of this type."""
        for leaf in self._leaves(schema):
            values = _values(leaf)
            if values is not None:
                yield from (
                    _constant(value) for value in values if only is None or _has_type(value, only)
                )
                continue
            for kind in _kinds(leaf):
                if only in (None, kind):
                    yield self._of_kind(kind, leaf)

    def _of_kind(self, kind: str, leaf: Mapping[str, Any]) -> Node:
        if kind == "null":
            return text("null")
        if kind == "boolean":
            return alt([text("true"), text("false")])
        if kind in ("integer", "number"):
            make = guide_numbers.integers if kind == "integer" else guide_numbers.numbers
            low, high, above, below = map(leaf.get, _NUMERIC)
            return make(low, high, above, below)
        return {"string": _string, "array": self._array, "object": self._object}[kind](leaf)

    def _array(self, leaf: Mapping[str, Any]) -> Node:
        first = [self._value(each) for each in leaf.get("prefixItems", ())]
        others = leaf.get("items", leaf.get("unevaluatedItems", "prefixItems" not in leaf))
        others = self._value(others)
        low, high = int(leaf.get("minItems", 0)), leaf.get("maxItems")
        if high is not None and high < low:
            return NOTHING
        size = len(first)
        rest_high = None if high is None else int(high) - size
        if rest_high is not None and rest_high < 0:
            first, size, others, rest_high = first[: int(high)], int(high), NOTHING, 0
        if not first:
            if rest_high == 0:
                return seq("[", _SPACE, "]")
            first, size = [others], 1
            rest_high = None if rest_high is None else rest_high - 1
        after: Node = Repeat(seq(_COMMA, others), max(0, low - size), rest_high)
        for index in range(size - 1, 0, -1):
            item = seq(_COMMA, first[index], after)
            after = self._new_rule(item if low > index else alt([item, EMPTY]))
        some = seq("[", _SPACE, first[0], after, _SPACE, "]")
        return some if low else alt([some, seq("[", _SPACE, "]")])

    def _object(self, leaf: Mapping[str, Any]) -> Node:
        names, required = leaf.get("properties", {}), leaf.get("required", ())
        for name in required:
            if name not in names:
                raise ValueError(f"{name!r} is required and not in 'properties': declare it there")
        entries = [
            (seq(_constant(name), _COLON, self._value(part)), name in required)
            for name, part in names.items()
        ]
        extra = self._extra(leaf)
        low, high = int(leaf.get("minProperties", 0)), leaf.get("maxProperties")
        low = 0 if low <= len(set(required)) else low
        if low and extra is not None:
            _refuse("'minProperties' with properties that are not declared, which may come twice,")
        if high is not None and extra is None and high >= len(names):
            high = None
        limit = int(high) if high is not None else low
        if (limit + 1) * (len(names) + 1) > _MAX_STATES:
            _refuse(f"{'minProperties' if high is None else 'maxProperties'!r} of so many")

        # The rules of what may follow behind so many entries, by whether and how many have come.
        def key(come: int) -> int:
            return min(come, max(1, limit if high is None else limit + 1))

        def end(come: int) -> Node:
            if come < low or (high is not None and come > limit):
                return NOTHING
            if extra is None or (high is not None and come >= limit):
                return _SPACE
            room = None if high is None else limit - come - (come == 0)
            more = Repeat(seq(_COMMA, extra), 0, room)
            if come == 0:
                return alt([seq(_SPACE, extra, more, _SPACE), _SPACE])
            return seq(more, _SPACE)

        states = range(max(1, limit if high is None else limit + 1) + 1)
        after = {come: self._new_rule(end(come)) for come in states}
        for entry, is_required in reversed(entries):
            after = {
                come: self._new_rule(
                    alt(
                        [
                            seq(_SPACE if come == 0 else _COMMA, entry, after[key(come + 1)]),
                            *(() if is_required else (after[come],)),
                        ]
                    )
                )
                for come in states
            }
        return seq("{", after[0], "}")

    def _extra(self, leaf: Mapping[str, Any]) -> Node | None:
        """A property that is not declared; None: there is none."""
        names, patterns = leaf.get("properties", {}), leaf.get("patternProperties", {})
        others = leaf.get("additionalProperties", leaf.get("unevaluatedProperties"))
        if "propertyNames" in leaf and (names or patterns):
            _refuse("'propertyNames' beside 'properties' or 'patternProperties'")
        if patterns:
            if others not in (None, False) or len(patterns) > 1:
                _refuse(
                    "'patternProperties' with several patterns, or beside 'additionalProperties'"
                )
            ((pattern, part),) = patterns.items()
            for name in names:
                if any(re.search(pattern, name, flag) for flag in (re.ASCII, re.UNICODE)):
                    _refuse(f"'patternProperties' of the declared property {name!r}")
            return seq(_spelled_pattern(pattern), _COLON, self._value(part))
        if not _is_open(leaf):
            return None
        if "propertyNames" in leaf:
            name = alt(self._bodies(leaf["propertyNames"], only="string"))
        else:
            name = self._other_names(list(names)) if names else Rule("string")
        return seq(name, _COLON, self._value(True if others is None else others))

    def _other_names(self, names: Sequence[str]) -> Node:
        """Any string but these, without needless escapes, which would spell them anew."""
        anything = Repeat(_spelled(Chars(ANY)), 0)

        def other(suffixes: Sequence[str]) -> Node:
            """What is no suffix: it parts from all of them, or ends before, or goes on behind."""
            heads = sorted({each[0] for each in suffixes if each})
            options = [seq(_spelled(Chars(minus(ANY, among("".join(heads))))), anything)]
            if "" not in suffixes:
                options.append(EMPTY)
            for head in heads:
                rest = [each[1:] for each in suffixes if each.startswith(head)]
                options.append(seq(_spelled(text(head)), self._new_rule(other(rest))))
            return alt(options)

        return seq('"', other(names), '"')


_ANYTHING: Mapping[str, Any] = {}


# Keywords ----------------------------------------------------------------------------------------


def _check_value(name: str, value: Any) -> None:
    """Raise ValueError for a keyword's value that is none."""

    def must_be(what: str) -> None:
        raise ValueError(f"{name!r} must be {what}, got {value!r}")

    if name in _COUNTS and not (is_number(value) and value == int(value) and value >= 0):
        must_be("an integer >= 0")
    if name in _COUNTS and value > _LARGEST_COUNT:
        must_be(f"at most {_LARGEST_COUNT}")
    if name in _NUMERIC and not (is_number(value) and abs(value) < _LARGEST):
        must_be("a number between -1e300 and 1e300")
    if name in ("properties", "patternProperties") and not isinstance(value, Mapping):
        must_be("an object")
    if name == "items" and isinstance(value, list):
        _refuse("'items' as a list, which is 'prefixItems' by now,")
    if name in ("enum", "required", "prefixItems") and not isinstance(value, list):
        must_be("a list")
    if name in ("anyOf", "oneOf", "allOf") and not (isinstance(value, list) and value):
        must_be("a list that is not empty")
    if name == "allOf" and len(value) > 1:
        _refuse("'allOf' of several schemas")
    if name == "required" and not all(isinstance(each, str) for each in value):
        must_be("a list of names")
    if name == "uniqueItems" and value is not False:
        _refuse("'uniqueItems'")
    if name == "pattern" and not isinstance(value, str):
        must_be("a string")
    if name == "format" and value not in FORMATS:
        _refuse(f"the format {value!r} (those held are {', '.join(FORMATS)})")
    if name == "type":
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, str) or each not in _KEYWORDS:
                must_be(f"of {', '.join(_KEYWORDS)}")


def _allowed_kinds(leaf: Mapping[str, Any]) -> list[str]:
    """The types of the values that fit."""
    stated = leaf.get("type", [kind for kind in _KEYWORDS if kind != "integer"])
    kinds = list(dict.fromkeys(stated if isinstance(stated, list) else [stated]))
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]


def _kinds(leaf: Mapping[str, Any]) -> list[str]:
    """The types of the values to write. Without `type`, those that the other keywords are about."""
    allowed = _allowed_kinds(leaf)
    if "type" in leaf:
        return allowed
    return [kind for kind in allowed if leaf.keys() & {*_KEYWORDS[kind]}] or allowed


def _is_open(leaf: Mapping[str, Any]) -> bool:
    """Whether properties that are not declared may come."""
    if leaf.get("patternProperties"):
        return True
    default = not leaf.keys() & {"properties", "required"}
    return leaf.get("additionalProperties", leaf.get("unevaluatedProperties", default)) is not False


# Values of enum and const ------------------------------------------------------------------------


def _values(leaf: Mapping[str, Any]) -> list | None:
    """Those of `enum` and `const` that fit the leaf; None: it has neither."""
    if "const" not in leaf and "enum" not in leaf:
        return None
    values = leaf["enum"] if "enum" in leaf else [leaf["const"]]
    return [value for value in values if _fits(value, leaf)]


def _fits(value: Any, leaf: Mapping[str, Any]) -> bool:
    """Whether a value may fit a leaf; of one with `enum` or `const`, whether it does."""
    if not any(_has_type(value, kind) for kind in _allowed_kinds(leaf)):
        return False
    options = [leaf["const"]] if "const" in leaf else []
    if options and _identity(options[0]) != _identity(value):
        return False
    if "enum" in leaf and _identity(value) not in map(_identity, leaf["enum"]):
        return False
    if isinstance(value, str):
        if not leaf.get("minLength", 0) <= len(value) <= leaf.get("maxLength", len(value)):
            return False
        return "format" not in leaf or re.fullmatch(FORMATS[leaf["format"]], value) is not None
    if is_number(value):
        low, high, above, below = map(leaf.get, _NUMERIC)
        return (
            (low is None or value >= low)
            and (high is None or value <= high)
            and (above is None or value > above)
            and (below is None or value < below)
        )
    return True


def _has_type(value: Any, kind: str) -> bool:
    if kind == "integer":
        return is_int(value) or (isinstance(value, float) and value.is_integer())
    if kind == "number":
        return is_number(value)
    kinds = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[kind])


def _identity(value: Any) -> str:
    """Equal for equal values of JSON, in which 1.0 is 1, and true is not."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, Mapping):
            return {name: plain(each) for name, each in value.items()}
        return value

    return json.dumps(plain(value), sort_keys=True)


def _constant(value: Any) -> Node:
    """One way to write a value, with space between its parts."""
    if isinstance(value, str):
        return seq('"', _spelled(text(value)), '"')
    if not isinstance(value, (list, Mapping)):
        return text(json.dumps(value))
    if isinstance(value, list):
        parts, ends = [_constant(each) for each in value], "[]"
    else:
        ends = "{}"
        parts = [seq(_constant(name), _COLON, _constant(each)) for name, each in value.items()]
    inner = [node for part in parts for node in (_COMMA, part)][1:]
    return seq(ends[0], _SPACE, *inner, *([_SPACE] if inner else []), ends[1])


# Strings -----------------------------------------------------------------------------------------


def _string(leaf: Mapping[str, Any]) -> Node:
    low, high = int(leaf.get("minLength", 0)), leaf.get("maxLength")
    for name in ("pattern", "format"):
        beside = {"minLength", "maxLength", "pattern"} & leaf.keys() - {name}
        if name in leaf and beside:
            _refuse(f"{min(beside)!r} beside {name!r}")
    if "pattern" in leaf:
        return _spelled_pattern(leaf["pattern"])
    if "format" in leaf:
        return seq('"', full_match(FORMATS[leaf["format"]]), '"')
    if high is not None and high < low:
        return NOTHING
    if not low and high is None:
        return Rule("string")
    return seq('"', Repeat(Rule("character"), low, None if high is None else int(high)), '"')


def _spelled_pattern(pattern: str) -> Node:
    return seq('"', _spelled(found_in(pattern)), '"')


def _spelled(node: Node) -> Node:
    """Characters as JSON writes them: each in one way."""
    match node:
        case Chars(ranges):
            plain = minus(ranges, minus(ANY, _PLAIN))
            special = minus(ranges, _PLAIN)
            codes = [chr(code) for first, last in special for code in range(first, last + 1)]
            short = "".join(_SHORT[each] for each in codes if each in _SHORT)
            options = [Chars(plain)] if plain else []
            options += [seq("\\", Chars(among(short)))] if short else []
            for high in "01":
                low = {f"{ord(each):02x}" for each in codes if each not in _SHORT}
                low = "".join(each[1] for each in low if each[0] == high)
                if low:
                    options.append(seq("\\u00", high, Chars(among(low + low.upper()))))
            return alt(options)
        case Seq(parts):
            return Seq(tuple(map(_spelled, parts)))
        case Alt(options):
            return Alt(tuple(map(_spelled, options)))
        case Repeat(part, low, high):
            return Repeat(_spelled(part), low, high)
    return node
