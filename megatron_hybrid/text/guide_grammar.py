"""Builds grammars of guides and writes them in Lark, as llguidance reads it.

A grammar is a node. llguidance cuts a text into terminals, each as long as possible. So a part that
is regular up to the end of the answer is one terminal, in which each way to read the text counts;
elsewhere a terminal ends with a text.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_hybrid.text.guide_regex import MAX_NESTING, escaped


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
    """Matches a text that contains none of some texts."""

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Json:
    """Matches JSON of a schema that `guide_schema` has prepared, given as its JSON."""

    schema: str


@dataclass(frozen=True)
class Grammar:
    """Matches the texts of a grammar in Lark."""

    source: str


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
    """Matches a part `low` to `high` times; None sets no limit."""

    part: Node
    low: int
    high: int | None = None


Node = Text | Regex | AnyText | Json | Grammar | Seq | Alt | Repeat
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


# Lark --------------------------------------------------------------------------------------------

_EMPTY_TEXT = '""'


def lark(root: Node) -> str:
    """Write a grammar for llguidance.

    Raises:
        ValueError: the grammar is nested too deeply, or the end of free text cannot be found.
    """
    return _Writer().written(root)


@dataclass(frozen=True)
class _Rest:
    """The grammar after a node: a terminal's expression, then that of rules."""

    terminal: str = ""
    rules: str = ""
    is_last: bool = True
    """Whether the answer ends with it."""


class _Writer:
    def __init__(self) -> None:
        self._depth = 0
        self._terminals: dict[str, str] = {}  # by expression
        self._lines: list[str] = []
        self._grammars: list[dict[str, str]] = []

    def written(self, root: Node) -> str:
        start = self._flushed(self._before(root, _Rest())) or _EMPTY_TEXT
        terminals = (f"{name}: {expression}" for expression, name in self._terminals.items())
        # Without forcing, each way to cut a text into tokens is allowed.
        head = '%llguidance {"no_forcing": true}'
        source = "\n".join([head, f"start: {start}", *self._lines, *terminals])
        return json.dumps({"grammars": [{"lark_grammar": source}, *self._grammars]})

    def _named(self, expression: str) -> str:
        return self._terminals.setdefault(expression, f"T{len(self._terminals)}")

    def _terminal(self, node: Node) -> str | None:
        """Return the expression of a regular node, "" if it is empty; None if it is not regular."""
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
            case Grammar(source):
                own = f"@g{len(self._grammars)}"
                self._grammars.append({"name": own[1:], "lark_grammar": source})
        return replace(rest, terminal="", rules=f"{own} {self._flushed(rest)}")

    def _chosen(self, options: Sequence[Node], rest: _Rest) -> str:
        """Add a rule for one of some options and what comes after it. Return its name."""
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
    """Return whether no text in a regular node may begin like other terminals."""
    match node:
        case Text(characters):
            return len(characters) == 1
        case Regex() | AnyText():
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


# EBNF --------------------------------------------------------------------------------------------

MAX_EBNF = 1 << 16
"""Most characters of a grammar."""
MAX_REPEATS = 1000
"""Most repetitions of a part, by braces."""
_EBNF_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*|\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}|[()]',
    re.DOTALL,
)


def ebnf(source: str) -> Grammar:
    """Read a grammar in EBNF (GBNF).

    Raises:
        ValueError: the grammar is wrong, too long, nested too deeply, or repeats too often.
    """
    if len(source) > MAX_EBNF:
        raise ValueError(f"it has {len(source)} characters, the most is {MAX_EBNF}: shorten it")
    depth = 0
    for token in _EBNF_TOKEN.finditer(source):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth > MAX_NESTING:
            raise ValueError(f"it has over {MAX_NESTING} open brackets: flatten it")
        if any(len(n or "") > 4 or int(n or 0) > MAX_REPEATS for n in token.groups()):
            raise ValueError(f"it repeats a part over {MAX_REPEATS} times: use * or +")
    if re.search(r"(?<!\\)(\\\\)*\\[uU]", source):  # llguidance reads it differently
        raise ValueError("it has a character by its code: write the character itself")
    import llguidance.gbnf_to_lark as gbnf

    try:
        rules = gbnf.GrammarParser().parse(source)
        ending = _reached(
            rules,
            lambda node, n: (
                1 if hasattr(node, "alternatives") else min(n, getattr(node, "min_times", n))
            ),
        )
        # Rules without recursion: any other one makes the library go through all rules.
        for name in _reached(rules, lambda node, n: n + (getattr(node, "name", "") == "root")):
            rules[name].rule_is_terminal = name != "root"
        gbnf.resolve(rules)
    except Exception as error:  # it raises errors of many kinds
        raise ValueError(f"{error}") from None
    start = rules["start"]
    if len(ending) < len(rules):
        raise ValueError("no text of finite length fits one of its rules")
    # A rule without recursion is one terminal, in which each way to read the text counts.
    lines = [f"{rule.name}: {rule.alternatives}" for rule in rules.values() if rule is not start]
    head = "start: START\nSTART" if start.alternatives.is_terminal() else "start"
    return Grammar("\n".join([f"{head}: {start.alternatives}", *lines]))


def _reached(rules: Mapping[str, Any], needed: Callable[[Any, int], int]) -> set[str]:
    """Return the names of llguidance's rules that are reached, from the ends of the grammar.

    needed: returns how many of a node's parts, given their number, must be reached before it is.
    """
    users, missing = defaultdict(list), {}  # by node id; a node may be in many places
    nodes = [rule.alternatives for rule in rules.values()]
    for node in nodes:  # both lists grow: each node comes once, so the time grows with the grammar
        if id(node) not in missing:
            target = rules.get(getattr(node, "name", ""))
            parts = [target.alternatives] if target else node.children()
            missing[id(node)] = needed(node, len(parts))
            for part in parts:
                users[id(part)].append(id(node))
            nodes += parts
    found = [node for node, count in missing.items() if count == 0]
    for node in found:
        for user in users[node]:
            missing[user] -= 1
            if missing[user] == 0:
                found.append(user)
    return {name for name, rule in rules.items() if missing[id(rule.alternatives)] <= 0}
