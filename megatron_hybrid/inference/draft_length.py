"""How many tokens to draft: as many as raise the tokens per second.

A draft adds a row to a step. It pays while the part of a token that it gains is larger than the
part of the step's time that it adds. The gain follows from the request's own acceptance, the time
from the number of decodes in the step, by costs that are measured once. So a request stops to draft
where its drafts are wrong, or where many run, and begins again. Every input is the same on all
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

FIRST_ACCEPTANCE = 0.7
"""Of a request without drafts so far."""
ACCEPTANCE_WEIGHT = 1 / 8
"""Of the newest draft in the mean of a request."""
TRIAL_STEPS = 16
"""A request whose drafts do not pay tries one again after so many steps."""


@dataclass(frozen=True)
class DraftCosts:
    """What a draft of each decode adds to the time of a step, as a part of it, at some numbers of
    decodes: the acceptance from which drafts pay.

    Raises:
        ValueError: the numbers do not ascend, or there are not as many costs, or one is negative.
    """

    num_decodes: tuple[int, ...] = (1,)
    """Ascending."""
    costs: tuple[float, ...] = (0.0,)
    """Of each; 0.0 drafts as much as possible."""

    def __post_init__(self) -> None:
        ascend = all(a < b for a, b in pairwise(self.num_decodes))
        if not ascend or len(self.num_decodes) != len(self.costs) or min(self.costs) < 0:
            raise ValueError(
                f"costs {self.costs} of {self.num_decodes} decodes: give a cost of at least 0 for "
                "each of some ascending numbers"
            )

    def at(self, num_decodes: int) -> float:
        """Between two numbers on the line; beyond the last one as at it."""
        points = list(zip(self.num_decodes, self.costs))
        for (low, below), (high, above) in pairwise(points):
            if low <= num_decodes < high:
                return below + (above - below) * (num_decodes - low) / (high - low)
        return points[0][1] if num_decodes < points[0][0] else points[-1][1]


def best_length(acceptance: float, cost: float, most: int) -> int:
    """Return the number of drafts, at most `most`, with the most tokens per second.

    Args:
        acceptance: probability that a draft is accepted if those before it are.
        cost: of one draft, as a part of the time of a step without drafts.
    """
    length, tokens, time, gain = 0, 1.0, 1.0, acceptance
    while length < most and gain * time > cost * tokens:
        length, tokens, time, gain = length + 1, tokens + gain, time + cost, gain * acceptance
    return length


@dataclass
class DraftLength:
    """The drafts of one request: how many there were, and how many the next step is to have."""

    num_drafts: int = 0
    num_accepted: int = 0
    acceptance: float = FIRST_ACCEPTANCE
    """Mean of its drafts up to the first rejected one of a step, the newest ones most."""
    _num_steps_without: int = 0

    def choose(self, cost: float, most: int) -> int:
        """The most drafts of the next step: `best_length`, or one for a trial."""
        length = best_length(self.acceptance, cost, most)
        if length or cost >= 1:  # then no draft pays
            return length
        self._num_steps_without += 1
        return min(most, int(self._num_steps_without % TRIAL_STEPS == 0))

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Note a step that had drafts."""
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        for hit in (1.0,) * num_accepted + (0.0,) * (num_accepted < num_drafts):
            self.acceptance += ACCEPTANCE_WEIGHT * (hit - self.acceptance)
