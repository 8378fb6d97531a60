"""Block: calls of functions at one place of a growing answer."""

from megatron_hybrid.serving.parsers.brackets import JSON_QUOTES, Brackets, any_of
from megatron_hybrid.serving.parsers.dialect import (
    FENCE,
    JSON_OPENERS,
    Dialect,
    Pieces,
    ToolCall,
    Tools,
    json_calls,
)

_MAX_TRIES = 64
"""Ends that are tried one by one; of more, those that make the text longer by a quarter."""
_LEAST = 512
"""What a try costs, in characters, however short its text is."""


class Block:
    """Finds where calls end, and reads them. Takes time in proportion to the text's length.

    Args:
        dialect: of the calls.
        text: an answer.
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
        """Return where the calls end, and the calls; None: more of the answer has to come.

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
        """Return where an answer ends that was cut in the end mark."""
        sizes = range(len(self._end) - 1, 0, -1)
        return len(text) - next((n for n in sizes if text.endswith(self._end[:n])), 0)

    def _after(self, stop: int, mark: str) -> int:
        """Return where the answer goes on after a mark: the next call's is not taken."""
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
        pieces = self._dialect.mended(text[self._start : stop], self._tools, found is not None)
        if not any(isinstance(each, ToolCall) for each in pieces or ()):
            return self.no_call, []
        return after if found is None else self._after(stop, found[0]), pieces
