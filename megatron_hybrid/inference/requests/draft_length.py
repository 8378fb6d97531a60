"""How many tokens to draft: as many as raise the tokens per second.

A draft adds a row to a step. It pays while the part of a token that it gains is larger than the
part of the step's time that it adds. The gain follows from the request's own acceptance, the time
from the number of decodes in the step, by costs that are measured once. So a request stops drafting
while its drafts are wrong, or while many requests run. Every input is the same on all ranks.

A CUDA graph of steps with drafts has all their rows, whatever they hold. There the first draft of a
step has almost the whole cost, and whether to draft is one choice for all decodes together.
"""

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

FIRST_ACCEPTANCE = 0.7
"""Acceptance assumed of a request without drafts so far."""
ACCEPTANCE_WEIGHT = 1 / 8
"""Weight of the newest draft in the mean of a request."""
TRIAL_STEPS = 16
"""One step of so many is a trial of drafts that do not pay. It is the same one for all requests,
which pay for the rows of a graph together."""


@dataclass(frozen=True)
class DraftCost:
    """What drafts add to the time of a step, as parts of the time without any."""

    draft: float = 0.0
    """Time of one draft of each decode."""
    step: float = 0.0
    """Time that the first draft of a step adds to that."""

    def of(self, num_drafts: int, num_decodes: int) -> float:
        """Return the time that all drafts of a step add."""
        return self.step * (num_drafts > 0) + self.draft * num_drafts / num_decodes


@dataclass(frozen=True)
class DraftCosts:
    """The `DraftCost` at some numbers of decodes."""

    num_decodes: tuple[int, ...] = (1,)
    """Ascending."""
    costs: tuple[DraftCost, ...] = (DraftCost(),)
    """Cost at each of these numbers."""

    def at(self, num_decodes: int) -> DraftCost:
        """Interpolate between the two nearest numbers; outside of them, return the nearest cost."""
        points = list(zip(self.num_decodes, self.costs))
        for (low, below), (high, above) in pairwise(points):
            if low <= num_decodes < high:
                part = (num_decodes - low) / (high - low)
                return DraftCost(
                    below.draft + (above.draft - below.draft) * part,
                    below.step + (above.step - below.step) * part,
                )
        return points[0][1] if num_decodes < points[0][0] else points[-1][1]


def best_length(acceptance: float, cost: DraftCost, most: int) -> int:
    """Find the number of drafts, at most `most`, with the most tokens per second, in a step that
    has drafts.

    acceptance: probability that a draft is accepted if those before it are.
    """
    length, tokens, time, gain = 0, 1.0, 1.0 + cost.step, acceptance
    while length < most and gain * time > cost.draft * tokens:
        length, tokens, time, gain = length + 1, tokens + gain, time + cost.draft, gain * acceptance
    return length


def expected(acceptance: float, num_drafts: int) -> float:
    """Return the expected number of accepted drafts, of so many of one request."""
    return sum(acceptance**place for place in range(1, 1 + num_drafts))


def break_even(cost: DraftCost, most: int) -> float:
    """Find the acceptance of all decodes above which drafts pay, in steps of 0.001. It is 1.0 if
    they never do."""

    def pays(permille: int) -> bool:
        length = best_length(permille / 1000, cost, most)
        return expected(permille / 1000, length) > cost.of(length, 1)

    return max(0, bisect_left(range(1001), True, key=pays) - 1) / 1000


@dataclass
class DraftLength:
    """The drafts of one request: how many there were, and how many the next step is to have."""

    num_drafts: int = 0
    num_accepted: int = 0
    acceptance: float = FIRST_ACCEPTANCE
    """Mean of its drafts up to the first rejected one of a step; newer ones weigh more."""

    def choose(self, cost: DraftCost, most: int, is_trial: bool = False) -> int:
        """Return the largest number of drafts of the next step: `best_length`.

        is_trial: all requests whose drafts could pay have drafts in this step: one each, or in a
            graph, which has the rows anyway, as many as if all were accepted.
        """
        length = best_length(self.acceptance, cost, most)
        if not is_trial or (length and not cost.step):
            return length
        could_pay = best_length(1.0, cost, most)
        return could_pay if cost.step else min(could_pay, 1)

    def note(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        for hit in (1.0,) * num_accepted + (0.0,) * (num_accepted < num_drafts):
            self.acceptance += ACCEPTANCE_WEIGHT * (hit - self.acceptance)


def pay_together(
    drafts: Collection[tuple[DraftLength, int]], num_decodes: int, cost: DraftCost, is_trial: bool
) -> bool:
    """Return whether the drafts of a step together gain more than they cost, or in a trial, whether
    they could.

    Args:
        drafts: the history of each request with drafts, and their number.
        num_decodes: of the step, with and without drafts.
        cost: of the step.
    """
    num_drafts = sum(count for _, count in drafts)
    if not num_drafts or not cost.step:  # each request's own pay for themselves, or are a trial
        return True
    gain = sum(expected(length.acceptance, count) for length, count in drafts)
    return (num_drafts if is_trial else gain) > num_decodes * cost.of(num_drafts, num_decodes)
