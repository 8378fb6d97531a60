"""GPT-OSS: harmony. An answer is messages, each with a header that names its channel.

https://cookbook.openai.com/articles/openai-harmony
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hybrid.serving.parsers.answer_parser import AnswerParser, end_without
from megatron_hybrid.serving.parsers.brackets import Brackets
from megatron_hybrid.serving.parsers.dialect import (
    AnswerPart,
    Dialect,
    Json,
    ReasoningFormat,
    checked,
    headed,
)

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_AN_END = re.compile(r"(?:<\|(?:end|call|return)\|>){1,8}|<\|start\|>")
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def _header(least: int) -> str:
    """Return the expression of a header whose names have at least so many characters."""
    to = rf"(?: to=[^\s<]{{{least},256}})?"
    part = rf"(?:<\|channel\|>\w{{0,64}}{to}(?: ?<\|constrain\|>)?(?: ?\w{{{least},64}})?){{0,2}}"
    return rf"(?:<\|start\|>[\w.]{{{least},64}})?{to}{part}"


_HEADER = re.compile(rf"({_header(1)} ?)<\|message\|>")
_CUT = re.compile(rf"{_header(0)}(?: ?(?:<(?:\|\w{{0,9}}\|?)?)?| t?o?)")
"""An unfinished header."""
THOUGHTS = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


@dataclass(frozen=True)
class Harmony(Dialect):
    """The dialect that `HarmonyParser` reads."""

    begin: str = "<|channel|>commentary"
    inner: tuple[str, ...] = ("<|start|>", "<|end|>", "<|constrain|>", "<|message|>")
    content_begin: str = "<|channel|>final<|message|>"

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        """Return the format of one call: its end ends the answer."""
        head = f"<|channel|>commentary to=functions.{{}} <|constrain|>json{_MESSAGE}"
        return headed(functions, head, several=False)


OPENAI = Harmony()


class HarmonyParser(AnswerParser):
    """Channel `analysis` is reasoning, a message to a function a call, all else content."""

    _header: str | None = None
    """Header of the message that is being read, None before the message has begun."""
    _brackets: Brackets | None = None
    """Brackets in the call that is being read."""

    def _parts(self, is_last: bool) -> Iterator[AnswerPart]:
        while self._held:
            if self._header is None:
                if (header := _HEADER.match(self._held)) is not None:
                    self._begin(header)
                elif self._may_be_header(0, is_last):
                    self._held = "" if is_last else self._held
                    return
                else:
                    self._header = ""  # a text without a header
            elif _TO.search(self._header):
                if not (yield from self._call(is_last)):
                    return
            else:
                at, stop, header = self._next(is_last)
                said, self._held = self._held[:at], self._held[stop:]
                self._in_thought = "<|channel|>analysis" in self._header
                yield from self._said(said)
                if header is None:
                    return
                self._begin(header)

    def _begin(self, header: re.Match) -> None:
        self._header, self._held = header[1], header.string[header.end() :]
        self._space, self._skips_space = "", False

    def _may_be_header(self, at: int, is_last: bool) -> bool:
        """Return whether what follows is the beginning of a header. At the answer's end that counts
        only if it is empty or begins with a mark."""
        is_begun = not is_last or self._held.startswith("<|", at) or at == len(self._held)
        return is_begun and _CUT.fullmatch(self._held, at) is not None

    def _next(self, is_last: bool) -> tuple[int, int, re.Match | None]:
        """Return where a text ends, where the answer goes on, and the next header, if it is there.
        Marks count before a header and at the answer's end; elsewhere they are text."""
        for found in _AN_END.finditer(self._held):
            over = found.start() if found[0] == "<|start|>" else found.end()
            if (header := _HEADER.match(self._held, over)) is not None:
                return found.start(), len(self._held), header
            if self._may_be_header(over, is_last):
                at = found.start()
                return at, len(self._held) if is_last else at, None
        at = len(self._held) if is_last else end_without(self._held, _ENDS)
        return at, at, None

    def _call(self, is_last: bool) -> Iterator[AnswerPart]:
        """Read a call. Return whether it is over."""
        if self._brackets is None:
            self._brackets = Brackets(ends=_ENDS, closes=False)
        at = self._brackets.find(self._held, is_last)
        if at is None and not is_last:
            return False
        found = self._brackets.found
        if at is None:  # the end may have been a stop
            cut = _AN_END.search(self._held) if self._brackets.is_open else None
            at, found = (cut.start(), cut[0]) if cut else (len(self._held), "")
        self._brackets = None
        stop = at if found == "<|start|>" else at + len(found)
        body, self._held = self._held[:at], self._held[stop:]
        try:
            call = checked(_TO.search(self._header)[1], body, self._tools)
            yield from self._called([call])
        except ValueError:
            self._in_thought = False
            yield from self._said(self._header + _MESSAGE + body)
        self._header, self._space, self._skips_space = None, "", False
        return True
