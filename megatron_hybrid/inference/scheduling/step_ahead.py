"""StepAhead: the step of decodes that is launched before the tokens before it are known."""

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.requests.request import Request, RequestStatus
from megatron_hybrid.inference.scheduling.plan_builder import (
    Chunk,
    PlanBuilder,
    Plans,
    draws_of,
)
from megatron_hybrid.inference.scheduling.state_saver import StateSaver
from megatron_hybrid.inference.scheduling.step_plan import StepPlan, StepResult


class StepAhead:
    """Plans the step after the current one, of its decodes, each a token further.

    Args:
        cache: of the requests.
        states: reserves room for those that the step saves.
        plans: of the scheduler.
    """

    def __init__(self, cache: PrefixCache, states: StateSaver, plans: Plans):
        self._cache, self._states, self._plans = cache, states, plans

    def plan(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, the current one; `go_on` completes it. None: it is more than
        decodes, such as a part of a prompt, moves or drafts, or pages are not there."""
        if plan.has_moves or plan.ready:
            return None
        sources = {owner: number for number, (owner, _) in enumerate(plan.draws())}
        ahead = PlanBuilder()
        for chunk in self._plans.current.chunks:
            request, end = chunk.request, chunk.end + 1
            if request.status is RequestStatus.CLOSING:
                continue
            if not chunk.draws or chunk.draft_draws or request.siblings:
                return None
            if request.prompt_needs_logits or not self._cache.extend(request.lease, end):
                return None
            # An answer that ends by its length needs one more row, for its last state alone.
            left = request.params.num_tokens_to_generate - request.num_generated
            if left > 1 or (left == 1 and self._cache.mode == "restore"):
                source = sources[request.request_id]
                ahead.add(Chunk(request, end - 1, end, draws=False, source=source))
        if not ahead.chunks:
            return None
        self._plans.ahead = ahead
        return ahead.plan({})

    def computes(self, request: Request) -> bool:
        """Return whether the step has a row of this request."""
        ahead = self._plans.ahead
        return ahead is not None and any(chunk.request is request for chunk in ahead.chunks)

    def drop_void(self, plan: StepPlan, result: StepResult) -> None:
        """Take out rows that have nothing to compute: their requests have ended before, or their
        tokens were drawn again.

        Args:
            plan: of the step.
            result: of the current step.
        """
        ahead = self._plans.ahead
        ahead.chunks = [
            chunk
            for chunk, work in zip(ahead.chunks, plan.work)
            if (token := result.sampled[work.request_id].token) >= 0
            and token not in work.stops
            and work.request_id not in result.again
        ]

    def go_on(self, plan: StepPlan) -> None:
        """Give the plan its draws and saves, now that its tokens are known, and make it the current
        one."""
        builder = self._plans.current = self._plans.ahead
        self._plans.ahead = None
        self._states.reserve(builder)
        chunks = {chunk.request.request_id: chunk for chunk in builder.chunks}
        for work in plan.work:
            chunk = chunks.get(work.request_id)
            if chunk is not None:
                if chunk.reservations:
                    work.saves = chunk.saves()
                if not chunk.request.done:
                    chunk.draws, work.draws = True, draws_of(chunk.request)
