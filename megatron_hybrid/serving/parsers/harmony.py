"""GPT-OSS: harmony. An answer is messages, each with a header that names its channel.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hybrid.serving.parsers.answer_parser import AnswerParser, any_of, end_without
from megatron_hybrid.serving.parsers.brackets import Brackets
from megatron_hybrid.serving.parsers.dialect import (
    Dialect,
    Json,
    checked,
    json_schema,
    repeated,
)
from megatron_hybrid.serving.parsers.parts import AnswerPart
from megatron_hybrid.serving.parsers.reasoning_format import ReasoningFormat

_MESSAGE = "<|message|>"
_START = "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
_AN_END = any_of(_ENDS)
_BEGINS = ("<|channel|>", _START, " to=")
"""Marks that begin headers."""
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_CUT = re.compile(
    r"(<\|start\|>[\w. ]*)?( to=[\w.-]*)?"
    r"(<\|channel\|>\w*( to=[\w.-]*)?( ?<\|constrain\|>)?[ \w]*)?"
    r"(<[|\w]*)?"
)
"""A header without its end."""
_HEADER = re.compile(r"<\|start\|>\w[^\n]{0,200}?<\|message\|>")
_BEGUN = re.compile(r"<\|start\|>(?:\w[^\n]{0,210})?")
"""What may become a header."""
THOUGHTS = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")


@dataclass(frozen=True)
class Harmony(Dialect):
    """Read by `HarmonyParser`."""

    begin: str = "<|channel|>commentary"
    inner: tuple[str, ...] = ("<|start|>", "<|end|>", "<|constrain|>", "<|message|>")
    content_begin: str = "<|channel|>final<|message|>"

    def form(self, functions: Sequence[Json], several: bool) -> Json:
        """One call: its end ends the answer."""
        return repeated(
            functions,
            lambda each: (
                f"<|channel|>commentary to=functions.{each['name']} <|constrain|>json{_MESSAGE}",
                json_schema(each),
                "",
            ),
            False,
            "",
        )


OPENAI = Harmony()


class HarmonyParser(AnswerParser):
    """Channel `analysis` is reasoning, a message to a function a call, all else content."""

    _header: str | None = None
    """Header of the message that is being read; None: it has not begun."""
    _brackets: Brackets | None = None
    """Brackets in the call that is being read."""

    def _parts(self, is_last: bool) -> Iterator[AnswerPart]:
        while self._held:
            if self._header is None:
                if not (yield from self._begin(is_last)):
                    return
            elif _TO.search(self._header):
                if not (yield from self._call(is_last)):
                    return
            else:
                at, found = self._end(is_last)
                said, self._held = self._held[:at], self._held[at + len(found) :]
                channel = _CHANNEL.search(self._header)
                self._in_thought = channel is not None and channel[1] == "analysis"
                yield from self._said(said)
                if not found:
                    return
                self._close(found)

    def _begin(self, is_last: bool) -> Iterator[AnswerPart]:
        """Read a header; whether there is one."""
        yield from ()
        for end in _ENDS:
            if end != _START and self._held.startswith(end):
                self._held = self._held[len(end) :]
                return True
        if not any(b.startswith(self._held) or self._held.startswith(b) for b in _BEGINS):
            self._header = ""  # a text without a header
            return True
        header, found, rest = self._held.partition(_MESSAGE)
        if found:
            self._header, self._held = header, rest
        elif is_last and _CUT.fullmatch(self._held):  # says nothing
            self._held = ""
        elif is_last:
            self._header = ""
        return bool(found) or self._header is not None

    def _call(self, is_last: bool) -> Iterator[AnswerPart]:
        """Read a call; whether it is over."""
        if self._brackets is None:
            self._brackets = Brackets(ends=_ENDS)
        at = self._brackets.find(self._held, is_last)
        if at is None and not is_last:
            return False
        found = self._brackets.found
        if at is None:  # the end may have been a stop
            at, found = self._end(is_last) if self._brackets.is_open else (len(self._held), "")
        self._brackets = None
        body, self._held = self._held[:at], self._held[at + len(found) :]
        try:
            call = checked(_TO.search(self._header)[1], body.strip() or "{}", self._tools)
            yield from self._called([call])
        except ValueError:
            self._in_thought = False
            yield from self._said(self._header + _MESSAGE + body)
        self._close(found)
        return True

    def _end(self, is_last: bool) -> tuple[int, str]:
        """Return where the message ends, and by which mark; "": it may end there. A `<|start|>`
        that begins no header is text: an answer may speak of it."""
        for found in _AN_END.finditer(self._held):
            rest = self._held[found.start() :]
            if found[0] != _START or _HEADER.match(rest):
                return found.start(), found[0]
            if is_last and _CUT.fullmatch(rest):
                return found.start(), _START
            if not is_last and _BEGUN.fullmatch(rest):
                return found.start(), ""
        return (len(self._held) if is_last else end_without(self._held, _ENDS)), ""

    def _close(self, found: str) -> None:
        self._header, self._space, self._skips_space = None, "", False
        if found == _START:
            self._held = found + self._held
