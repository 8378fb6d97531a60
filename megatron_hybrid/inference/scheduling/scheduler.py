"""Scheduler: the tokens and requests of each step.

`Scheduler.schedule` reads top to bottom as the policy: decodes first, then running prefills, then
waiting requests by priority and arrival, then drafts, all under one token budget, of which long
prompts leave a part to short ones. `Scheduler.complete` records the results of a step. The
scheduler moves no bytes itself: all moves are in the plan. Decisions depend only on the order of
requests and on numbers that are equal on all ranks.
"""

import math
import time
from bisect import insort
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.drafters import Drafts
from megatron_hybrid.inference.requests.request import MAX_FAILURES, Request, RequestStatus
from megatron_hybrid.inference.sampling_params import Sampled
from megatron_hybrid.inference.scheduling.draft_planner import DraftPlanner
from megatron_hybrid.inference.scheduling.plan_builder import (
    Chunk,
    PlanBuilder,
    copies_of,
    draws_of,
    tables_of,
)
from megatron_hybrid.inference.scheduling.saved_states import (
    publish_states,
    reserve_state,
    reserve_states,
)
from megatron_hybrid.inference.scheduling.short_prompts import leave_rest, short_prompts
from megatron_hybrid.inference.scheduling.single_flight import waits_for_prefill
from megatron_hybrid.inference.scheduling.step_ahead import StepAhead
from megatron_hybrid.inference.scheduling.step_plan import (
    Park,
    Restore,
    StepPlan,
    StepResult,
    Unpark,
)
from megatron_hybrid.inference.scheduling.waiting_queue import WaitingQueue
from megatron_hybrid.utils.out_of_memory import (
    is_lack_of_memory,
    note_decided_by_memory,
    optional_decision,
)

if TYPE_CHECKING:  # it imports torch, and this module does not
    from megatron_hybrid.offload.fetch import Fetches

MIN_CAPTURES = 16
"""States inside a forward that may always be captured."""


class RestoreFailedError(MemoryError):
    """There was no memory to restore a request that runs alone. All ranks raise it."""


def max_captures(spec: CacheSpec, max_requests: int, max_tokens: int) -> int:
    """Return the largest number of states captured inside a forward. They take as much memory as
    the live slots and the KV of `max_tokens` tokens."""
    kv_bytes = max_tokens * spec.kv_bytes_per_token
    return max(MIN_CAPTURES, max_requests) + kv_bytes // spec.slot_bytes


