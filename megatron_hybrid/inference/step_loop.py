"""StepLoop: runs steps, and returns after a failed one the requests that are blamed for it."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.exclusive import exclusive
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.metrics.meter import ActivityLog
from megatron_hybrid.inference.metrics.prometheus import Stats
from megatron_hybrid.inference.rank_checks import check_equal_decisions
from megatron_hybrid.inference.requests.request import Request, RequestOutput
from megatron_hybrid.inference.scheduling.scheduler import RestoreFailedError
from megatron_hybrid.inference.scheduling.step_plan import StepPlan
from megatron_hybrid.inference.weight_calls import WeightCalls
from megatron_hybrid.inference.weights.updates import WeightsUnfinishedError
from megatron_hybrid.inference.worker.model_runner import Launched
from megatron_hybrid.utils import out_of_memory
from megatron_hybrid.utils.interrupts import defer_sigint

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the steps of an engine. Methods with the name of one of the engine's have its effect.

    Args:
        parts, live, weights: of the engine.
        stats: of the engine, for the log.
    """

    def __init__(
        self,
        parts: EngineParts,
        live: LiveRequests,
        weights: WeightCalls,
        stats: Callable[[], Stats],
    ):
        self._parts, self._live, self._weights, self._stats = parts, live, weights, stats
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._scheduler, self._runner = parts.scheduler, parts.runner
        self._activity = ActivityLog()
        self._launched: Launched | None = None  # the step that was launched ahead
        parts.guard.settle = self.settle
        self._failed: list[Request] | None = None  # to cancel after a step that raised
        self._num_decided_by_memory = out_of_memory.num_decided_by_memory
        self._has_drafts = self._scheduler.draft_planner.drafts is not None
        self._runs_ahead = (
            parts.config.async_scheduling
            and parts.model.pg_collection.pp.size() == 1  # one stage alone knows the tokens
            and not self._has_drafts
        )
        self.num_steps = 0
        self.num_ahead = 0
        """Steps that were launched before the tokens of the step before were known."""
        self.peak_pages_in_use = 0

    @exclusive
    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        self._guard.refuse_inside_step("step")
        self._failed = None
        self._guard.refuse_suspended("step")
        with self._control.checked("step()"):
            if self._parts.model.training:
                raise RuntimeError(
                    "the model is in training mode, in which answers and what is cached of them "
                    "would be noisy: call model.eval(), or update_weights() after a training step"
                )
            reason = self._weights.unfinished
            if reason is not None and not self._control.has_failed:  # else no weights help
                raise WeightsUnfinishedError(reason)
        began, num_steps = time.perf_counter(), self.num_steps
        if self._ranks.is_first and self._activity.is_due(began):
            self._activity.write(self._stats(), began)
        with defer_sigint(), self._control.inside("step()"):
            self._control.note("step()")
            with self._stepping():
                self._run()
        self._activity.until = ended = time.perf_counter()
        if self.num_steps > num_steps:
            self._live.meter.step.observe(ended - began)
        return self._live.take_outputs()

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Make a context for a step, or for its end, in which an error rolls back the step."""
        self._guard.is_stepping = True
        try:
            self._check_decisions()  # decisions of calls since the last step
            yield
            self._check_decisions()
        except BaseException as error:
            self._launched = None
            self._failed = self._scheduler.fail()
            if not isinstance(error, RestoreFailedError):  # all ranks raise that one
                self._control.report(error)
            raise
        finally:
            self._guard.is_stepping = False
            self._make_outputs()

    @torch.inference_mode()
    def settle(self) -> None:
        """Wait for the step that was launched ahead, before a call that changes what it reads. The
        next step returns its outputs. If it fails, its requests start again, and the call goes on.
        """
        if self._guard.is_stepping:  # a step begins by ending requests
            self._end_launched()
        elif self._launched is not None:
            try:
                with defer_sigint(), self._stepping():
                    self._end_launched()
            except Exception:
                if self._ranks.size > 1:  # the job ends
                    raise
                logger.exception("a step failed: its requests go on from what is cached")

    def close(self) -> None:
        """Forget the step that was launched ahead."""
        self._launched = None

    def follow_step(self, weights_changed: bool) -> None:
        """Run the step that the leading rank runs. weights_changed: whether they have, there."""
        self._control.told_change = weights_changed
        self.step()
        self._live.forget_closed()

    def take_failed(self) -> list[Request]:
        failed, self._failed = self._failed, None
        # While other ranks follow, cancelled requests stay until the message to them.
        gone = {sample for request in list(self._live.abandoned) for sample in request.samples}
        everyone = {*self._scheduler.running, *self._scheduler.waiting} - gone
        if self._control.has_failed:
            return list(everyone)
        if failed is None:
            return sorted(everyone, key=lambda request: request.request_id)[:1]
        return failed

    def _check_decisions(self) -> None:
        """Raise MemoryError if a lack of memory has changed a decision of this rank alone."""
        if (
            self._ranks.size > 1
            and out_of_memory.num_decided_by_memory != self._num_decided_by_memory
        ):
            raise MemoryError(
                "a lack of host memory has changed a decision that all ranks make alike"
            )

    def _make_outputs(self) -> None:
        try:
            self._live.make_outputs()
        except BaseException:
            self._failed = [*(self._failed or ()), *self._live.without_output]
            raise

    def _run(self) -> None:
        if self._begin():
            self._end_launched()  # of the weights before
            self._make_outputs()
            self._parts.epochs.begin_unsaid()
        if self._launched is None:
            plan = self._plan()
            if plan is None:
                return
            self._launched = self._runner.launch(plan)
        self._end_launched(goes_on=self._runs_ahead)

    def _plan(self) -> StepPlan | None:
        """Plan a step. Return None if there is nothing to do, or after a wait for the tiers."""
        scheduler, fetches = self._scheduler, self._parts.offload.fetches
        had_fetches = fetches.is_busy
        if plan := scheduler.schedule():
            self._note(plan)
            return plan
        if fetches.is_busy:
            fetches.wait()
        elif scheduler.waiting and not had_fetches:  # else they may have held the room
            raise RuntimeError(
                f"{len(scheduler.waiting)} requests wait and none can run: this is a bug "
                "in the scheduler, please report it"
            )
        return None

    def _note(self, plan: StepPlan) -> None:
        self.num_steps += 1
        pages = self._parts.cache.allocator
        in_use = pages.num_pages - 1 - pages.num_free - pages.num_evictable
        self.peak_pages_in_use = max(self.peak_pages_in_use, in_use)
        if self._parts.config.verify_ranks:
            check_equal_decisions(self._ranks, self.num_steps, self._scheduler, plan)

    def _end_launched(self, goes_on: bool = False) -> None:
        """Wait for the tokens of the launched step, if there is one, and append them to answers.
        goes_on: launch the next step before, if it does not depend on these tokens."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        scheduler, ahead = self._scheduler, None
        if goes_on and (plan := scheduler.schedule_ahead(launched.plan)):
            self._note(plan)
            ahead = self._runner.launch_ahead(plan, launched)
            self.num_ahead += 1
        self._answer(launched, ahead)
        if ahead is not None:
            scheduler.go_on(ahead.plan)
            self._runner.launch_rest(ahead)
            self._launched = ahead

    def _answer(self, launched: Launched, ahead: Launched | None) -> None:
        scheduler, plan = self._scheduler, launched.plan
        result = self._runner.collect(launched)
        if ahead is not None:
            scheduler.ahead.drop_void(ahead.plan, result)
        gained = scheduler.accept(result.accepted, self._live.append) if result.accepted else []
        owners = scheduler.complete(result)
        if self._has_drafts and any(work.draft_draws for work in plan.work):
            self._runner.take_back(plan, {r.request_id: r.num_computed for r in owners})
        for request in owners:
            if not request.done:  # by a draft
                gained.append(request)
                self._live.append(request, result.sampled[request.request_id])
            if request.done:
                self._live.finish(request)
        self._live.meter.note_tokens(gained, time.perf_counter())
        self._live.run_moves()

    def _begin(self) -> bool:
        """Exchange between the ranks what the step depends on. Return whether the weights may have
        changed on any rank."""
        changed = self._parts.epochs.watch.has_changed()
        control, offload = self._control, self._parts.offload
        if control.leads:
            self._live.call_followers(StepLoop.follow_step, changed)
        else:
            self._live.cancel_abandoned()
        if not (control.leads or control.follows) or offload.tiers:
            return bool(offload.poll(changed))
        if changed and not (control.leads or control.told_change):
            raise RuntimeError(
                f"the weights have changed on rank {self._ranks.rank}, but not on the first one: "
                "end lead() before they change, or call update_weights() there"
            )
        return changed or control.told_change
