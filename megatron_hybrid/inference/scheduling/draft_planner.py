"""DraftPlanner: chooses which decodes of a step have drafts, and how many."""

from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.drafters import Drafts
from megatron_hybrid.inference.requests.draft_length import (
    TRIAL_STEPS,
    DraftCosts,
    break_even,
    pay_together,
)
from megatron_hybrid.inference.requests.request import Request, RequestStatus
from megatron_hybrid.inference.scheduling.plan_builder import Chunk, PlanBuilder
from megatron_hybrid.utils.out_of_memory import optional_decision


class DraftPlanner:
    """Adds drafts to the decodes of a plan, as many as pay.

    Args:
        cache: lends room for them.
        drafts: of the decodes, if there are any.
    """

    def __init__(self, cache: PrefixCache, drafts: Drafts | None):
        self._cache = cache
        self.drafts = drafts
        self.costs = DraftCosts()
        self._num_decode_steps = 0  # of steps that may have drafts
        self.num_drafts = 0
        self.accepted_at: Counter[int] = Counter()
        """Accepted drafts by their place in a step, from 0."""

    def lengths(self, builder: PlanBuilder, running: Sequence[Request]) -> dict[Request, int]:
        """Choose how many drafts each decode may have, as many as pay. There are none if drafts
        that are computed before the step do not pay together."""
        if self.drafts is None:
            return {}
        decodes = [
            request
            for request in running
            if request.status is RequestStatus.DECODE
            and request.num_computed + 1 == request.num_tokens
            and request not in builder.restores
        ]
        self._num_decode_steps += bool(decodes)
        cost, lengths = self.costs.at(max(1, len(decodes))), {}
        for request in decodes:
            params = request.params
            most = min(
                self.drafts.most,
                request.longest_forward - 1,
                params.num_tokens_to_generate - request.num_generated - 1,
            )
            if params.num_speculative_tokens is not None:
                most = min(most, params.num_speculative_tokens)
            if most > 0 and (length := request.draft_length.choose(cost, most, self._is_trial)):
                lengths[request] = length
        pay = not self.drafts.are_prepared or self._pay(lengths, len(decodes))
        return lengths if pay else {}

    def prepare(self, lengths: Mapping[Request, int]) -> None:
        """Compute the drafts of all decodes, if the drafter computes them before the step, as far
        as pages are free. It writes pages, so it comes before the plan moves any. The plan can use
        these pages again."""
        if not lengths or not self.drafts.are_prepared:
            return
        try:
            room = {request: self._lend(request, length) for request, length in lengths.items()}
            self.drafts.prepare({request: most for request, most in room.items() if most})
        finally:
            for request in lengths:
                self._cache.settle(request.lease)

    def plan(
        self, builder: PlanBuilder, lengths: Mapping[Request, int], num_decodes: int, budget: int
    ) -> None:
        """Add drafts to decodes, as far as the planned step leaves tokens of its budget and free
        pages. So the rest of the step is the same as without drafts.

        Args:
            lengths: result of `lengths`.
            num_decodes: of the step.
            budget: tokens that the step has room for.
        """
        found, left = [], budget
        for chunk in builder.chunks:
            request = chunk.request
            # Draws after a restore without memory are void, so nothing may be appended to them.
            if not chunk.draws or request in builder.restores or chunk.end - chunk.start > 1:
                continue
            most = min(left, lengths.get(request, 0))
            if most > 0 and (tokens := self.drafts.propose(request, most)):
                found.append((chunk, tokens))
                left -= len(tokens)
        counts = {chunk.request: len(tokens) for chunk, tokens in found}
        if not self.drafts.are_prepared and not self._pay(counts, num_decodes):
            return
        for chunk, tokens in found:
            draws = chunk.request.draft_draws(tokens)
            chunk.draft_draws = draws[: self._lend(chunk.request, len(draws))]
            builder.num_tokens += len(chunk.draft_draws)

    def note(self, chunk: Chunk) -> None:
        """Count the drafts of a chunk that has run."""
        self.num_drafts += len(chunk.draft_draws)
        self.accepted_at.update(range(chunk.num_accepted))
        chunk.request.draft_length.note(len(chunk.draft_draws), chunk.num_accepted)

    def _lend(self, request: Request, num_drafts: int) -> int:
        """Borrow room for drafts after the known tokens of a request, until the step's end. Return
        the number of drafts that have room."""
        end = start = request.num_tokens
        with optional_decision(lambda error: None):
            end = self._cache.lend(request.lease, start, start + num_drafts)
        return end - start

    def _pay(self, counts: Mapping[Request, int], num_decodes: int) -> bool:
        """Return whether a step is to have these numbers of drafts."""
        drafts = [(request.draft_length, count) for request, count in counts.items()]
        return pay_together(drafts, num_decodes, self.costs.at(num_decodes), self._is_trial)

    @property
    def _is_trial(self) -> bool:
        return self._num_decode_steps % TRIAL_STEPS == 0

    def counts(self, running: Sequence[Request]) -> dict[str, int]:
        counts = {
            "draft_tokens": self.num_drafts,
            "draft_tokens_accepted": self.accepted_at.total(),
        }
        if self.drafts is None:
            return counts
        decoding = sum(request.status is RequestStatus.DECODE for request in running)
        cost = self.costs.at(max(1, decoding))
        places = range(self.drafts.most)
        accepted = {f"draft_tokens_accepted_at_{i}": self.accepted_at[i] for i in places}
        least = break_even(cost, self.drafts.most)
        return counts | accepted | {"draft_break_even_permille": round(1000 * least)}
