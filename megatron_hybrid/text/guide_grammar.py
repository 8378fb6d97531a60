"""Builds grammars of guides and writes them in Lark, as llguidance reads it.

A grammar is a dict of rules, by name, each a node. The rule "root" is the answer. llguidance cuts a
text into terminals, each as long as it can be. So what is regular up to the end of the answer is
one terminal, in which each way to read the text counts; elsewhere a terminal ends with a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_NESTING = 200
"""Most nodes inside of each other: llguidance reads them by recursion."""


@dataclass(frozen=True)
class Text:
    """Matches one text, which is not empty."""

    characters: str


@dataclass(frozen=True)
class Regex:
    """Matches a regular expression in Rust's syntax, without `/`."""

    pattern: str


@dataclass(frozen=True)
class AnyText:
    """Matches a text in which none of some texts is."""

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Json:
    """Matches JSON of a schema that `guide_schema` has prepared, given as its JSON."""

    schema: str


@dataclass(frozen=True)
class Seq:
    """Matches all of its parts, one after the other; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """Matches one of its options; without options, nothing."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """Matches a part, `low` to `high` times; None: without a limit."""

    part: Node
    low: int
    high: int | None = None


@dataclass(frozen=True)
class Rule:
    """Matches what the rule of this name matches."""

    name: str


Node = Text | Regex | AnyText | Json | Seq | Alt | Repeat | Rule
EMPTY = Seq(())


def seq(*parts: Node | str) -> Node:
    """Return a sequence of nodes and texts."""
    nodes = tuple(text(part) if isinstance(part, str) else part for part in parts)
    return nodes[0] if len(nodes) == 1 else Seq(nodes)


def text(characters: str) -> Node:
    """Return a node that matches one text."""
    return Text(characters) if characters else EMPTY


def alt(options: Iterable[Node]) -> Node:
    """Return a node that matches one of some options."""
    options = tuple(dict.fromkeys(options))
    return options[0] if len(options) == 1 else Alt(options)


def optional(part: Node) -> Node:
    """Return a node that matches a part or nothing."""
    return Repeat(part, 0, 1)


def escaped(character: str) -> str:
    """Return a character as regular expressions write it, in and out of sets."""
    is_plain = character.isascii() and character.isalnum()
    return character if is_plain else f"\\x{{{ord(character):x}}}"


# Lark --------------------------------------------------------------------------------------------

_EMPTY_TEXT = '""'


def lark(rules: Mapping[str, Node]) -> str:
    """Write a grammar for llguidance.

    Raises:
        ValueError: a rule is not defined, is nested too deeply, or matches no finite text; or free
            text stands where its end cannot be found.
    """
    return _Writer(rules).written()


@dataclass(frozen=True)
class _Rest:
    """What comes after a node: a terminal's expression, then that of rules."""

    terminal: str = ""
    rules: str = ""
    is_last: bool = True
    """The answer ends with it."""


