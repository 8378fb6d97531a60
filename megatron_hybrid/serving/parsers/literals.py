"""Literals: values and calls as programs write them, to JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from megatron_hybrid.serving.parsers.json_text import decoded

MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][-+]?\d+)?")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_STRING = re.compile(r"'[^'\\\n]*(?:\\.[^'\\\n]*)*'|\"[^\"\\\n]*(?:\\.[^\"\\\n]*)*\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_PLAIN = "\\'\"/"
_WORDS = {"True": "true", "False": "false", "None": "null"} | {
    word: word for word in ("true", "false", "null")
}


class Literals:
    """Reads one text from left to right. All methods raise ValueError for what is no literal, or is
    cut.

    Args:
        text: to read.
        at: from here.
        quote: the mark around texts without escapes; "": they are Python's.
    """

    def __init__(self, text: str, at: int = 0, quote: str = ""):
        self.text, self.at = text, at
        self._quote, self._depth = quote, 0

    def take(self, *texts: str) -> str:
        """One of some texts, behind space."""
        self.at = _SPACE.match(self.text, self.at).end()
        for each in texts:
            if self.text.startswith(each, self.at):
                self.at += len(each)
                return each
        raise ValueError(f"one of {texts} is missing")

    def has(self, text: str) -> bool:
        """Whether a text is next; if so, it is taken."""
        try:
            return bool(self.take(text))
        except ValueError:
            return False

    @property
    def is_over(self) -> bool:
        """Whether only space follows."""
        return _SPACE.match(self.text, self.at).end() == len(self.text)

    def name(self) -> str:
        """A name."""
        return self._match(_NAME)

    def members(self, colon: str, close: str, key: Callable[[], str]) -> str:
        """The members of an object up to its end, as JSON. key: reads the name of one."""
        found: dict[str, str] = {}
        while not self.has(close):
            if found:
                self.take(",")
                if self.has(close):
                    break
            name = key()
            if name in found:
                raise ValueError(f"{name} comes twice")
            self.take(colon)
            found[name] = self.value()
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {v}" for name, v in found.items())
        return "{" + ", ".join(pairs) + "}"

    def value(self) -> str:
        """A value, as JSON."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        try:
            if self.has("{"):
                return self.members(":", "}", self._key)
            if self.has("["):
                return self._list()
            if self._begins_string():
                return json.dumps(self._string(), ensure_ascii=False)
            if number := _NUMBER.match(self.text, self.at):
                decoded(number[0])
                self.at = number.end()
                return number[0]
            return _WORDS[self.name()]
        except KeyError as error:
            raise ValueError(f"{error} is no value") from None
        finally:
            self._depth -= 1

    def _list(self) -> str:
        found = []
        while not self.has("]"):
            if found:
                self.take(",")
                if self.has("]"):
                    break
            found.append(self.value())
        return "[" + ", ".join(found) + "]"

    def _key(self) -> str:
        return self._string() if self._begins_string() else self._bare_key()

    def _bare_key(self) -> str:
        if not self._quote:
            raise ValueError("a key is no text")
        return self.name()

    def _begins_string(self) -> bool:
        self.at = _SPACE.match(self.text, self.at).end()
        return self.text.startswith((self._quote,) if self._quote else ("'", '"'), self.at)

    def _string(self) -> str:
        if self._quote:
            start = self.at + len(self._quote)
            if (end := self.text.find(self._quote, start)) < 0:
                raise ValueError("a text is cut")
            self.at = end + len(self._quote)
            found = self.text[start:end]
        else:
            found = _ESCAPE.sub(_unescaped, self._match(_STRING)[1:-1])
        return found.encode("utf-16", "surrogatepass").decode("utf-16")

    def _match(self, pattern: re.Pattern) -> str:
        self.at = _SPACE.match(self.text, self.at).end()
        if (found := pattern.match(self.text, self.at)) is None:
            raise ValueError(f"there is something else at {self.at}")
        self.at = found.end()
        return found[0]


def _unescaped(found: re.Match) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPED.get(code) or (code if code in _PLAIN else found[0])
