"""Admission: whether a request starts now, or waits until another one ends.

Concurrent requests share the cost of a step, but their KV evicts states that waiting requests would
resume from. With few running requests the first weighs more, with many the second.
"""

STEP_TOKENS = 200
"""Tokens that can be computed in the time in which a step reads all weights: FLOP per byte of
memory traffic of accelerators, bf16 (A100 312 T / 2.0 T = 156, H200 989 T / 4.8 T = 206, H100 989 T
/ 3.35 T = 295)."""
ANSWERS = 64
"""Answers that their mean length is taken over."""


def saved_by_one_more(running: int, answer_tokens: float) -> float:
    """Work per request, in tokens, saved by one more request next to `running` others.

    A request takes one step for its prompt and one per token of its answer; its share of a step
    falls from 1 / running to 1 / (running + 1). Steps that it has waited count as tokens of its
    answer, so a request never waits for more than its start costs.
    """
    return STEP_TOKENS * (answer_tokens + 1) / (running * (running + 1))


class AnswerLengths:
    """Running mean of the lengths of answers."""

    def __init__(self):
        self.mean = 0.0
        """Tokens."""
        self._observed = 0

    def observe(self, tokens: int) -> None:
        """An answer of so many tokens ended."""
        self._observed = min(self._observed + 1, ANSWERS)
        self.mean += (tokens - self.mean) / self._observed
