"""Writes regular expressions of guides in Rust's syntax: Python's, and those of JSON Schema.

Python's own parser reads them. What is not on the list here is refused by its name.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from re import _constants as tokens
from re import _parser as parser

from megatron_hybrid.text.guide_grammar import MAX_NESTING, escaped

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

_ASCII = {"DIGIT": "0-9", "SPACE": r"\x20\t\n\r\x0c\x0b", "WORD": "0-9A-Za-z_"}
_WIDEST = {
    "DIGIT": r"\p{N}",
    "SPACE": r"\p{White_Space}\x1c-\x1f\x{feff}",
    "WORD": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}",
}
"""Categories by ECMAScript's rules or by those of Python for Unicode, and more."""
_ANY = "(?s:.)"
_IN_LINE = r"[^\n\r\x{2028}\x{2029}]"

_SCHEMA_ESCAPES = {*"dDsSwWnrtfvbxu", *string.punctuation}
"""What ECMAScript and Python read alike after a backslash; numbers are read on."""
_COUNT = re.compile(r"\{[0-9]+(,[0-9]*)?\}")


def full_match(pattern: str) -> str:
    """Write the texts that a pattern matches from end to end, as `re.fullmatch` with DOTALL and
    ASCII.

    Raises:
        ValueError: the pattern is wrong, or has what no grammar holds.
    """
    bodies = _Translator(_ASCII, _ASCII, _ANY).branches(pattern)
    return _either("".join(body) for _, body, _ in bodies)


def found_in(pattern: str) -> str:
    """Write the texts in which a pattern of JSON Schema is found, by the rules of ECMAScript (with
    the flag u) as well as by Python's: where these differ, those by both. `$` is the end alone.

    Raises:
        ValueError: the pattern is wrong, or has what no grammar holds.
    """
    _check_ecmascript(pattern)
    bodies = _Translator(_ASCII, _WIDEST, _IN_LINE).branches(pattern)
    around = {True: "", False: "(?s:.*)"}
    each = (f"{around[begins]}{''.join(body)}{around[ends]}" for begins, body, ends in bodies)
    return f"^{_either(each)}$"


def _refuse(what: str) -> None:
    raise ValueError(f"{what} is not supported in a pattern: leave it out, or write it otherwise")


class _Translator:
    """Writes Python's parse trees.

    Args:
        least: the sets of categories, where they allow characters.
        most: the same, where they forbid characters.
        dot: the set of `.`.
    """

    def __init__(self, least: Mapping[str, str], most: Mapping[str, str], dot: str):
        self._least, self._most, self._dot = least, most, dot
        self._depth = 0

    def branches(self, pattern: str) -> list[tuple[bool, list[str], bool]]:
        """Return whether the pattern begins with an anchor, what is between, and whether it ends
        with one; of each branch."""
        try:
            tree = parser.parse(pattern, _FLAGS)
        except (re.error, OverflowError) as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        except RecursionError:
            raise ValueError("the pattern is nested too deeply") from None
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

    def _sequence(self, items: Sequence, times: int) -> list[list[str]]:
        """Return its branches. times: it comes so often by the counts around it."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ValueError("the pattern is nested too deeply")
        parts = [self._item(operator, value, times) for operator, value in items]
        self._depth -= 1
        count = 1
        for branches in parts:
            count *= len(branches)
            if count > _MAX_BRANCHES:
                _refuse(f"having more than {_MAX_BRANCHES} ways between '^' and '$'")
        return [list(chain.from_iterable(chosen)) for chosen in product(*parts)]

    def _item(self, operator: int, value, times: int) -> list[list[str]]:
        """Return branches of one part: several only where there are anchors in it."""
        if operator in (tokens.LITERAL, tokens.NOT_LITERAL, tokens.IN, tokens.ANY):
            return [[self._set(operator, value)]]
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

    def _repeated(self, inner, low: int, high: int | None, times: int) -> list[list[str]]:
        times *= max(1, low if high is None else high)
        if times > MAX_REPEATS:
            _refuse(f"repeating a part more than {MAX_REPEATS} times")
        branches = self._sequence(inner, times)
        if not _has_anchor(branches):
            count = f"{{{low},{'' if high is None else high}}}"
            return [[f"(?:{''.join(_joined(branches)[0])}){count}"]]
        if high != 1:
            _refuse("'^' or '$' in a repetition")
        return branches if low else [*branches, []]

    def _set(self, operator: int, value) -> str:
        if operator is tokens.ANY:
            return self._dot
        if operator is tokens.LITERAL:
            return _character(value)
        if operator is tokens.NOT_LITERAL:
            return f"[^{_character(value)}]"
        negates = value[0][0] is tokens.NEGATE
        members = (self._member(kind, each, negates) for kind, each in value[negates:])
        return f"[{'^' if negates else ''}{''.join(members)}]"

    def _member(self, kind: int, value, negates: bool) -> str:
        if kind is not tokens.CATEGORY:
            ends = value if kind is tokens.RANGE else (value,)
            return "-".join(map(_character, ends))
        _, *negated, name = str(value).split("_")
        sets = self._most if bool(negated) != negates else self._least
        return f"[^{sets[name]}]" if negated else sets[name]


def _character(code: int) -> str:
    if 0xD800 <= code <= 0xDFFF:
        _refuse(f"\\u{code:x}, half of a character,")
    return escaped(chr(code))


def _either(ways: Iterator[str]) -> str:
    return f"(?:{'|'.join(dict.fromkeys(ways))})"


def _has_anchor(branches: list[list[str]]) -> bool:
    return any(part in (_BEGIN, _END) for branch in branches for part in branch)


def _joined(branches: list[list[str]]) -> list[list[str]]:
    """Return branches without an anchor as one."""
    plain = [branch for branch in branches if not _has_anchor([branch])]
    others = [branch for branch in branches if _has_anchor([branch])]
    return [[_either(map("".join, plain))], *others] if plain else others


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
    """Yield characters and escapes, with where they are."""
    index = 0
    while index < len(pattern):
        size = 2 if pattern[index] == "\\" else 1
        yield index, pattern[index : index + size]
        index += size
