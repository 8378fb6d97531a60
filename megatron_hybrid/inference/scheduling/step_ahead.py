"""StepAhead: a step that is launched before the tokens of the one before it are known."""

from collections.abc import Sequence

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.requests.request import Request, RequestStatus
from megatron_hybrid.inference.scheduling.plan_builder import Chunk, PlanBuilder
from megatron_hybrid.inference.scheduling.step_plan import StepPlan, StepResult, Unpark


class StepAhead:
    """The step after the current one, while that one runs: its decodes take tokens that are not
    known yet.

    Args:
        cache: of the requests.
    """

    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self.builder: PlanBuilder | None = None
        """The step, if it is launched."""

    def may_follow(self, plan: StepPlan) -> bool:
        """Return whether a step can be planned while `plan`, the current one, runs. It cannot if
        `plan` parks or unparks requests, loads, has drafts, scores a prompt, or forks samples."""
        return not (
            plan.parks
            or plan.loads
            or any(isinstance(restore, Unpark) for restore in plan.restores)
            or any(work.draft_draws or work.scored or len(work.draws) > 1 for work in plan.work)
            or any(len(ready.draws) > 1 for ready in plan.ready)
        )

    def begin(self, current: PlanBuilder) -> PlanBuilder:
        """Begin the step, without any work."""
        launched = {chunk.request: chunk.end for chunk in current.chunks}
        launched |= {request: request.num_tokens for request in current.ready}
        self.builder = PlanBuilder(launched=launched, is_ahead=True)
        return self.builder

    def plan_decodes(
        self, builder: PlanBuilder, plan: StepPlan, running: Sequence[Request], most: int
    ) -> None:
        """Add the next row of each request whose prompt is computed with the current step.

        Args:
            builder: of the step; `is_short` is set where a row has no room.
            plan: the current one.
            running: all running requests, in order.
            most: largest number of rows.
        """
        sources = {owner: number for number, (owner, _) in enumerate(plan.draws())}
        for request in running:
            start = builder.start_of(request)
            is_known = start < request.num_tokens
            if is_known and request.status is RequestStatus.PREFILL:
                continue
            if request in builder.launched and not self._goes_on(request):
                continue
            if builder.num_tokens == most:
                return
            if not self._cache.extend(request.lease, start + 1):
                builder.is_short = True
                return
            draws = start + 1 == request.num_tokens and not request.done
            source = -1 if is_known else sources[request.request_id]
            builder.add(Chunk(request, start, start + 1, draws, source=source))

    def _goes_on(self, request: Request) -> bool:
        """Return whether a request has a row after the token that the current step draws, if that
        token does not end it. An answer that ends by its length needs a row for its last state."""
        left = request.params.num_tokens_to_generate - request.num_generated
        is_closing = request.status is RequestStatus.CLOSING
        return not is_closing and (left > 1 or (left == 1 and self._cache.mode == "restore"))

    def computes(self, request: Request) -> bool:
        """Return whether the step has a row of this request."""
        chunks = () if self.builder is None else self.builder.chunks
        return any(chunk.request is request for chunk in chunks)

    def drop_void(self, plan: StepPlan, result: StepResult) -> None:
        """Remove the rows of requests that have ended before, whose token was drawn again, or that
        could not be restored.

        Args:
            plan: of the step.
            result: of the current step.
        """
        self.builder.is_short = bool(result.again)
        for work in plan.work:
            is_void = work.request_id in result.unrestored or work.request_id in result.again
            if work.source >= 0 and not is_void:
                token = result.sampled[work.request_id].token
                is_void = token < 0 or token in work.stops
            if is_void:
                work.draws, work.saves = {}, []
                self.builder.drop_chunk(work.request_id)
