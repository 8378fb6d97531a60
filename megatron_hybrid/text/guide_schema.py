"""Prepares JSON Schemas for llguidance: what it can enforce stays, all else is refused by name.

Formats become patterns of ours, patterns are written in the syntax that the library reads, and each
`$ref` leads to a definition at the top.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from functools import partial
from math import lcm, ulp
from typing import Annotated, Any
from urllib.parse import unquote

from megatron_hybrid.text.guide_regex import found_in
from megatron_hybrid.utils.validation import Range, check_field, is_number

MAX_WHITESPACE = 16
"""Most spaces and newlines in a row between two parts of a JSON answer. Without a limit a model may
write nothing else until its answer is full."""
MAX_DEPTH = 64
"""Most schemas that may be nested."""
MAX_SCHEMAS = 50_000
"""Most schemas in one. Those of a `oneOf` count each time that they are mentioned."""

ROOT = "x-megatron-hybrid-root"
"""Keyword of ours, which no caller uses: the schema that `$ref`s are relative to, if not this."""
MAX_OPTIONAL = 500
"""Most properties of an object that may be left out."""
MAX_MULTIPLE = 30_000
"""Largest multiple that all `multipleOf` of a schema have in common, in units of their last digit:
llguidance counts remainders, and takes half a second of a CPU for so many."""

_ANNOTATIONS = {
    *("title", "description", "default", "example", "examples", "deprecated"),
    *("readOnly", "writeOnly", "$schema", "$id", "$comment", "$anchor", "$defs", "definitions"),
    "discriminator",
}
"""Keywords that forbid nothing. Schemas in `$defs` count where a `$ref` leads to them."""
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_SIDES = {"exclusiveMinimum": 1, "exclusiveMaximum": -1}
"""On which side of a limit its numbers lie. llguidance allows a whole limit itself if the other
limit is a fraction less than 1 away: the limit is moved to this side by the least that counts."""
_SCHEMA = {"items", "additionalProperties"}
_LISTS = {"prefixItems", "anyOf", "oneOf", "allOf"}
_MAPS = {"properties", "patternProperties"}
_AS_THEY_ARE = {"type", "enum", "const", "required", "pattern", "format", "$ref", "uniqueItems"}
_VALUES: dict[str, Any] = {
    **dict.fromkeys(_COUNTS, Annotated[int, Range(ge=0, le=1 << 63)]),
    **dict.fromkeys(_NUMBERS, float),
    "multipleOf": Annotated[float, Range(gt=0)],
    **dict.fromkeys(_MAPS, Mapping),
    **dict.fromkeys(_LISTS, list),
    "required": list[str],
    **dict.fromkeys(("pattern", "format"), str),
}
"""Annotations of the values of keywords, where llguidance would accept others."""
_HELD = _COUNTS | _NUMBERS | _SCHEMA | _LISTS | _MAPS | _AS_THEY_ARE
"""All keywords that are enforced."""


def _host(most: int, parts: int) -> str:
    """Return the pattern of host names of at most `parts` labels of at most `most` characters each,
    without "--" in their third place, which only names in other scripts have."""
    any_, end = "[a-zA-Z0-9-]", "[a-zA-Z0-9]"
    middle = f"({end}{any_}|-{end})"
    label = f"{end}({any_}?{end}|{any_}{{2}}{end}|{any_}{middle}{any_}{{0,{most - 5}}}{end})?"
    return rf"{label}(\.{label}){{0,{parts - 1}}}"


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
    "([Zz]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_HOST = f"({_host(32, 7)}|{_host(63, 3)})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(\.{_BYTE}){{3}}"
_WORD = "[0-9a-fA-F]{1,4}"


def _ipv6() -> str:
    """Return the pattern of addresses of eight words, the last two of which may be an IPv4 address,
    and in which "::" may stand once for one or more words (RFC 4291, section 2.2)."""
    words, mixed = [f"({_WORD}:){{7}}{_WORD}"], [f"({_WORD}:){{6}}{_IPV4}"]
    for before in range(8):
        start = f"({_WORD}:){{{before}}}" if before else ":"
        words.append(f"{start}((:{_WORD}){{1,{7 - before}}}|:)" if before < 7 else f"{start}:")
        if before < 6:
            mixed.append(f"{start}(:{_WORD}){{0,{5 - before}}}:{_IPV4}")
    return f"({'|'.join([*words, *mixed])})"


_IPV6 = _ipv6()
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"([ !#-\[\]-~]|\\[ -~])*"'
_OWN_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "email": rf"({_ATOM}(\.{_ATOM})*|{_QUOTED})@({_HOST}|\[({_IPV4}|IPv6:{_IPV6})\])",
}
"""Patterns of formats that llguidance would enforce differently: each day exists, seconds are from
0 to 59, a host name has up to 253 characters, addresses may end in those of IPv4, and mailboxes may
be quoted (RFC 5321)."""
FORMATS = (*_OWN_FORMATS, "duration", "uuid", "uri")
_FREE_FORMATS = ("double", "float", "password", "binary", "path")
"""Formats of OpenAPI and pydantic that forbid nothing."""
_INTEGERS = {
    "int32": {"minimum": -(1 << 31), "maximum": (1 << 31) - 1},
    "int64": {"minimum": -(10**18), "maximum": (1 << 63) - 1},
}
"""Limits of OpenAPI's formats of integers; llguidance cannot enforce -2^63."""
_WHITESPACE = {"whitespace_pattern": rf"[ \n\r\t]{{1,{MAX_WHITESPACE}}}"}
_ESCAPES = {"json_allow_general_unicode_escapes": True}
_NAMED_ONCE = {"json_allowed_escapes": 'nrbtf\\"'}
"""Options of open objects, and of patterns of names. Without \\u a name has one spelling, so that
no second spelling of a declared name passes for a new name."""


