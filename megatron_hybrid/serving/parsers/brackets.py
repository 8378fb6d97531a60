"""Brackets: follows brackets and texts through a growing answer."""

import re
from collections.abc import Sequence
from functools import cache

JSON_QUOTES = ('"',)
PYTHON_QUOTES = ("'''", '"""', "'", '"')


class Brackets:
    """A search for marks and closing brackets, character by character, which skips quoted texts.

    Args:
        quotes: those around texts; in JSON's and Python's a backslash escapes one character.
        ends: marks to find.
        at: where the search begins.
        closes: whether to find the end of the outermost bracket, too.
    """

    def __init__(
        self,
        quotes: Sequence[str] = JSON_QUOTES,
        ends: Sequence[str] = (),
        at: int = 0,
        closes: bool = True,
    ):
        self._quotes, self._ends, self._closes = quotes, ends, closes
        self._marks = (*quotes, *ends)
        self._tokens = any_of((*self._marks, *"{}()[]"))
        self._margin = max(map(len, self._marks))
        self._at, self._depth = at, 0
        self._quote = ""
        self.found = ""
        """The mark that was found, "" if it was the bracket's end."""

    @property
    def is_open(self) -> bool:
        """Whether a bracket or a quoted text is open."""
        return bool(self._quote) or self._depth > 0

    def find(self, text: str, is_last: bool = False) -> int | None:
        """Return where a mark stands, or the place after the bracket that closes all, or None if
        neither is there yet.

        is_last: nothing follows the text.
        """
        while True:
            if self._quote:
                found = _closing(self._quote).search(text, self._at)
                if found is None:
                    # A backslash at the end escapes what follows.
                    self._at = max(self._at, len(text) - max(1, len(self._quote) - 1))
                    return None
                self._at = found.end()
                self._quote = "" if found[0] == self._quote else self._quote
                continue
            found = self._tokens.search(text, self._at)
            if found is None:
                self._at = max(self._at, len(text) - self._margin + 1)
                return None
            rest = text[found.start() : found.start() + self._margin]
            if not is_last and any(m.startswith(rest) and m != found[0] for m in self._marks):
                self._at = found.start()  # may be the first of three quotes, or of a mark
                return None
            if found[0] in self._quotes:
                self._quote = found[0]
            elif found[0] in self._ends:
                self.found, self._at = found[0], found.end()
                return found.start()
            else:
                self._depth += 1 if found[0] in "{[(" else -1
                if self._depth <= 0 and self._closes:
                    return found.end()
            self._at = found.end()


@cache
def any_of(marks: Sequence[str]) -> re.Pattern:
    """Return the pattern that finds the first of some marks."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


@cache
def _closing(quote: str) -> re.Pattern:
    escapes = r"\\.|" if quote in PYTHON_QUOTES else ""
    return re.compile(escapes + re.escape(quote), re.DOTALL)
