"""AnswerParser: takes reasoning and calls of functions out of a growing answer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from megatron_hybrid.serving.parsers.brackets import JSON_QUOTES, Brackets, any_of
from megatron_hybrid.serving.parsers.dialect import (
    FENCE,
    JSON_OPENERS,
    AnswerPart,
    Content,
    Dialect,
    Pieces,
    Reasoning,
    ReasoningFormat,
    ToolCall,
    Tools,
    begins_with,
    json_calls,
)
from megatron_hybrid.serving.parsers.json_text import BETWEEN

_SPACE = re.compile(r"\s*")
_MAX_REREAD = 1 << 20
"""Most characters that are read for calls and then again. The rest of an answer is content, so that
the time grows in proportion to its length."""
_MAX_TRIES = 64
"""Ends that are tried one by one; after them, only those that make the text a quarter longer."""
_LEAST = 512
"""The least cost of a try, in characters, however short its text is."""


class Block:
    """Finds where calls end, and reads them. Takes time in proportion to the text's length.

    Args:
        dialect: that of the calls.
        text: the answer so far.
        at: where its mark, or its first call, begins.
        tools: functions that may be called.
    """

    def __init__(self, dialect: Dialect, text: str, at: int, tools: Tools):
        self._dialect, self._tools = dialect, tools
        self._has_mark = bool(dialect.begin) and text.startswith(dialect.begin, at)
        self._end = dialect.end if self._has_mark or not dialect.bare else ""
        self._ends = tuple(filter(None, (self._end, dialect.begin)))
        self._start = at + len(dialect.begin) if self._has_mark else at
        self.no_call = self._start if self._has_mark else at + 1
        """Place where the answer goes on if there is no call."""
        self.cost = _LEAST
        """Characters that were read, once it is read."""
        self._brackets: Brackets | None = None
        self._is_bare = False  # its texts have no quotes
        self._looked, self._tries, self._tried = self._start, 0, 0

    def read(self, text: str, is_last: bool) -> tuple[int, Pieces] | None:
        """Return where the calls end, and the calls, or None if more of the answer is needed.

        text: the answer so far.
        is_last: nothing follows.
        """
        if self._brackets is None:
            start = self._dialect.first(text, self._start, is_last)
            if start is None or start < 0:
                return None if start is None else (self.no_call, [])
            if not self._end and text.startswith(FENCE, start):
                self._end, start = FENCE, start + len(FENCE)
                self._ends = (FENCE, *self._ends)
            self._is_bare = not (self._dialect.quotes or text.startswith(JSON_OPENERS, start))
            quotes = self._dialect.quotes or JSON_QUOTES
            self._brackets = Brackets(quotes, self._ends, start, closes=not self._end)
        if self._is_bare:
            return self._tried_ends(text, is_last)
        stop = self._brackets.find(text, is_last)
        if stop is None and not is_last:
            return None
        after = len(text) if stop is None else self._after(stop, self._brackets.found)
        self.cost += after - self._start
        pieces = self._inside(text[self._start : self._last(text) if stop is None else stop])
        return (after, pieces) if pieces is not None else self._mended(text, after)

    def _inside(self, text: str) -> Pieces | None:
        pieces = self._dialect.inside(text, self._tools)
        return json_calls(text, self._tools) if pieces is None else pieces

    def _last(self, text: str) -> int:
        """Return where an answer ends without the beginning of an end mark that was cut."""
        sizes = range(len(self._end) - 1, 0, -1)
        return len(text) - next((n for n in sizes if text.endswith(self._end[:n])), 0)

    def _after(self, stop: int, mark: str) -> int:
        """Return where the answer goes on: after the end mark, or before the next call's mark."""
        return stop + len(mark) if mark == self._end else stop

    def _tried_ends(self, text: str, is_last: bool) -> tuple[int, Pieces] | None:
        """Try ends of a dialect whose values are bare texts, in which the end mark may stand."""
        while (found := any_of(self._ends).search(text, self._looked)) is not None:
            stop = found.start()
            self._looked = stop + 1
            length = stop - self._start
            if self._tries >= _MAX_TRIES and length < 1.25 * self._tried:
                continue
            self._tries, self._tried = self._tries + 1, length
            self.cost += max(_LEAST, length)
            pieces = self._inside(text[self._start : stop])
            if pieces is not None:
                return self._after(stop, found[0]), pieces
        self._looked = max(self._looked, len(text) - max(map(len, self._ends)) + 1)
        if not is_last:
            return None
        self.cost += len(text) - self._start
        last = text.rfind(self._end, self._start)
        for stop in (last, self._last(text)) if last >= 0 else (self._last(text),):
            pieces = self._inside(text[self._start : stop])
            if pieces is not None:  # the end mark may have been a stop
                return min(len(text), stop + len(self._end)), pieces
        return self._mended(text, len(text))

    def _mended(self, text: str, after: int) -> tuple[int, Pieces]:
        found = any_of(self._ends).search(text, self._start, after) if self._ends else None
        stop = after if found is None else found.start()
        # A bare text may have the mark that begins a call, too: then no call follows it.
        is_begin = found is not None and self._is_bare and found[0] != self._end
        if is_begin and self._dialect.first(text, found.end(), True) == -1:
            return self.no_call, []
        pieces = self._dialect.mended(text[self._start : stop], self._tools, found is not None)
        if not any(isinstance(each, ToolCall) for each in pieces or ()):
            return self.no_call, []
        return after if found is None else self._after(stop, found[0]), pieces