def prepared(schema: Any) -> dict[str, Any]:
    """Return a schema, a JSON value, as llguidance is to read it.

    Raises:
        ValueError: the schema is wrong, or has a part that cannot be enforced.
    """
    return _Schemas(schema).whole


def _refuse(what: str) -> None:
    raise ValueError(f"{what} is not supported: leave it out, and check the answer for it")


class _Schemas:
    """Prepares a schema and those that its `$ref`s lead to, each once.

    Args:
        root: the schema. A `$ref` is relative to it, or to the one under its keyword `ROOT`.
    """

    def __init__(self, root: Any):
        self._root = root.get(ROOT, root) if isinstance(root, Mapping) else root
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[Any, str]] = []
        self._count = 0
        self._is_open = False
        self._multiple = Fraction(1)
        floats: list[float] = []
        json.loads(json.dumps(root), parse_float=lambda each: floats.append(float(each)))
        self._floors = {each // 1 for each in floats if each % 1}
        top = self._schema(root, 0)
        definitions: dict[str, Any] = {}
        while self._waiting:
            part, name = self._waiting.pop()
            definitions[name] = self._schema(part, 0)
        _check_ends(top, definitions)
        whole = top if isinstance(top, dict) else {"allOf": [top]}
        options = _WHITESPACE | (_NAMED_ONCE if self._is_open else _ESCAPES)
        self.whole = {**whole, "$defs": definitions, "x-guidance": options}
        text = json.dumps(self.whole)
        if '"patternProperties"' in text and "\\u0000" in text:  # sets of names may not hold it
            _refuse("NUL in a schema with 'patternProperties'")

    def _schema(self, schema: Any, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"a schema must be an object or a bool, got {schema!r:.80}")
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise ValueError(f"it has more than {MAX_SCHEMAS} schemas: use fewer")
        if depth == MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_DEPTH} schemas inside of each other")
        if "$id" in schema and schema is not self._root:
            _refuse("'$id' in an inner schema")
        limits = _limits(schema)
        is_free = limits or schema.get("format") in _FREE_FORMATS
        left_out = {"uniqueItems", "format"} if is_free else {"uniqueItems"}
        found = {
            name: self._value(name, value, schema, depth + 1)
            for name, value in schema.items()
            if name not in _ANNOTATIONS | left_out and not name.startswith("x-")
        }
        if len(found.get("properties", {}).keys() - found.get("required", ())) > MAX_OPTIONAL:
            _refuse(f"'properties' with more than {MAX_OPTIONAL} that are not required")
        most = len({*found.get("required", ())}) + 1
        if found.get("minProperties", 0) > most:  # a free name may come twice, and counts as two
            _refuse(f"'minProperties' above {most}, the required ones and one more")
        if "patternProperties" in found or (
            found.keys() & {"properties", "required"}
            and found.get("additionalProperties") is not False
        ):
            self._is_open = True
        if (own := _OWN_FORMATS.get(found.get("format"))) is not None:
            del found["format"]
            own = {"pattern": found_in(f"^(?:{own})$")}
            found["allOf"] = [*found.get("allOf", ()), own]
        if limits:
            found["allOf"] = [*found.get("allOf", ()), limits]
        if schema.get("uniqueItems", False) is not False:
            _refuse("'uniqueItems'")
        return found

    def _value(self, name: str, value: Any, schema: Mapping[str, Any], depth: int) -> Any:
        if name not in _HELD:
            _refuse(repr(name))
        if name == "maximum" and value == (1 << 63) - 1 and schema.get("type") == "integer":
            return value  # llguidance cuts the double, 2^63, to 64 bits
        _check_value(name, value)
        if name in _COUNTS:
            return int(value)
        side = _SIDES.get(name, 0)
        if side and side * value >= 0 and value - (side < 0) in self._floors:
            return value + side * max(4 * ulp(value), 1e-22)
        if name == "multipleOf":
            self._multiple = _common_multiple(self._multiple, Fraction(repr(value)))
            return value
        if name in _SCHEMA:
            return self._schema(value, depth)
        if name == "oneOf":
            return [self._option(each, schema, depth) for each in value]
        if name in _LISTS:
            return [self._schema(each, depth) for each in value]
        if name == "properties":
            return {key: self._schema(each, depth) for key, each in value.items()}
        if name == "patternProperties":
            return {found_in(key): self._schema(each, depth) for key, each in value.items()}
        if name == "pattern":
            return found_in(value)
        if name == "$ref":
            target = target_of(self._root, value)
            if id(target) not in self._names:
                self._names[id(target)] = str(len(self._names))
                self._waiting.append((target, self._names[id(target)]))
            return f"#/$defs/{self._names[id(target)]}"
        return value

    def _option(self, option: Any, schema: Mapping[str, Any], depth: int) -> Any:
        """Return a part of a `oneOf` in place of its `$ref`, so that llguidance can distinguish the
        parts. The property that a `discriminator` names becomes required."""
        while isinstance(option, Mapping) and option.keys() - _ANNOTATIONS == {"$ref"}:
            option, depth = target_of(self._root, option["$ref"]), depth + 1
            if depth > MAX_DEPTH:
                raise ValueError(f"the '$ref's of a 'oneOf' lead to each other: {option!r:.80}")
        found = self._schema(option, depth)
        discriminator = schema.get("discriminator")
        if isinstance(discriminator, Mapping) and isinstance(found, dict):
            key = discriminator.get("propertyName")
            if key in found.get("properties", ()) and key not in found.get("required", ()):
                found["required"] = [*found.get("required", ()), key]
        return found


