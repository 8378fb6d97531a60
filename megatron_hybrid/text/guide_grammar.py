"""The grammars of guides: how they are built, pruned and written for xgrammar.

A grammar is a dict of rules, by name, each a node. The rule "root" is the answer.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_NESTING = 200
"""Most nodes inside of each other in one rule: xgrammar reads them by recursion."""

Ranges = tuple[tuple[int, int], ...]
"""A set of code points: first and last of each run, ascending, apart."""


@dataclass(frozen=True)
class Chars:
    """One character of a set; none, if the set is empty."""

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    """All of its parts, one behind the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """One of its options; without options, nothing."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A part, `low` to `high` times; None: without a limit."""

    part: Node
    low: int
    high: int | None = None


@dataclass(frozen=True)
class Rule:
    """What the rule of this name is."""

    name: str


Node = Chars | Seq | Alt | Repeat | Rule
EMPTY, NOTHING = Seq(()), Alt(())


def seq(*parts: Node | str) -> Node:
    """A sequence of nodes and texts."""
    nodes = tuple(text(part) if isinstance(part, str) else part for part in parts)
    return nodes[0] if len(nodes) == 1 else Seq(nodes)


def text(characters: str) -> Node:
    return seq(*(Chars(((ord(each), ord(each)),)) for each in characters))


def alt(options: Iterable[Node]) -> Node:
    options = tuple(dict.fromkeys(options))
    return options[0] if len(options) == 1 else Alt(options)


def optional(part: Node) -> Node:
    return Repeat(part, 0, 1)


# Written by callers ------------------------------------------------------------------------------

MAX_EBNF = 1 << 16
"""Characters of a grammar."""
MAX_REPEATS = 1000
"""Of a part, by braces: xgrammar writes each of them out."""
_EBNF_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*|\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}|[()]',
    re.DOTALL,
)


def check_ebnf(source: str) -> None:
    """Raise ValueError for a grammar in EBNF that xgrammar would need too much stack or memory
    for."""
    if len(source) > MAX_EBNF:
        raise ValueError(
            f"the guide's grammar has {len(source)} characters, the most is {MAX_EBNF}: shorten it"
        )
    depth = 0
    for token in _EBNF_TOKEN.finditer(source):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth > MAX_NESTING:
            raise ValueError(
                f"the guide's grammar has over {MAX_NESTING} open brackets: flatten it"
            )
        if any(len(n or "") > 4 or int(n or 0) > MAX_REPEATS for n in token.groups()):
            raise ValueError(
                f"the guide's grammar repeats a part over {MAX_REPEATS} times: use * or +"
            )


def told(error: Exception) -> str:
    """What an error of xgrammar's says, without the time and place in its source."""
    return str(error).split("] ", 1)[-1].split(": ", 1)[-1].strip()


# Sets of characters ------------------------------------------------------------------------------


def union(*sets: Ranges) -> Ranges:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for each in sets for pair in each):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    kept = []
    for first, last in ranges:
        start = bisect_right(others, (first, -1))
        if start and others[start - 1][1] >= first:
            start -= 1
        for other_first, other_last in others[start:]:
            if other_first > last:
                break
            if first < other_first:
                kept.append((first, other_first - 1))
            first = max(first, other_last + 1)
        if first <= last:
            kept.append((first, last))
    return tuple(kept)


SURROGATES: Ranges = ((0xD800, 0xDFFF),)
"""They are halves of characters: UTF-8 has none."""
ANY = _without(((0, 0x10FFFF),), SURROGATES)


def minus(ranges: Ranges, others: Ranges) -> Ranges:
    """Characters of the first set that are not in the second one."""
    return _without(_without(ranges, SURROGATES), others)


def among(characters: str) -> Ranges:
    """The set of these characters."""
    return union(tuple((ord(each), ord(each)) for each in characters))


# Written -----------------------------------------------------------------------------------------


def written(rules: Mapping[str, Node]) -> str | None:
    """The grammar as xgrammar reads it, without what no finite text fits; None: nothing is left.

    Raises:
        ValueError: a rule is nested too deeply.
    """
    finite = _finite_rules(rules)
    if "root" not in finite:
        return None
    lines, wanted, seen = [], ["root"], {"root"}
    while wanted:
        name = wanted.pop()
        names: list[str] = []
        lines.append(f"{name} ::= {_write(rules[name], finite, names, 0)}")
        for each in names:
            if each not in seen:
                seen.add(each)
                wanted.append(each)
    return "\n".join(lines)


def _finite_rules(rules: Mapping[str, Node]) -> set[str]:
    """Rules that some finite text fits. Both orders are taken by turns: a chain of rules needs one
    turn, whichever way it runs."""
    finite: set[str] = set()
    names, before = list(rules), -1
    while len(finite) > before:
        before = len(finite)
        for name in (*names, *reversed(names)):
            if name not in finite and _is_finite(rules[name], finite):
                finite.add(name)
    return finite


def _is_finite(node: Node, rules: set[str]) -> bool:
    """Whether some finite text fits, given the rules for which that is known."""
    match node:
        case Chars(ranges):
            return bool(ranges)
        case Seq(parts):
            return all(_is_finite(part, rules) for part in parts)
        case Alt(options):
            return any(_is_finite(option, rules) for option in options)
        case Repeat(part, low):
            return low == 0 or _is_finite(part, rules)
    return node.name in rules


def _write(node: Node, finite: set[str], names: list[str], depth: int) -> str:
    """One node. names: the rules that it mentions are appended."""
    if depth > MAX_NESTING:
        raise ValueError(f"more than {MAX_NESTING} parts are inside of each other: flatten it")
    match node:
        case Rule(name):
            names.append(name)
            return name
        case Chars(ranges):
            return "[" + "".join(f"{_code(first)}-{_code(last)}" for first, last in ranges) + "]"
        case Seq(parts):
            return _write_sequence(parts, finite, names, depth)
        case Alt(options):
            kept = [option for option in options if _is_finite(option, finite)]
            return f"({' | '.join(_write(each, finite, names, depth + 1) for each in kept)})"
    if node.high == 0 or not _is_finite(node.part, finite):
        return '""'
    high = "" if node.high is None else node.high
    times = {(0, None): "*", (0, 1): "?"}.get((node.low, node.high), f"{{{node.low},{high}}}")
    return f"({_write(node.part, finite, names, depth + 1)}){times}"


def _write_sequence(parts: tuple[Node, ...], finite: set[str], names: list[str], depth: int) -> str:
    """Single characters side by side become one literal."""
    pieces: list[str] = []
    literal = ""
    for part in (*parts, None):
        if isinstance(part, Chars) and len(part.ranges) == 1 and len(set(part.ranges[0])) == 1:
            literal += _code(part.ranges[0][0])
            continue
        if literal:
            pieces.append(f'"{literal}"')
            literal = ""
        if part is not None:
            pieces.append(_write(part, finite, names, depth + 1))
    return f"({' '.join(pieces)})" if pieces else '""'


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\U{code:08x}"
