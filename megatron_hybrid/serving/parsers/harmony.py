"""GPT-OSS: harmony. An answer is messages, each with a header that names its channel.

https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hybrid.serving.parsers import json_text
from megatron_hybrid.serving.parsers.answer_parser import AnswerParser, end_without
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
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_BEGINS = ("<|channel|>", "<|start|>", " to=")
"""Of headers."""
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_CUT = re.compile(
    r"(<\|start\|>[\w. ]*)?( to=[\w.]*)?(<\|channel\|>\w*( to=[\w.]*)?( ?<\|constrain\|>)?[ \w]*)?"
    r"(<[|\w]*)?"
)
"""A header without its end."""
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
    """Of the message that is being read; None: it has not begun."""

    def _parts(self, is_last: bool) -> Iterator[AnswerPart]:
        while self._held:
            if self._header is None:
                if not (yield from self._begin(is_last)):
                    return
            elif _TO.search(self._header):
                if not (yield from self._call(is_last)):
                    return
            else:
                at, found = self._end_from(0)
                if not found and not is_last:
                    at = end_without(self._held, _ENDS)
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
            if end != "<|start|>" and self._held.startswith(end):
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
        at, found = self._end_from(max(0, self._looked - max(map(len, _ENDS))))
        while found and self._is_in_text(at):
            at, found = self._end_from(at + 1)
        self._looked = 0 if found else len(self._held)
        if not found and not is_last:
            return False
        body, self._held = self._held[:at], self._held[at + len(found) :]
        try:
            call = checked(_TO.search(self._header)[1], body, self._tools)
            yield from self._called([call])
        except ValueError:
            self._in_thought = False
            yield from self._said(self._header + _MESSAGE + body)
        self._close(found)
        return True

    def _is_in_text(self, at: int) -> bool:
        """Whether an end is a part of a text in the JSON before it: see `Dialect.read`."""
        before = self._held[max(0, at - 64) : at].rstrip()
        if at != self._end_from(0)[0] and not before.endswith("}"):
            return True
        return json_text.ends_in_string(self._held[:at])

    def _end_from(self, place: int) -> tuple[int, str]:
        """The first end in what is held from a place on; its end if there is none."""
        places = [(self._held.find(end, place), end) for end in _ENDS]
        return min((each for each in places if each[0] >= 0), default=(len(self._held), ""))

    def _close(self, found: str) -> None:
        self._header, self._space, self._skips_space = None, "", False
        if found == "<|start|>":
            self._held = found + self._held
