"""Whether a request starts now, at the cost of what has to go for it, or waits for another to end.

What runs side by side shares the steps, and keeps its KV from whoever else would use the
pages. With few running the first weighs more, with many the second: beyond some number each more
pushes out states that requests in line would go on from.
"""

from __future__ import annotations

STEP_TOKENS = 200
"""Tokens that can be computed in the time that a step takes in any case, in which it reads all
weights: FLOP per byte of memory traffic of accelerators, bf16 (A100 312 T / 2.0 T = 156, H200 989 T
/ 4.8 T = 206, H100 989 T / 3.35 T = 295)."""
_PRIOR_MEAN = 128.0
"""Tokens of an answer before any is known."""
_MEMORY = 64
"""Answers that the mean is taken over."""


def saved_by_one_more(running: int, answer_tokens: float) -> float:
    """Work per request, in tokens, that is saved if one more runs beside `running` others: of its
    steps, one for the prompt and one for each token of the answer, a request's part falls from
    1 / running to 1 / (running + 1). Steps in which it waited already count as its own: whoever has
    waited for as much as its start costs waits no more, however long those that run go on."""
    return STEP_TOKENS * (answer_tokens + 1) / (running * (running + 1))


class AnswerLengths:
    """How long answers are, learnt from those that ended."""

    def __init__(self):
        self.mean = _PRIOR_MEAN
        """Tokens."""

    def observe(self, tokens: int) -> None:
        """An answer ended after so many."""
        self.mean += (tokens - self.mean) / _MEMORY