class Scheduler:
    """Continuous batching over one prefix cache.

    Args:
        cache: decides about sharing and eviction.
        fetches: from the tiers.
        max_requests: number of live slots.
        max_tokens: token budget of one forward pass.
        short_prompt_share: part of it that long prompts leave to short ones.
        drafts: of the decodes, if there are any.
        drafts_need_hidden: whether drafts follow from the hidden states of the tokens before.
    """

    def __init__(
        self,
        cache: PrefixCache,
        fetches: "Fetches",
        max_requests: int,
        max_tokens: int,
        short_prompt_share: float = 0.0,
        drafts: Drafts | None = None,
        drafts_need_hidden: bool = False,
    ):
        self.cache = cache
        self.draft_planner = DraftPlanner(cache, drafts)
        self._max_captures = max_captures(cache.spec, max_requests, max_tokens)
        self.drafts_need_hidden = drafts_need_hidden
        self.fetches = fetches
        self.max_tokens = max_tokens
        self._short_prompt_share = short_prompt_share
        self.max_waiting_looked_at = 2 * max_requests
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in order of arrival
        self._max_requests = max_requests
        self.free_slots = list(range(max_requests - 1, -1, -1))
        self._current = PlanBuilder()  # the step that is planned, or runs
        self._next = PlanBuilder()  # moves that are due before the next step, with it or without
        self.ahead = StepAhead(cache)
        self._drew_again = False  # a row of the last step; the next step may, too
        self._admitting: Request | None = None
        self._suspects: dict[Request, None] = {}  # requests that may make steps fail
        self.num_preemptions = 0
        self.num_restarts = 0
        self.num_failures = 0
        self.num_forward_tokens = 0
        self.num_prefill_tokens = 0
        self.num_prefix_waits = 0

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def _unqueue(self, request: Request) -> None:
        self.waiting.discard(request)
        self.cache.expected.discard(request.request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # The policy --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan one step. The plan is empty if there is nothing to do."""
        builder = self._begin()
        lengths = self.draft_planner.lengths(builder, self.running)
        self.draft_planner.prepare(lengths)
        for request in list(self.running):
            if request.status in (RequestStatus.DECODE, RequestStatus.CLOSING):
                self._plan_work(builder, request)
        num_decodes = len(builder.chunks)
        self._plan_prompts(builder)
        reserve_states(self.cache, builder.chunks, self._max_captures)
        if lengths:
            self.draft_planner.plan(builder, lengths, num_decodes, self._budget(builder))
        return builder.plan(self.fetches.take_loads())

    def schedule_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, the current one, while it runs; `go_on` completes it. Return
        None if it depends on draws of the current step, or on room that others have to give up."""
        waits_for_tiers = self.fetches.is_busy or bool(self.waiting and self.fetches.tiers)
        if self._drew_again or self._suspects or waits_for_tiers or not self.ahead.may_follow(plan):
            return None
        # Only `waits_for_prefill` waits for tokens that the current step computes.
        is_shared = self.waiting and self.cache.mode == "memory_only"
        if is_shared and any(len(work.tokens) > 1 for work in plan.work):
            return None
        builder = self.ahead.begin(self._current)
        self.ahead.plan_decodes(builder, plan, self.running, self.max_tokens)
        self._plan_prompts(builder)
        if builder.is_short or not (builder.chunks or builder.ready):
            self.ahead.builder = None  # nobody has started in it
            return None
        known = [chunk for chunk in builder.chunks if chunk.source < 0]
        reserve_states(self.cache, known, self._max_captures)
        return builder.plan({})

    def go_on(self, plan: StepPlan) -> None:
        """Make the step that was launched ahead the current one, and give its plan draws and saves,
        now that its tokens are known."""
        builder = self._current = self.ahead.builder
        self.ahead.builder = None
        chunks = {c.request.request_id: c for c in builder.chunks if c.source >= 0}
        reserve_states(self.cache, chunks.values(), self._max_captures)
        for work in plan.work:
            chunk = chunks.get(work.request_id)
            if chunk is not None:
                if chunk.reservations:
                    work.saves = chunk.saves()
                if not chunk.request.done:
                    chunk.draws, work.draws = True, draws_of(chunk.request)

    def _plan_prompts(self, builder: PlanBuilder) -> None:
        """Add parts of the running prompts, and start waiting requests, as far as there is room."""
        prefills = [
            request
            for request in self.running
            if request.status is RequestStatus.PREFILL
            and builder.start_of(request) < request.num_tokens
        ]
        waiting = islice(self.waiting, self.max_waiting_looked_at if self.free_slots else 0)
        share = int(self._short_prompt_share * self._budget(builder))
        short = short_prompts(self.cache, share, prefills, waiting)
        builder.kept = {r: count for r, count in short.items() if r.lease is None}
        for request in sorted(prefills, key=lambda r: r not in short):
            self._plan_work(builder, request)
        blocked, num_coming, last_priority = self._tests_a_suspect(), 0, math.inf
        blocked = blocked or builder.is_short
        for request in list(islice(self.waiting, self.max_waiting_looked_at)):
            self._admitting = request
            builder.kept.pop(request, None)
            has_slot = len(self.free_slots) > num_coming
            can_start = has_slot and not blocked and self._budget(builder) > 0
            can_start = can_start and request.options.priority <= last_priority
            # Also for requests that cannot start yet: the running prefill must know their junction
            # early, and the disk is read meanwhile.
            if waits_for_prefill(self.cache, request, self.running, builder.start_of):
                self.num_prefix_waits += 1
                last_priority = min(last_priority, request.options.priority)  # equals overtake it
                continue
            # In order of priority and arrival: no request overtakes one that lacks room, for itself
            # or for its fetch.
            if self._waits_for_fetch(builder, request, can_start):
                blocked = blocked or request.fetch.lacks_room
                num_coming += request.fetch.is_coming  # its slot is taken: it starts on arrival
            elif has_slot and not blocked and builder.kept and not self._budget(builder):
                last_priority = min(last_priority, request.options.priority)  # short ones overtake
            else:
                blocked = not can_start or not self._admit(builder, request)
                blocked = blocked or request in self._suspects
            if request.lease is None and request.starts_from_cache:
                tokens = request.tokens[: request.num_tokens]
                self.cache.expected.add(request.request_id, tokens, request.salt)
        self._admitting, builder.kept = None, {}
        leave_rest(self.cache, builder, self._budget(builder))
        self.fetches.poll()

    def schedule_moves(self) -> StepPlan:
        """Plan the moves due before the next step: forks of samples, and the last states of ending
        requests, whose slots and pages others wait for."""
        return self._begin().plan({})

    def _begin(self) -> PlanBuilder:
        self._current, self._next = self._next, PlanBuilder()
        return self._current

    def _budget(self, builder: PlanBuilder) -> int:
        kept = sum(builder.kept.values()) if builder.kept else 0
        return self.max_tokens - builder.num_tokens - kept

    def _longest(self, builder: PlanBuilder, request: Request) -> int:
        """Return the most tokens of a request that the step has room for."""
        return min(self._budget(builder), request.longest_forward)

    def _tests_a_suspect(self) -> bool:
        """Return whether a request runs that was blamed for two failed steps. Then no other one
        starts: if the next step fails, too, this request was the cause."""
        if self._suspects:
            self._suspects = {request: None for request in self._suspects if request.is_suspect}
        return any(request.lease is not None for request in self._suspects)

    def _plan_work(self, builder: PlanBuilder, request: Request) -> None:
        """Add as many of the request's next tokens to the plan as the budget allows."""
        start, lease = builder.start_of(request), request.lease
        count = min(self._longest(builder, request), request.num_tokens - start)
        if not count or lease is None:
            return
        end = start + count
        if self.cache.extend(lease, end) or self._make_room(builder, request, end):
            draws = end == request.num_tokens and not request.done
            builder.add(Chunk(request, start, end, draws))

    def _make_room(self, builder: PlanBuilder, request: Request, end: int) -> bool:
        """Make room in the pool up to token `end`, if need be by preempting later requests."""
        while not self.cache.extend(request.lease, end):
            if builder.is_ahead:
                builder.is_short = True
                return False
            if self.fetches.poll():
                continue  # arrived fetches can be evicted now
            closing = self.closing
            victim = closing[-1] if closing else self.running[-1]
            # Admissions come last and find room, so no victim is yet to be restored.
            assert victim not in builder.restores
            if closing:
                builder.remove(victim)
                self._retire(victim)  # answered: only its last state is lost
            else:
                self._preempt(builder, victim)
            if victim is request:
                return False
        return True

    def _admit(self, builder: PlanBuilder, request: Request) -> bool:
        """Give a waiting request a lease, a slot and its first chunk. Return False if there is no
        room now, or if an allocation failed while others run, which must not fail with it."""
        try:
            return self._try_to_admit(builder, request)
        except Exception as error:
            is_alone = all(other is request for other in self.running)
            if is_alone or not is_lack_of_memory(error):
                raise
            note_decided_by_memory()
            builder.remove(request)
            if request.lease is not None:
                self._end_lease(request)
                self._requeue(request)
            return False

    def _try_to_admit(self, builder: PlanBuilder, request: Request) -> bool:
        tokens = request.tokens[: request.num_tokens]
        if request.parked_tokens:
            if not self._resume_parked(builder, request):
                return False
            self._plan_work(builder, request)
            return True
        lease = self.cache.acquire(
            tokens,
            request.salt,
            capacity_tokens=len(tokens),
            chunk_tokens=self._longest(builder, request),
            declared=request.options.cache_breakpoints,
            messages=request.message_starts,
            recompute_reason=request.recompute_reason,
            readmitted=request.lease_report is not None,
        )
        if lease is None:
            return False
        if request.fetch is not None:
            lease.report.fetched_tokens = self.fetches.count(request.fetch, lease.skipped_tokens)
            request.fetch = None
        self._unqueue(request)
        self._start(request, lease)
        builder.restores[request] = Restore(
            request.request_id, request.slot, *copies_of(lease), lease.checkpoint_pages
        )
        request.num_computed = lease.skipped_tokens
        if self.drafts_need_hidden and lease.skipped_tokens and lease.checkpoint_pages is None:
            # The MTP head needs the last hidden state before the next token.
            request.num_computed -= 1
        if request.num_computed == request.num_tokens:
            request.status = RequestStatus.DECODE
            builder.ready.append(request)
        else:
            self._plan_work(builder, request)
        return True

    def _start(self, request: Request, lease: Lease) -> None:
        request.lease = lease
        request.slot = self.free_slots.pop()
        request.started_at = request.started_at or time.perf_counter()
        insort(self.running, request, key=lambda r: r.request_id)
        request.status = RequestStatus.PREFILL
        request.waits_for = None
        request.common_with.clear()
        if request.lease_report is None:
            request.lease_report = lease.report
        else:
            lease.report = request.lease_report  # readmitted: the first report stays in use

    # Fetching ----------------------------------------------------------------------------------

    def _waits_for_fetch(self, builder: PlanBuilder, request: Request, can_start: bool) -> bool:
        """Return whether a part of the request's prompt is being fetched from a tier.

        The part is read ahead, but loaded into the pool only when the request can start. Earlier,
        it would evict the fetches of requests before it, and be evicted itself.
        """
        if not self.fetches.tiers or not request.starts_from_cache:
            return False
        tokens = request.tokens[: request.num_tokens]
        while True:
            if request.fetch is not None and request.fetch.has_failed:
                request.fetch = request.looked_up_at = None  # a shorter prefix may be there
            if request.fetch is None or request.fetch.is_over:
                # The content of pool and tiers changes only by evictions from the pool.
                now, before = self.cache.num_evicted, request.looked_up_at
                if before is not None and (before == now or not can_start):
                    return False
                request.looked_up_at = now
                found = self.fetches.start(tokens, request.salt)
                if found is None:
                    return False
                request.fetch = found
                request.restore_at = request.restore_at or time.perf_counter()
            self.fetches.read(request.fetch, is_first=request is next(iter(self.waiting)))
            if can_start:
                self.fetches.bring(request.fetch, len(tokens), self._longest(builder, request))
            if not request.fetch.has_failed:
                return not request.fetch.is_over

    # After the forward -------------------------------------------------------------------------

    def accept(
        self,
        accepted: dict[int, list[Sampled]],
        append: Callable[[Request, Sampled], bool],
    ) -> list[Request]:
        """Append the accepted drafts of the plan. Call it before `complete`, so that drafts after
        the end of an answer are neither computed nor committed.

        Args:
            accepted: `StepResult.accepted`.
            append: appends a token, and returns whether the request is answered.

        Returns:
            Their requests, once for each token.
        """
        owners = []
        for chunk in self._current.chunks:
            for sampled in accepted.get(chunk.request.request_id, ()):
                owners.append(chunk.request)
                chunk.num_accepted += 1
                if append(chunk.request, sampled):
                    chunk.has_ended = True
                    break
        return owners

    def complete(self, result: StepResult) -> list[Request]:
        """Record the results of the last plan: blocks and saved states become visible to others.
        Return the requests with a token in `result.sampled`, each before its forks."""
        builder, self._current = self._current, PlanBuilder()
        if result.sampled:  # else these are moves
            self._drew_again = bool(result.again) or builder.is_short
        for request in builder.parks:
            if request.request_id in result.not_parked:
                request.parked_tokens = 0
        for key in result.unloaded:
            self.fetches.fail(key)
        self._note_restored(builder, result)
        self.num_forward_tokens += builder.num_tokens
        for chunk in builder.chunks:
            request = chunk.request
            if request.status is RequestStatus.PREFILL:
                self.num_prefill_tokens += chunk.end - chunk.start
            if chunk.draft_draws:
                self.draft_planner.note(chunk)
            if request.request_id in result.prompt_scores:
                log_probs, top_n_logprobs = result.prompt_scores[request.request_id]
                request.prompt_log_probs += log_probs
                request.prompt_top_n_logprobs += top_n_logprobs
            # One token at a time: else several would become visible at once.
            lease = request.lease
            for end in range(chunk.end, chunk.last_computed + 1):
                request.num_computed = end
                self.cache.commit(lease, request.tokens, end)
            if lease.own_blocks is not None:  # some are lent to drafts
                self.cache.settle(lease)
            if chunk.reservations:
                publish_states(self.cache, request, chunk.reservations, result)
            if chunk.draws:
                request.status = RequestStatus.DECODE
            if request.status is RequestStatus.CLOSING:
                self._retire(request)
        for request, reservation in builder.ending.items():
            self._commit_last(request)
            publish_states(self.cache, request, [reservation], result)
            self._retire(request)
        owners = []
        for request in [*[chunk.request for chunk in builder.chunks], *builder.ready]:
            if request.request_id in result.sampled:
                owners.append(request)
                if request.siblings:
                    owners += self.fork(request)
        return owners

    def _note_restored(self, builder: PlanBuilder, result: StepResult) -> None:
        """Unpin the sources of restores. A request whose restore lacked memory is queued again. It
        starts from the cache or, if that failed, from its first token.

        Raises:
            RestoreFailedError: a restore from the cache failed, and no other request runs.
        """
        for request, restore in list(builder.restores.items()):
            if request.request_id not in result.unrestored:
                self.cache.restored(request.lease)
                if isinstance(restore, Unpark):
                    self.cache.commit(
                        request.lease, request.tokens, request.num_computed, flush=True
                    )
                continue
            if isinstance(restore, Restore) and restore.source_slot is None:
                request.lacks_memory = True
                if len(self.running) == 1:
                    raise RestoreFailedError(result.unrestored[request.request_id])
            builder.remove(request)
            self._end_lease(request)
            self._requeue(request)

    def fork(self, request: Request) -> list[Request]:
        """Fork the request's further samples from its live slot, right after its prefill, and
        return the forked ones. Those without room are queued and start from the cache later."""
        started, queued = [], []
        try:
            while request.siblings:
                sibling = request.siblings[0]
                if sibling.closed:  # cancelled before its start
                    request.siblings.pop(0)
                    continue
                sibling.prompt_log_probs = list(request.prompt_log_probs)
                sibling.prompt_top_n_logprobs = list(request.prompt_top_n_logprobs)
                lease = None
                if self.free_slots:
                    with optional_decision(lambda error: None):
                        lease = self.cache.fork(request.lease, sibling.tokens, request.num_computed)
                request.siblings.pop(0)
                if lease is None:
                    queued.append(sibling)
                    continue
                self._start(sibling, lease)
                self._next.restores[sibling] = Restore(
                    sibling.request_id, sibling.slot, *copies_of(lease), source_slot=request.slot
                )
                sibling.num_computed = request.num_computed
                sibling.status = RequestStatus.DECODE
                started.append(sibling)
        finally:  # also if a later one fails
            for sibling in reversed(queued):
                self.waiting.put_first(sibling)
        return started

    def fail(self) -> list[Request]:
        """Roll back a failed step (`abort`), and blame the request that was being admitted, or else
        the suspect that ran, or else all that ran, or else the first in line.

        Two steps in a row that fail may have any cause, so all requests start again together. Then
        they start one at a time, so that a third failure identifies the cause. Return the requests
        that were blamed for `MAX_FAILURES` in a row, to be cancelled.
        """
        self.num_failures += 1
        running = [request for request in self.running if not request.done]
        blamed = [request for request in running if request in self._suspects]
        blamed = blamed or running or list(islice(self.waiting, 1))
        if self._admitting is not None:
            blamed = [self._admitting]
        for request in blamed:
            request.note_failure()
            if request.is_suspect:
                self._suspects[request] = None
        self.abort()
        return [request for request in blamed if request.num_failures >= MAX_FAILURES]

    def abort(self) -> None:
        """Roll back after a failed step. Its unrecorded results are dropped: pages and live slots
        may be half written. All running requests are queued again and start from the cache."""
        for request in self._current.parks:
            request.parked_tokens = 0  # the runner may have its bytes, or not
        self._next = PlanBuilder(drops=self._current.drops + self._next.drops)
        self._current, self.ahead.builder, self._admitting = PlanBuilder(), None, None
        self.fetches.abort()
        running = self.running[::-1]
        leases = [self._take_lease(request) for request in running]
        for request in running:
            self.num_restarts += not request.done
            self._requeue(request)
        for lease in leases:
            self.cache.release(lease)

    def start_over(self) -> None:
        """Discard all computed tokens and states of requests; generated tokens stay known."""
        self.retire_closing()
        self.abort()
        for request in self.waiting:
            request.parked_tokens, request.looked_up_at = 0, None
            if not request.num_generated:
                request.prompt_log_probs, request.prompt_top_n_logprobs = [], []

    def finish(self, request: Request) -> None:
        """End an answered request as soon as its last state is saved. Its last token may need one
        more forward pass for that."""
        request.status = RequestStatus.CLOSING
        if self.ahead.computes(request):
            return  # the step ahead has its last token, whether that is wanted or not
        if self.cache.mode != "restore" or request.num_computed == request.num_tokens:
            self._end(request)

    def cancel(self, request: Request) -> None:
        """Remove a request. Its computed tokens stay cached, with its last state if that is worth
        its room."""
        self._unqueue(request)
        try:
            if request.fetch is not None:
                self.fetches.leave(request.fetch)
        finally:
            if request.lease is None:
                self._next.drops.append(request.request_id)
                request.status = RequestStatus.FINISHED
            else:
                request.status = RequestStatus.CLOSING
                self._end(request)

    def _end(self, request: Request) -> None:
        """End a running request with the next plan if its state is worth its room, else now."""
        if request in self._next.restores:  # a fork that was not executed yet
            self._next.remove(request)
            self._end_lease(request)
            request.status = RequestStatus.FINISHED
            return
        reservation, done = None, request.num_computed
        try:
            if done:
                reservation = reserve_state(self.cache, request.lease, done)
        finally:
            if reservation is None:
                self._retire(request)
            else:
                self._next.ending[request] = reservation

    @property
    def closing(self) -> list[Request]:
        """Answered requests that only run on to save their last state, in order of arrival."""
        return [r for r in self.running if r.status is RequestStatus.CLOSING]

    @property
    def num_unanswered(self) -> int:
        """Requests that run and are not answered yet."""
        return len(self.running) - len(self.closing)

    def retire_closing(self) -> None:
        for request in self.closing:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Commit the computed tokens of a request, and end it."""
        request.status = RequestStatus.FINISHED
        try:
            self._commit_last(request)
        finally:
            self._end_lease(request)

    def _commit_last(self, request: Request) -> None:
        """Commit all computed tokens."""
        done = request.num_computed
        answered = request.done and done == request.num_tokens
        self.cache.commit(request.lease, request.tokens, done, flush=True, answered=answered)

    def _end_lease(self, request: Request) -> None:
        self.cache.release(self._take_lease(request))

    def _take_lease(self, request: Request) -> Lease:
        """Take a request out of `running`, free its slot, and return its lease, to release."""
        lease, request.lease = request.lease, None
        self.running.remove(request)
        self.free_slots.append(request.slot)
        request.slot = -1
        return lease

    # Preemption --------------------------------------------------------------------------------

    def _preempt(self, builder: PlanBuilder, request: Request) -> None:
        """Take the pages of a running request and queue it again. Its bytes are parked in host
        memory, to continue at the same token. If that fails, it starts from the cache."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        builder.remove(request)
        lease, done = request.lease, request.num_computed
        # Where nothing is computed, or only the first draw is missing, the cache suffices.
        if 0 < done < request.num_tokens:
            request.parked_tokens, request.lease_before = done, lease
            builder.parks[request] = Park(request.request_id, request.slot, done, tables_of(lease))
        try:
            self._retire(request)
        finally:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Queue a request that lost its slot as the first, or end it if it is answered."""
        if request.done:
            request.status = RequestStatus.FINISHED
        else:
            request.status = RequestStatus.WAITING
            self.waiting.put_first(request)

    def _resume_parked(self, builder: PlanBuilder, request: Request) -> bool:
        """Readmit a parked request at the token where it stopped, or return False for lack of
        room."""
        done = request.parked_tokens
        lease = self.cache.resume(
            request.lease_before,
            request.tokens[:done],
            capacity_tokens=request.num_tokens,
            chunk_tokens=self._longest(builder, request),
        )
        if lease is None:
            return False
        self._unqueue(request)
        self._start(request, lease)
        request.parked_tokens, request.lease_before = 0, None
        first_block = lease.shared_tokens // self.cache.spec.block_size_tokens
        builder.restores[request] = Unpark(
            request.request_id, request.slot, first_block, tables_of(lease)
        )
        request.num_computed = done
        if request.num_computed >= request.num_prompt_tokens and request.num_generated:
            request.status = RequestStatus.DECODE
        return True

    def check_integrity(self) -> None:
        """Raise RuntimeError if the slots or the waiting requests are not as they must be."""
        running = [request.slot for request in self.running]
        if sorted(running + self.free_slots) != list(range(self._max_requests)):
            raise RuntimeError(
                f"live slots do not add up: {running} running, {self.free_slots} free"
            )
        for request in self.waiting:
            if request.lease is not None or request.slot != -1:
                raise RuntimeError(f"waiting request {request.request_id} holds a lease or a slot")
