"""AnswerParser: takes reasoning and calls of functions out of a growing answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_hybrid.serving.parsers.dialect import Call, Dialect
from megatron_hybrid.serving.parsers.json_text import Brackets
from megatron_hybrid.serving.parsers.parts import AnswerPart, Content, Reasoning, ToolCall, new_id
from megatron_hybrid.serving.parsers.reasoning_format import ReasoningFormat


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
        max_calls: those behind are left out; None: any number.
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
        self._held = ""  # begins a part, and is not given yet
        self._looked = 0  # so much of it holds no whole call
        self._brackets = Brackets()  # in it
        self._space = ""  # before what may be a call
        self._in_thought = is_thinking
        self._skips_space = is_thinking
        self._in_calls = False
        self._may_be_bare = bool(self._tools and dialect.bare)
        self.num_calls = 0
        """So far."""

    def finish_reason(self, reason: str) -> str:
        """As OpenAI has it, of an answer that ended with the engine's reason."""
        return "tool_calls" if self.num_calls and reason == "stop" else reason

    def add(self, text: str) -> list[AnswerPart]:
        """The parts that a text completes."""
        self._held += text
        return list(self._parts(is_last=False))

    def end(self) -> list[AnswerPart]:
        """The parts that are complete as the answer ends."""
        return list(self._parts(is_last=True))

    def _parts(self, is_last: bool) -> Iterator[AnswerPart]:
        while self._held:
            if self._in_calls:
                if (read := self._read(is_last)) is None:
                    return
                stop, calls = read
                written, self._held = self._held[:stop], self._held[stop:]
                self._in_calls, self._looked = False, 0
                if calls:
                    self._space, self._skips_space = "", True
                    yield from self._called(calls)
                else:
                    self._may_be_bare = False
                    yield from self._said(written)
            elif (begins := self._begins_bare()) or (begins is None and not is_last):
                if begins is None:
                    return
                self._in_calls = True
            else:
                marks = self._marks
                found = [(self._held.find(mark), mark) for mark in marks if mark in self._held]
                start, mark = min(found, default=(-1, ""))
                if not mark:
                    end = len(self._held) if is_last else end_without(self._held, marks)
                    said, self._held = self._held[:end], self._held[end:]
                    yield from self._said(said)
                    return
                yield from self._said(self._held[:start], before=True)
                self._held = self._held[start:]
                if mark == self._dialect.begin and not self._in_thought:
                    self._in_calls = True
                else:
                    self._held = self._held[len(mark) :]
                    self._in_thought, self._space = not self._in_thought, ""
                    self._skips_space = True

    @property
    def _marks(self) -> list[str]:
        """That end what is being said."""
        marks = []
        if self._thoughts is not None:
            marks.append(self._thoughts.close if self._in_thought else self._thoughts.open)
        if self._tools and self._dialect.begin and not self._in_thought:
            marks.append(self._dialect.begin)
        return marks

    def _begins_bare(self) -> bool | None:
        """Whether what is held begins a call without a mark; None: only space is there so far."""
        if not self._may_be_bare or self._in_thought:
            return False
        text = self._held.lstrip()
        if self.num_calls and self._dialect.separator:
            text = text.removeprefix(self._dialect.separator).lstrip()
        if not text.startswith(self._dialect.bare):
            return None if not text else False
        self._space += self._held[: len(self._held) - len(text)]
        self._held = text
        return True

    def _read(self, is_last: bool) -> tuple[int, list[Call]] | None:
        """The calls at the start of what is held."""
        end = self._dialect.end if self._held.startswith(self._dialect.begin) else ""
        if self._looked == 0:
            self._brackets = Brackets(self._dialect.quotes)
        if end:
            may_end = self._held.find(end, max(0, self._looked - len(end) + 1)) >= 0
        else:
            may_end = self._brackets.closes(self._held)
        looked, self._looked = self._looked, len(self._held)
        if not is_last and not may_end:
            return None
        return self._dialect.read(self._held, self._tools, is_last, looked)

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
        if self._in_thought:
            return [Reasoning(text)]
        self._may_be_bare = False
        return [] if self._must_call else [Content(text)]

    def _called(self, calls: Sequence[Call]) -> Iterator[ToolCall]:
        for name, arguments, id in calls:
            if self.num_calls == self._max_calls:
                return
            given = {"id": id or new_id(self._dialect.num_id_chars)}
            yield ToolCall(self.num_calls, name, arguments, **given)
            self.num_calls += 1


def end_without(text: str, marks: Sequence[str]) -> int:
    """Where the part of a text ends that belongs to no mark, whatever follows: before the beginning
    of one, and before white space, which a mark may follow."""
    if not marks:
        return len(text)
    end = len(text)
    for mark in marks:
        for size in range(1, len(mark)):
            if text.endswith(mark[:size]):
                end = min(end, len(text) - size)
    return len(text[:end].rstrip())