def target_of(root: Any, ref: Any) -> Any:
    """Return what a `$ref` in a schema leads to.

    Raises:
        ValueError: it leads nowhere, or out of the schema.
    """
    if not isinstance(ref, str) or not re.match("#(/|$)", ref):
        _refuse(f"a '$ref' out of the schema or to an anchor, {ref!r:.80},")
    found = root
    for step in unquote(ref).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(step) if isinstance(found, list) else step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"the '$ref' {ref!r:.80} leads nowhere") from None
        if isinstance(found, Mapping) and "$id" in found:
            _refuse("'$id' in an inner schema")
    return found


def _common_multiple(first: Fraction, second: Fraction) -> Fraction:
    bottom = lcm(first.denominator, second.denominator)
    top = lcm(int(first * bottom), int(second * bottom))
    if top > MAX_MULTIPLE:
        _refuse(f"'multipleOf' whose common multiple is over {MAX_MULTIPLE} in their last digit")
    return Fraction(top, bottom)


def _check_value(name: str, value: Any) -> None:
    """Raise ValueError for an illegal value of a keyword that llguidance would accept."""
    if name in _NUMBERS | {"const", "enum"}:
        check = partial(_check_digits, name)
        json.loads(json.dumps(value), parse_int=check, parse_float=check)
    if name == "items" and isinstance(value, list):
        _refuse("'items' as a list, which is 'prefixItems' by now,")
    if name in _COUNTS and is_number(value) and value == int(value):
        value = int(value)
    check_field(repr(name), value, _VALUES.get(name, Any))
    if name == "format" and value not in FORMATS:
        _refuse(f"the format {value!r:.80} (those held are {', '.join(FORMATS)})")


def _limits(schema: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the limits that the format of an integer stands for, None without such a format."""
    name, types = schema.get("format"), schema.get("type")
    types = types if isinstance(types, list) else [types]
    is_integer = all(each in ("integer", "null") for each in types)
    return _INTEGERS.get(name) if is_integer and isinstance(name, str) else None


def _check_digits(name: str, number: str) -> None:
    """Raise ValueError for a number that llguidance may change, since it rounds to doubles."""
    _, digits, exponent = Decimal(number).normalize().as_tuple()
    if max(abs(float(number)), int("".join(map(str, digits)))) >= 1 << 53 or exponent < -22:
        _refuse(f"{name!r} with {number:.80}, which has more digits than a double surely holds,")


def _check_ends(top: Any, definitions: Mapping[str, Any]) -> None:
    """Raise ValueError for a definition that needs itself, so that no finite value fits it.

    llguidance would let a model write on for ever.
    """
    finite: set[str] = set()
    names = [*definitions, *reversed(definitions)]  # a chain of either direction needs one turn
    for _ in range(MAX_DEPTH):
        before = len(finite)
        for name in names:
            if name not in finite and _ends(definitions[name], finite):
                finite.add(name)
        if len(finite) == before:
            break
    if len(finite) < len(definitions) or not _ends(top, finite):
        raise ValueError(
            "no answer fits: a list of choices is empty, or a schema needs itself, by '$ref'"
        )


def _ends(schema: Any, finite: set[str]) -> bool:
    """Return whether a value of finite size may fit, given the definitions for which one does. A
    value of another type may fit a schema that leaves the type open."""
    if not isinstance(schema, Mapping):
        return True
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in finite:
        return False
    if not all(_ends(each, finite) for each in schema.get("allOf", ())):
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(_ends(each, finite) for each in schema[name]):
            return False
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return all(_ends(properties.get(name), finite) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        count = schema.get("minItems", 0)
        first = schema.get("prefixItems", [])
        rest = [schema.get("items")] if count > len(first) else []
        return all(_ends(each, finite) for each in [*first[:count], *rest])
    return True
