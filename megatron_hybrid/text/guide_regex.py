"""Regular expressions of guides: Python's, and those of JSON Schema's `pattern`.

Python's own parser reads them. What is not on the list here is refused by its name.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, product
from re import _constants as tokens
from re import _parser as parser

from megatron_hybrid.text.guide_grammar import (
    ANY,
    Chars,
    Node,
    Ranges,
    Repeat,
    alt,
    among,
    minus,
    seq,
    union,
)

_FLAGS = re.DOTALL | re.ASCII
_MAX_BRANCHES = 100
"""Of a pattern, told apart by the anchors in them."""
MAX_REPEATS = 100_000
"""Most times that a part comes, by all the counts around it."""

_BEGIN, _END = "^", "$"
_ANCHORS = {
    tokens.AT_BEGINNING: _BEGIN,
    tokens.AT_BEGINNING_STRING: _BEGIN,
    tokens.AT_END: _END,
    tokens.AT_END_STRING: _END,
}
_NAMES = {
    tokens.ASSERT: "a lookahead or lookbehind",
    tokens.ASSERT_NOT: "a negative lookahead or lookbehind",
    tokens.GROUPREF: "a backreference",
    tokens.GROUPREF_EXISTS: "a condition on a group",
    tokens.POSSESSIVE_REPEAT: "a possessive repetition, such as a*+,",
    tokens.ATOMIC_GROUP: "an atomic group (?>...)",
}
_OTHER_PLACES = {tokens.AT_BOUNDARY: r"\b", tokens.AT_NON_BOUNDARY: r"\B"}

_ASCII = {
    tokens.CATEGORY_DIGIT: among(string.digits),
    tokens.CATEGORY_SPACE: among(" \t\n\r\f\v"),
    tokens.CATEGORY_WORD: among(string.ascii_letters + string.digits + "_"),
}
_NEGATED = {
    tokens.CATEGORY_NOT_DIGIT: tokens.CATEGORY_DIGIT,
    tokens.CATEGORY_NOT_SPACE: tokens.CATEGORY_SPACE,
    tokens.CATEGORY_NOT_WORD: tokens.CATEGORY_WORD,
}
_LINE_ENDS = among("\n\r\u2028\u2029")

_SCHEMA_ESCAPES = {*"dDsSwWnrtfvbxu", *string.punctuation}
"""What ECMAScript and Python read alike behind a backslash; numbers are read on."""
_COUNT = re.compile(r"\{[0-9]+(,[0-9]*)?\}")


def full_match(pattern: str) -> Node:
    """The texts that a pattern matches from end to end, as `re.fullmatch` with DOTALL and ASCII.

    Raises:
        ValueError: the pattern is wrong, or has what no grammar holds.
    """
    ascii_set: Callable[[int], Ranges] = partial(_ascii, negates=_NEGATED)
    bodies = _Translator(ascii_set, ascii_set, ANY).branches(pattern)
    return alt(seq(*body) for _, body, _ in bodies)


def found_in(pattern: str) -> Node:
    """The texts in which a pattern of JSON Schema is found, by the rules of ECMAScript (with the
    flag u) as well as by Python's: where these differ, those by both. `$` is the end alone.

    Raises:
        ValueError: the pattern is wrong, or has what no grammar holds.
    """
    _check_ecmascript(pattern)
    any_text = Repeat(Chars(ANY), 0)
    bodies = _Translator(_by_both, _by_either, minus(ANY, _LINE_ENDS)).branches(pattern)
    return alt(
        seq(*(() if begins else (any_text,)), *body, *(() if ends else (any_text,)))
        for begins, body, ends in bodies
    )


def _refuse(what: str) -> None:
    raise ValueError(f"{what} is not supported in a pattern: leave it out, or write it otherwise")


# Sets of characters ------------------------------------------------------------------------------


def _ascii(category: int, negates: dict[int, int]) -> Ranges:
    return minus(ANY, _ASCII[negates[category]]) if category in negates else _ASCII[category]


@cache
def _widest(category: int) -> Ranges:
    """A category by ECMAScript's rules or by those of Python for Unicode."""
    escape = {
        tokens.CATEGORY_DIGIT: r"\d+",
        tokens.CATEGORY_SPACE: r"[\s\ufeff]+",
        tokens.CATEGORY_WORD: r"\w+",
    }[category]
    everything = "".join(chr(code) for first, last in ANY for code in range(first, last + 1))
    found = (match[0] for match in re.finditer(escape, everything))
    return union(tuple((ord(each[0]), ord(each[-1])) for each in found))


def _by_both(category: int) -> Ranges:
    if category in _NEGATED:
        return minus(ANY, _widest(_NEGATED[category]))
    return _ASCII[category]


def _by_either(category: int) -> Ranges:
    if category in _NEGATED:
        return minus(ANY, _ASCII[_NEGATED[category]])
    return _widest(category)


# Patterns ----------------------------------------------------------------------------------------


