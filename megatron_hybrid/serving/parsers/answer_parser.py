"""AnswerParser: takes reasoning and calls of functions out of a growing answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from megatron_hybrid.serving.parsers.block import Block
from megatron_hybrid.serving.parsers.dialect import Call, Dialect, Pieces
from megatron_hybrid.serving.parsers.parts import AnswerPart, Content, Reasoning, ToolCall, new_id
from megatron_hybrid.serving.parsers.reasoning_format import ReasoningFormat

_SPACE = re.compile(r"\s*")
_FEW, _MAX_FAILED = 256, 32
"""Limit: after so many texts of more than a few characters that look like calls and are none, the
rest of an answer is content: so that it is read in time that grows with its length."""


class AnswerParser:
    """The parts of one answer. However the answer is cut into texts, its reasoning, content and
    calls are the same.

    A call is given when it is whole: what looks like one, and is none of a function that there is,
    or was cut, is content, as the model wrote it.

    Args:
        dialect: of calls.
        thoughts: marks of reasoning; None: all is content.
        tools: functions that may be called, as in OpenAI's requests; none: calls are content.
        is_thinking: the prompt ends inside of reasoning.
        max_calls: those after are left out; None: any number.
        must_call: all of the answer is calls; one that was cut is no content.
    """

    def __init__(
        self,
        dialect: Dialect,
        thoughts: ReasoningFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        is_thinking: bool = False,
        max_calls: int | None = None,
        must_call: bool = False,
    ):
        self._dialect, self._thoughts = dialect, thoughts
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._max_calls, self._must_call = max_calls, must_call
        self._held, self._at = "", 0  # what is not given yet begins there
        self._searched = 0  # so far no mark begins
        self._block: Block | None = None  # that is being read
        self._is_blank = False  # all that is held is space
        self._failed = 0
        self._space = ""  # before what may be a call
        self._in_thought = is_thinking
        self._skips_space = is_thinking
        self._late: list[Call] = []  # that were written inside of reasoning
        self._late_texts: list[str] = []  # they, and more reasoning
        self._may_be_bare = bool(self._tools and dialect.bare)
        self.num_calls = 0
        """Number of calls so far."""

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason of an answer that ended with the engine's reason."""
        return "tool_calls" if self.num_calls and reason == "stop" else reason

    def add(self, text: str) -> list[AnswerPart]:
        """The parts that a text completes."""
        self._held += text
        if self._is_blank and text.isspace():  # decides nothing
            return []
        return self._given(is_last=False)

    def end(self) -> list[AnswerPart]:
        """The parts that are complete as the answer ends."""
        given, late = self._given(is_last=True), self._late
        if late:
            after = "".join(self._late_texts[1:]).strip()
            self._late = []
            given += [Reasoning(after)] if after else []
            given += self._called(late)
        return given

    def _given(self, is_last: bool) -> list[AnswerPart]:
        given = list(self._parts(is_last))
        if self._block is None:  # which knows places in what is held
            self._held, self._searched = self._held[self._at :], max(0, self._searched - self._at)
            self._at = 0
        self._is_blank = self._block is None and self._held.isspace()
        return given

    def _parts(self, is_last: bool) -> Iterator[AnswerPart]:
        while self._at < len(self._held):
            if self._block is not None:
                if (read := self._block.read(self._held, is_last)) is None:
                    return
                cost, self._block = self._block.cost, None
                yield from self._read(*read, cost)
            elif (begins := self._begins_bare()) or (begins is None and not is_last):
                if begins is None:
                    return
                self._block = Block(self._dialect, self._held, self._at, self._tools)
            elif self._may_repeat_thought(is_last):
                return
            elif (found := self._mark()) is not None:
                yield from self._said(self._held[self._at : found.start()], before=True)
                self._at = self._searched = found.start()
                if found[0] in self._dialect.begins:
                    self._block = Block(self._dialect, self._held, self._at, self._tools)
                else:
                    self._at = found.end()
                    self._in_thought, self._space = found[0] == self._thoughts.open, ""
                    self._skips_space = True
            else:
                self._searched = max(
                    self._at, len(self._held) - max(map(len, self._marks), default=0)
                )
                text = self._held[self._at :]
                end = len(text) if is_last else end_without(text, self._marks)
                self._at += end
                yield from self._said(text[:end])
                return

    def _may_repeat_thought(self, is_last: bool) -> bool:
        """Leave out the mark that the prompt ended with, which some models repeat. Returns whether
        it may follow."""
        if not (self._in_thought and self._skips_space and self._thoughts):
            return False
        at, mark = _SPACE.match(self._held, self._at).end(), self._thoughts.open
        while self._held.startswith(mark, at):
            self._at = at + len(mark)
            at = _SPACE.match(self._held, self._at).end()
        rest = self._held[at : at + len(mark)]
        return mark.startswith(rest) and not is_last

    def _mark(self) -> re.Match | None:
        """The next that ends what is being said."""
        marks = self._marks
        if not marks:
            return None
        return any_of(marks).search(self._held, max(self._at, self._searched))

    @property
    def _marks(self) -> tuple[str, ...]:
        marks: tuple[str, ...] = ()
        if self._thoughts is not None and not self._in_thought:
            marks = (self._thoughts.open,)
        elif self._thoughts is not None:
            marks = (self._thoughts.close,)
        return (*marks, *self._dialect.begins) if self._reads_calls else marks

    @property
    def _reads_calls(self) -> bool:
        return bool(self._tools) and self._failed <= _MAX_FAILED

    def _begins_bare(self) -> bool | None:
        """Whether what is held begins a call without a mark; None: only space is there so far."""
        if not self._may_be_bare or self._in_thought or not self._reads_calls:
            return False
        at = _SPACE.match(self._held, self._at).end()
        if self.num_calls and self._held.startswith(self._dialect.separator, at):
            at = _SPACE.match(self._held, at + len(self._dialect.separator)).end()
        if not self._held.startswith(self._dialect.bare, at):
            return None if at == len(self._held) else False
        self._space += self._held[self._at : at]
        self._at = at
        return True

    def _read(self, stop: int, pieces: Pieces, cost: int) -> Iterator[AnswerPart]:
        """A block was read, up to a place. cost: characters that were looked at."""
        written, self._at = self._held[self._at : stop], stop
        self._searched = stop
        calls = [each for each in pieces if isinstance(each, Call)]
        if calls and self._in_thought:
            self._late += calls
            self._late_texts.append(self._space + written)
            self._space = ""
        elif calls:
            self._space, self._skips_space = "", True
            yield from self._thought()
            for each in pieces:
                if isinstance(each, Call):
                    yield from self._called([each])
                else:
                    may_be_bare = self._may_be_bare
                    yield from self._said(each)
                    self._may_be_bare = may_be_bare
            self._skips_space = True
        else:
            self._failed += cost > _FEW
            self._may_be_bare = False
            yield from self._said(written)

    def _thought(self) -> list[AnswerPart]:
        """Calls inside of reasoning were none, as the answer says more."""
        text, self._late, self._late_texts = "".join(self._late_texts), [], []
        return [Reasoning(text)] if text else []

    def _said(self, text: str, before: bool = False) -> list[AnswerPart]:
        """More of what is being said. before: a mark follows, so space at the end may be left
        out."""
        if self._skips_space:
            text = text.lstrip()
        else:
            text = self._space + text
        self._space = ""
        if before:
            said = text.rstrip()
            self._space = text[len(said) :]
            text = said
        if not text:
            return []
        self._skips_space = False
        if self._late and self._in_thought:
            self._late_texts.append(text)
            return []
        if self._in_thought:
            return [Reasoning(text)]
        self._may_be_bare = False
        return self._thought() + ([] if self._must_call else [Content(text)])

    def _called(self, calls: Sequence[Call]) -> Iterator[ToolCall]:
        for name, arguments, id in calls:
            if self.num_calls == self._max_calls:
                return
            given = {"id": id or new_id(self._dialect.num_id_chars)}
            yield ToolCall(self.num_calls, name, arguments, **given)
            self.num_calls += 1


@cache
def any_of(marks: Sequence[str]) -> re.Pattern:
    """Finds the first of some marks."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def end_without(text: str, marks: Sequence[str]) -> int:
    """Return where the part of a text ends that belongs to no mark, whatever follows: before the
    beginning of one, and before white space, which a mark may follow."""
    if not marks:
        return len(text)
    end = len(text)
    for mark in marks:
        for size in range(1, len(mark)):
            if text.endswith(mark[:size]):
                end = min(end, len(text) - size)
    return len(text[:end].rstrip())