class _Writer:
    """Writes the rules that "root" leads to."""

    def __init__(self, rules: Mapping[str, Node]):
        _check_rules(rules)
        self._rules = rules
        self._depth = 0
        self._terminals: dict[str, str] = {}  # by expression
        self._lines: list[str] = []
        self._names = {"root": "start"}
        self._waiting = ["root"]
        self._regular: dict[str, str] = {}  # terminals of the rules that lead to no recursion
        found = -1
        while found < len(self._regular):
            found = len(self._regular)
            for name in rules.keys() - self._regular.keys():
                if (expression := self._terminal(rules[name])) is not None:
                    self._regular[name] = self._named(expression)

    def written(self) -> str:
        while self._waiting:
            name = self._waiting.pop()
            rest = self._before(self._rules[name], _Rest(is_last=name == "root"))
            self._lines.append(f"{self._names[name]}: {self._flushed(rest) or _EMPTY_TEXT}")
        terminals = (f"{name}: {expression}" for expression, name in self._terminals.items())
        # Without forcing, each way to cut a text into tokens is allowed.
        head = '%llguidance {"no_forcing": true}'
        return "\n".join([head, *self._lines, *terminals])

    def _named(self, expression: str) -> str:
        return self._terminals.setdefault(expression, f"T{len(self._terminals)}")

    def _terminal(self, node: Node) -> str | None:
        """Return the expression of a regular node; "": it is empty; None: it is not regular."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ValueError(f"more than {MAX_NESTING} parts are inside of each other: flatten it")
        found = self._terminal_of(node)
        self._depth -= 1
        return found

    def _terminal_of(self, node: Node) -> str | None:
        match node:
            case Text(characters):
                return f"/{''.join(map(escaped, characters))}/"
            case Regex(pattern):
                return f"/{pattern}/"
            case AnyText(excludes):
                others = "|".join("".join(map(escaped, each)) for each in excludes)
                excluded = f" & ~/(?s:.*)(?:{others})(?s:.*)/" if excludes else ""
                return f"(/(?s:.*)/{excluded})"
            case Rule(name):
                return self._regular.get(name)
            case Repeat(part, low, high):
                inner = self._terminal(part)
                if inner is None:
                    return None
                return f"({inner}){_times(low, high)}" if inner and high != 0 else ""
            case Seq(parts) | Alt(parts):
                inner = list(map(self._terminal, parts))
                if None in inner:
                    return None
                if isinstance(node, Seq):
                    return " ".join(filter(None, inner))
                return f"({' | '.join(each or _EMPTY_TEXT for each in inner)})"
        return None

    def _before(self, node: Node, rest: _Rest) -> _Rest:
        """Return a node and what comes after it."""
        is_inside = bool(rest.rules) or not rest.is_last
        if isinstance(node, AnyText) and is_inside and not (rest.terminal and node.excludes):
            raise ValueError(
                "free text ends where a text comes that it excludes: name that in 'excludes', and "
                "let it follow"
            )
        expression = self._terminal(node)
        if expression is not None and (not is_inside or _is_simple(node)):
            return replace(rest, terminal=" ".join(filter(None, (expression, rest.terminal))))
        match node:
            case Text():
                return _Rest(expression or "", self._flushed(rest), rest.is_last)
            case Seq(parts):
                for part in reversed(parts):
                    rest = self._before(part, rest)
                return rest
            case Alt(options):
                return replace(rest, terminal="", rules=self._chosen(options, rest))
            case Repeat(part, 0, 1):
                return self._before(Alt((part, EMPTY)), rest)
            case Repeat(part, low, high):
                inner = self._flushed(self._before(part, _Rest(is_last=False)))
                own = f"({inner}){_times(low, high)}"
            case Json(schema):
                own = f"%json {schema}"
            case Rule(name):
                if name not in self._names:
                    self._names[name] = f"r{len(self._names)}"
                    self._waiting.append(name)
                own = self._names[name]
        return replace(rest, terminal="", rules=f"{own} {self._flushed(rest)}")

    def _chosen(self, options: Sequence[Node], rest: _Rest) -> str:
        """Return one of some options and what comes after it, as a rule of its own."""
        if rest.rules:
            rest = replace(rest, rules=self._new_rule(rest.rules))
        if len(rest.terminal) > 20:
            rest = replace(rest, terminal=self._named(rest.terminal))
        chosen = (self._flushed(self._before(option, rest)) for option in options)
        return self._new_rule(" | ".join(each or _EMPTY_TEXT for each in chosen))

    def _new_rule(self, body: str) -> str:
        name = f"p{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _flushed(self, rest: _Rest) -> str:
        terminal = self._named(rest.terminal) if rest.terminal else ""
        return " ".join(filter(None, (terminal, rest.rules)))


def _is_simple(node: Node) -> bool:
    """Return whether a regular node has no text in it that other terminals may begin with."""
    match node:
        case Text(characters):
            return len(characters) == 1
        case Regex() | AnyText() | Rule():
            return True
        case Alt(options):
            return all(map(_is_simple, options))
        case Repeat(part):
            return _is_simple(part)
    return False


def _times(low: int, high: int | None) -> str:
    return {(0, None): "*", (0, 1): "?"}.get(
        (low, high), f"{{{low},{'' if high is None else high}}}"
    )


def _check_rules(rules: Mapping[str, Node]) -> None:
    """Raise ValueError for a rule that is mentioned and not there, or that matches no finite text.
    Both orders are taken by turns: a chain of rules needs one turn, whichever way it runs."""
    finite: set[str] = set()
    before = -1
    while len(finite) > before:
        before = len(finite)
        for name in (*rules, *reversed(rules)):
            if name not in finite and _is_finite(rules[name], finite, rules):
                finite.add(name)
    for name in rules:
        if name not in finite:
            raise ValueError(f"no text of finite length fits the rule {name!r}")


def _is_finite(node: Node, finite: set[str], rules: Mapping[str, Node]) -> bool:
    match node:
        case Seq(parts):
            return all([_is_finite(part, finite, rules) for part in parts])
        case Alt(options):
            return any([_is_finite(option, finite, rules) for option in options])
        case Repeat(part, low):
            return _is_finite(part, finite, rules) or low == 0
        case Rule(name):
            if name not in rules:
                raise ValueError(f"the rule {name!r} is not defined")
            return name in finite
    return True


# EBNF --------------------------------------------------------------------------------------------

MAX_EBNF = 1 << 16
"""Characters of a grammar."""
MAX_REPEATS = 1000
"""Of a part, by braces."""
_EBNF_TOKEN = re.compile(
    r'\s+|#[^\n]*|(?P<rule>[\w-]+)\s*::=|(?P<name>[\w-]+)|"(?P<text>(?:[^"\\\n]|\\.)*)"'
    r"|\[(?P<set>(?:[^\]\\\n]|\\.)*)\]|\{\s*(?P<low>\d*)\s*(?P<comma>,?)\s*(?P<high>\d*)\s*\}"
    r"|(?P<sign>[()|*+?.])"
)
_EBNF_CHARACTER = re.compile(r"\\x(..)|\\u(.{4})|\\U(.{8})|\\(.)|([^\\])", re.DOTALL)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}


def ebnf(source: str, prefix: str = "") -> dict[str, Node]:
    """Read a grammar in EBNF (GBNF).

    Args:
        prefix: before the names of its rules.

    Raises:
        ValueError: it is wrong, too long, nested too deeply, or repeats a part too often.
    """
    if len(source) > MAX_EBNF:
        raise ValueError(
            f"the guide's grammar has {len(source)} characters, the most is {MAX_EBNF}: shorten it"
        )
    return _EbnfReader(source, prefix).rules


class _EbnfReader:
    def __init__(self, source: str, prefix: str):
        self._prefix, self._depth = prefix, 0
        self._tokens = list(_ebnf_tokens(source))
        self.rules: dict[str, Node] = {}
        while self._tokens:
            kind, name = self._tokens.pop(0)
            if kind != "rule":
                raise ValueError(f"the guide's grammar needs a rule, such as root ::= {name!r}")
            if prefix + name in self.rules:
                raise ValueError(f"the guide's grammar defines the rule {name!r} twice")
            self.rules[prefix + name] = self._options()
            if self._next() == ("sign", ")"):
                raise ValueError("the guide's grammar closes a bracket that is not open")
        if f"{prefix}root" not in self.rules:
            raise ValueError("the guide's grammar has no rule 'root'")

    def _next(self) -> tuple[str, Any]:
        return self._tokens[0] if self._tokens else ("end", "")

    def _options(self) -> Node:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ValueError(
                f"the guide's grammar has over {MAX_NESTING} open brackets: flatten it"
            )
        options: list[list[Node]] = [[]]
        while (token := self._next())[0] not in ("rule", "end") and token != ("sign", ")"):
            self._tokens.pop(0)
            if token == ("sign", "|"):
                options.append([])
            elif token[0] == "times" or (token[0] == "sign" and token[1] in "*+?"):
                if not options[-1]:
                    raise ValueError(f"the guide's grammar repeats nothing by {token[1]!r}")
                options[-1].append(Repeat(options[-1].pop(), *_counts(token[1])))
            else:
                options[-1].append(self._part(*token))
        self._depth -= 1
        return alt(seq(*parts) for parts in options)

    def _part(self, kind: str, value: str) -> Node:
        if kind == "name":
            return Rule(self._prefix + value)
        if kind == "text":
            return text("".join(_ebnf_characters(value)))
        if kind == "set":
            return Regex(_ebnf_set(value))
        if value == ".":
            return Regex("(?s:.)")
        inner = self._options()
        if self._next() != ("sign", ")"):
            raise ValueError("the guide's grammar has a bracket that is not closed")
        self._tokens.pop(0)
        return inner


def _ebnf_tokens(source: str) -> Iterator[tuple[str, Any]]:
    at = 0
    while at < len(source):
        token = _EBNF_TOKEN.match(source, at)
        if token is None:
            line = source.count("\n", 0, at) + 1
            raise ValueError(
                f"the guide's grammar cannot be read in line {line} at {source[at : at + 20]!r}"
            )
        at = token.end()
        if token["low"] is not None:
            if not token["low"] and not token["high"]:
                raise ValueError("the guide's grammar has braces without a number")
            yield "times", (token["low"], token["comma"], token["high"])
        elif token.lastgroup is not None:
            yield token.lastgroup, token[token.lastgroup]


def _counts(times: str | tuple[str, str, str]) -> tuple[int, int | None]:
    if isinstance(times, str):
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[times]
    low, comma, high = times
    if any(len(each) > 4 or int(each or 0) > MAX_REPEATS for each in (low, high)):
        raise ValueError(f"the guide's grammar repeats a part over {MAX_REPEATS} times: use * or +")
    return int(low or 0), (int(high) if high else None) if comma else int(low)


def _ebnf_characters(source: str) -> Iterator[str]:
    for found in _EBNF_CHARACTER.finditer(source):
        code = found[1] or found[2] or found[3]
        if code is None:
            yield found[5] or _SHORT.get(found[4], found[4])
            continue
        try:
            yield chr(int(code, 16))
        except (ValueError, OverflowError):
            raise ValueError(f"the guide's grammar has a bad escape: {found[0]!r}") from None


def _ebnf_set(source: str) -> str:
    """Return a set of characters as regular expressions write it."""
    negates = source.startswith("^")
    signs = [found[0] for found in _EBNF_CHARACTER.finditer(source[negates:])]
    codes = [next(_ebnf_characters(sign)) for sign in signs]
    written, index = "", 0
    while index < len(codes):
        is_range = index + 2 < len(codes) and signs[index + 1] == "-"
        last = codes[index + 2] if is_range else codes[index]
        if last < codes[index]:
            raise ValueError(
                f"the guide's grammar has a range that ends before it begins: {source!r}"
            )
        written += escaped(codes[index]) + (f"-{escaped(last)}" if is_range else "")
        index += 3 if is_range else 1
    if not written:
        if negates:
            return "(?s:.)"
        raise ValueError("the guide's grammar has a set without characters: []")
    return f"[{'^' if negates else ''}{written}]"


def json_node(schema: Any) -> Json:
    """Return a node of a prepared schema."""
    return Json(json.dumps(schema))