class _Translator:
    """Makes nodes of Python's parse trees.

    Args:
        inner: the set of a category, at the least.
        outer: the same, at the most: what a negated set leaves out.
        dot: the set of `.`.
    """

    def __init__(self, inner: Callable[[int], Ranges], outer: Callable[[int], Ranges], dot: Ranges):
        self._inner, self._outer, self._dot = inner, outer, dot

    def branches(self, pattern: str) -> list[tuple[bool, list[Node], bool]]:
        """Whether the pattern begins with an anchor; what is between; whether it ends with one."""
        try:
            tree = parser.parse(pattern, _FLAGS)
        except (re.error, OverflowError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if tree.state.flags != _FLAGS:
            _refuse("a flag")
        found = []
        for parts in self._sequence(tree, 1):
            begins = ends = False
            while parts and parts[0] == _BEGIN:
                begins, parts = True, parts[1:]
            while parts and parts[-1] == _END:
                ends, parts = True, parts[:-1]
            for anchor in (_BEGIN, _END):
                if anchor in parts:
                    _refuse(f"{anchor!r} inside of {pattern!r}")
            found.append((begins, parts, ends))
        return found

    def _sequence(self, items: Sequence, times: int) -> list[list]:
        """Its branches. times: it comes so often by the counts around it."""
        parts = [self._item(operator, value, times) for operator, value in items]
        count = 1
        for branches in parts:
            count *= len(branches)
            if count > _MAX_BRANCHES:
                _refuse(f"having more than {_MAX_BRANCHES} ways between '^' and '$'")
        return [list(chain.from_iterable(chosen)) for chosen in product(*parts)]

    def _item(self, operator: int, value, times: int) -> list[list]:
        """Branches of one part: several only where there are anchors in it."""
        if operator in (tokens.LITERAL, tokens.NOT_LITERAL, tokens.IN, tokens.ANY):
            return [[Chars(self._set(operator, value))]]
        if operator is tokens.AT and value in _ANCHORS:
            return [[_ANCHORS[value]]]
        if operator is tokens.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                _refuse("a flag")
            return self._sequence(inner, times)
        if operator is tokens.BRANCH:
            return _joined([each for arm in value[1] for each in self._sequence(arm, times)])
        if operator in (tokens.MAX_REPEAT, tokens.MIN_REPEAT):
            low, high, inner = value
            high = None if high is tokens.MAXREPEAT else int(high)
            return self._repeated(inner, int(low), high, times)
        if operator is tokens.AT:
            _refuse(_OTHER_PLACES[value])
        _refuse(_NAMES.get(operator, str(operator)))

    def _repeated(self, inner, low: int, high: int | None, times: int) -> list[list]:
        times *= max(1, low if high is None else high)
        if times > MAX_REPEATS:
            _refuse(f"repeating a part more than {MAX_REPEATS} times")
        branches = self._sequence(inner, times)
        if not _has_anchor(branches):
            return [[Repeat(seq(*_joined(branches)[0]), low, high)]]
        if high != 1:
            _refuse("'^' or '$' in a repetition")
        return branches if low else [*branches, []]

    def _set(self, operator: int, value) -> Ranges:
        if operator is tokens.ANY:
            return self._dot
        if operator is not tokens.IN:
            one = ((value, value),)
            return minus(ANY, one) if operator is tokens.NOT_LITERAL else minus(one, ())
        negates = value[0][0] is tokens.NEGATE
        category = self._outer if negates else self._inner
        sets = [_members(kind, each, category) for kind, each in value[negates:]]
        return minus(ANY, union(*sets)) if negates else minus(union(*sets), ())


def _members(kind: int, value, category: Callable[[int], Ranges]) -> Ranges:
    if kind is tokens.CATEGORY:
        return category(value)
    return (value,) if kind is tokens.RANGE else ((value, value),)


def _has_anchor(branches: list[list]) -> bool:
    return any(isinstance(part, str) for branch in branches for part in branch)


def _joined(branches: list[list]) -> list[list]:
    """Branches without an anchor as one."""
    plain = [branch for branch in branches if not _has_anchor([branch])]
    others = [branch for branch in branches if _has_anchor([branch])]
    return [[alt(seq(*branch) for branch in plain)], *others] if plain else others


# ECMAScript --------------------------------------------------------------------------------------


def _check_ecmascript(pattern: str) -> None:
    """Raise ValueError for what Python reads, and ECMAScript otherwise or not at all."""
    in_set = False
    for index, piece in _pieces(pattern):
        if piece[0] == "\\" and piece[1:] not in _SCHEMA_ESCAPES:
            _refuse(piece)
        rest = pattern[index + 1 :]
        if in_set:
            in_set = piece != "]"
            if piece == "[" or (piece in "-&~|" and rest.startswith(piece)):
                _refuse(f"{piece!r} in a set")
        elif piece == "[":
            in_set = True
            if rest.removeprefix("^").startswith("]"):
                _refuse("an empty set '[]'")
        elif piece == "(" and rest.startswith("?") and not rest.startswith("?:"):
            _refuse(f"(?{rest[1:2]}...)")
        elif piece == "{" and not _COUNT.match(pattern, index):
            _refuse("'{' that begins no count")


def _pieces(pattern: str) -> Iterator[tuple[int, str]]:
    """Characters and escapes, with where they are."""
    index = 0
    while index < len(pattern):
        size = 2 if pattern[index] == "\\" else 1
        yield index, pattern[index : index + size]
        index += size