class AnswerParser:
    """The parts of one answer. However the answer is cut into texts, its reasoning, content and
    calls are the same.

    A call is given when it is whole. What looks like a call, but was cut or names no known
    function, is content, as the model wrote it.

    Args:
        dialect: that of calls.
        thoughts: marks of reasoning; without them all is content.
        tools: functions that may be called, as in OpenAI's requests; if none, calls are content.
        is_thinking: whether the prompt ends inside of reasoning.
        max_calls: calls after this many are left out; None means any number.
        must_call: whether all of the answer is calls; then a call that was cut is no content.
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
        self._held, self._at = "", 0  # text, which is not given from `_at` on
        self._searched = 0  # no mark begins before this place
        self._block: Block | None = None  # the one that is being read
        self._is_blank = False  # all that is held is space
        self._reread = 0
        self._space = ""  # before what may be a call
        self._gap = ""  # space that was left out around calls
        self._has_content = False
        self._was_closed = False  # whether a mark has just closed the text
        self._in_thought = is_thinking
        self._skips_space = is_thinking
        self._late: list[ToolCall] = []  # calls inside of reasoning
        self._late_texts: list[str] = []  # their texts, and more reasoning
        self._may_be_bare = bool(self._tools and dialect.bare)
        self._ids: set[str] = set()  # ids of the calls so far
        self.num_calls = 0
        """Number of calls so far."""

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason of an answer that ended with the engine's reason."""
        return "tool_calls" if self.num_calls and reason == "stop" else reason

    def add(self, text: str) -> list[AnswerPart]:
        """Return the parts that a text completes."""
        # Python appends in place to a text that nothing else refers to: a long call is not copied.
        held, self._held = self._held, ""
        held += text
        self._held = held
        if self._is_blank and text.isspace():  # decides nothing
            return []
        return self._given(is_last=False)

    def end(self) -> list[AnswerPart]:
        """Return the parts that are complete as the answer ends."""
        given, late = self._given(is_last=True), self._late
        if late:
            after = "".join(self._late_texts[1:]).strip()
            self._late = []
            given += [Reasoning(after)] if after else []
            given += self._called(late)
        return given

    def _given(self, is_last: bool) -> list[AnswerPart]:
        given = list(self._parts(is_last))
        if self._block is None:  # a block knows places in the held text
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
            elif (begins := self._begins_bare(is_last)) or (begins is None and not is_last):
                if begins is None:
                    return
                self._block = Block(self._dialect, self._held, self._at, self._tools)
            elif self._may_begin_thought(is_last):
                return
            elif (found := self._mark()) is not None:
                yield from self._said(self._held[self._at : found.start()], before=True)
                self._at = self._searched = found.start()
                if found[0] in self._dialect.begins:
                    self._block = Block(self._dialect, self._held, self._at, self._tools)
                    continue
                self._at = found.end()
                self._was_closed = True
                if self._in_thought:  # text to the user ends a thought, too
                    self._in_thought, self._space, self._skips_space = False, "", True
            else:
                longest = max(map(len, self._marks), default=0)
                self._searched = max(self._at, len(self._held) - longest)
                text = self._held[self._at :]
                end = len(text) if is_last else end_without(text, self._marks)
                self._at += end
                yield from self._said(text[:end])
                return

    def _may_begin_thought(self, is_last: bool) -> bool:
        """Take the mark of reasoning where it may begin: before there is content, after a mark that
        closes content, and again where the prompt ended with it, as some models repeat it. Return
        whether the mark may follow in later text."""
        is_free = self._was_closed or not self._has_content
        may_begin = self._skips_space if self._in_thought else is_free
        if not (may_begin and self._thoughts):
            return False
        at, mark = _SPACE.match(self._held, self._at).end(), self._thoughts.open
        while self._held.startswith(mark, at):
            self._at = at + len(mark)
            self._in_thought, self._space, self._skips_space = True, "", True
            at = _SPACE.match(self._held, self._at).end()
        rest = self._held[at : at + len(mark)]
        return mark.startswith(rest) and not is_last

    def _mark(self) -> re.Match | None:
        """Find the next mark that ends what is being said."""
        at, marks = max(self._at, self._searched), self._marks
        return any_of(marks).search(self._held, at) if marks else None

    @property
    def _marks(self) -> tuple[str, ...]:
        marks = self._dialect.unsaid
        marks += (self._thoughts.close,) if self._thoughts and self._in_thought else ()
        return (*marks, *self._dialect.begins) if self._reads_calls else marks

    @property
    def _reads_calls(self) -> bool:
        return bool(self._tools) and self._reread <= _MAX_REREAD

    def _begins_bare(self, is_last: bool) -> bool | None:
        """Return whether what is held begins a call without a mark, None if more has to come."""
        if not self._may_be_bare or self._in_thought or not self._reads_calls:
            return False
        at = BETWEEN.match(self._held, self._at).end()
        openers = (*filter(None, [self._dialect.bare]), *JSON_OPENERS)
        if not (begins := begins_with(openers, self._held, at, is_last)):
            return begins
        self._space += self._held[self._at : at]
        self._at = at
        return True

    def _read(self, stop: int, pieces: Pieces, cost: int) -> Iterator[AnswerPart]:
        """Yield the parts of a block that ends at `stop`. cost: characters that were read."""
        written, self._at = self._held[self._at : stop], stop
        self._searched = stop
        self._reread += max(0, cost - len(written))
        calls = [each for each in pieces if isinstance(each, ToolCall)]
        # Without an end mark, further calls without a mark may follow.
        goes_on = self._may_be_bare or (bool(calls) and not self._dialect.end)
        may_be_bare = bool(pieces) and goes_on
        if calls and self._in_thought:
            self._late += calls
            self._late_texts.append(self._space + written)
            self._space = ""
        elif calls:
            self._gap, self._space, self._skips_space = self._gap + self._space, "", True
            yield from self._thought()
            for each in pieces:
                yield from self._called([each]) if isinstance(each, ToolCall) else self._said(each)
            self._skips_space = True
        else:
            yield from self._said(written)
        self._may_be_bare = may_be_bare

    def _thought(self) -> list[AnswerPart]:
        """Return the calls inside of reasoning as text, since the answer says more after them."""
        text, self._late, self._late_texts = "".join(self._late_texts), [], []
        return [Reasoning(text)] if text else []

    def _said(self, text: str, before: bool = False) -> list[AnswerPart]:
        """Return more of what is being said. With `before` a mark follows, so that space at the end
        may be left out."""
        if self._skips_space:
            whole, text = text, text.lstrip()
            self._gap += whole[: len(whole) - len(text)]
        else:
            text = self._space + text
        self._space = ""
        if before:
            whole, text = text, text.rstrip()
            self._space = whole[len(text) :]
        if not text:
            return []
        self._skips_space = self._was_closed = False
        if self._late and self._in_thought:
            self._late_texts.append(text)
            return []
        if self._in_thought:
            return [Reasoning(text)]
        gap = "\n" if "\n" in self._gap else self._gap[:1]
        text = gap + text if self._has_content else text
        self._may_be_bare, self._has_content, self._gap = False, True, ""
        return self._thought() + ([] if self._must_call else [Content(text)])

    def _called(self, calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
        for call in calls:
            if self.num_calls == self._max_calls:
                return
            id, length = call.id, self._dialect.num_id_chars
            if not id or id in self._ids:
                id = uuid4().hex[:length] if length else f"call_{uuid4().hex[:24]}"
            self._ids.add(id)
            yield replace(call, id=id, index=self.num_calls)
            self.num_calls += 1


def end_without(text: str, marks: Sequence[str]) -> int:
    """Return where the part of a text ends that belongs to no mark, whatever follows: before the
    beginning of a mark, and before white space, which a mark may follow."""
    if not marks:
        return len(text)
    end = len(text)
    for mark in marks:
        for size in range(1, len(mark)):
            if text.endswith(mark[:size]):
                end = min(end, len(text) - size)
    return len(text[:end].rstrip())
