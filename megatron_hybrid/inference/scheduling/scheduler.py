"""Scheduler: the tokens and requests of each step.

`Scheduler.schedule` reads top to bottom as the policy: decodes first, then running prefills, then
waiting requests by priority and arrival, then drafts, all under one token budget.
`Scheduler.complete` records
the results of a step. It moves no bytes itself: all moves are in the plan. Decisions depend only on
the order of requests and on numbers that are equal on all ranks.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from megatron_hybrid.cache.index.tree import Kind, common_prefix
from megatron_hybrid.cache.pages.lease import Lease, Reservation
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.placement import most_wanted, worth_waiting
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.draft_length import (
    TRIAL_STEPS,
    DraftCosts,
    break_even,
    pay_together,
)
from megatron_hybrid.inference.drafters import Drafts
from megatron_hybrid.inference.requests.request import MAX_FAILURES, Request, RequestStatus
from megatron_hybrid.inference.sampling_params import Sampled
from megatron_hybrid.inference.scheduling.plan_builder import Chunk, StepDraft, copies_of, tables_of
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
    """Most states captured inside a forward. They take the memory of the live slots, and as much as
    the KV of `max_tokens` tokens."""
    kv_bytes = max_tokens * spec.kv_bytes_per_token
    return max(MIN_CAPTURES, max_requests) + kv_bytes // spec.slot_bytes


class Scheduler:
    """Continuous batching over one prefix cache.

    Args:
        cache: decides about sharing and eviction.
        fetches: from the tiers.
        max_requests: number of live slots.
        max_tokens: token budget of one forward pass.
        drafts: of the decodes; None: there are none.
        drafts_need_hidden: whether drafts follow from the hidden states of the tokens before.
    """

    def __init__(
        self,
        cache: PrefixCache,
        fetches: "Fetches",
        max_requests: int,
        max_tokens: int,
        drafts: Drafts | None = None,
        drafts_need_hidden: bool = False,
    ):
        self.cache = cache
        self.drafts = drafts
        self.draft_costs = DraftCosts()
        self._num_decode_steps = 0  # of steps that may have drafts
        self.drafts_need_hidden = drafts_need_hidden
        self.fetches = fetches
        self.max_tokens = max_tokens
        self.max_waiting_looked_at = 2 * max_requests
        self.max_captures = max_captures(cache.spec, max_requests, max_tokens)
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # in order of arrival
        self._max_requests = max_requests
        self.free_slots = list(range(max_requests - 1, -1, -1))
        self._draft = StepDraft()  # of the current plan
        self._next = StepDraft()  # of the next plan
        self._num_plans = 0
        self._admitting: Request | None = None
        self._suspects: dict[Request, None] = {}  # of what made steps fail
        self.num_preemptions = 0
        self.num_restarts = 0
        self.num_failures = 0
        self.num_forward_tokens = 0
        self.num_prefill_tokens = 0
        self.num_drafts = 0
        self.accepted_at: Counter[int] = Counter()
        """Accepted drafts by their place in a step, from 0."""

    def draft_counts(self) -> dict[str, int]:
        """What `stats` tells of drafts, if there are any."""
        if self.drafts is None:
            return {}
        decoding = sum(request.status is RequestStatus.DECODE for request in self.running)
        cost = self.draft_costs.at(max(1, decoding))
        places = range(self.drafts.most)
        accepted = {f"draft_tokens_accepted_at_{i}": self.accepted_at[i] for i in places}
        least = break_even(cost, self.drafts.most)
        return accepted | {"draft_break_even_permille": round(1000 * least)}

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def _unqueue(self, request: Request) -> None:
        self.waiting.discard(request)
        self.cache.expect_no_more(request.request_id)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # The policy --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan one step. The plan is empty if there is nothing to do."""
        draft = self._begin()
        lengths = {} if self.drafts is None else self._draft_lengths(draft)
        if lengths and self.drafts.batch_drafters:
            self._prepare_drafts(lengths)
        for request in list(self.running):
            if request.status in (RequestStatus.DECODE, RequestStatus.CLOSING):
                self._plan_work(draft, request)
        num_decodes = len(draft.chunks)
        for request in list(self.running):
            if request.status is RequestStatus.PREFILL:
                self._plan_work(draft, request)
        blocked, num_coming, last_priority = self._tests_a_suspect(), 0, math.inf
        for request in list(islice(self.waiting, self.max_waiting_looked_at)):
            self._admitting = request
            has_slot = len(self.free_slots) > num_coming
            can_start = has_slot and not blocked and self._budget(draft) > 0
            can_start = can_start and request.options.priority <= last_priority
            # Also for requests that cannot start yet: the running prefill must know their junction
            # early, and the disk is read meanwhile.
            if self._waits_for_other(request):
                last_priority = min(last_priority, request.options.priority)  # equals overtake it
                continue
            # In order of priority and arrival: none overtakes a request that lacks room, also for
            # its fetch.
            if self._waits_for_fetch(draft, request, can_start):
                blocked = blocked or request.fetch.lacks_room
                num_coming += request.fetch.is_coming  # its slot is taken: it starts on arrival
            else:
                blocked = not can_start or not self._admit(draft, request)
                blocked = blocked or request in self._suspects
            if request.lease is None and request.starts_from_cache:
                tokens = request.tokens[: request.num_tokens]
                self.cache.expect(request.request_id, tokens, request.options.salt)
        self._admitting = None
        self.fetches.poll()
        self._reserve_checkpoints(draft)
        if lengths:
            self._plan_drafts(draft, lengths, num_decodes)
        return draft.plan(self._num_plans, self.fetches.take_loads())

    def schedule_moves(self) -> StepPlan:
        """Plan the moves due before the next step: forks of samples, and the last states of ending
        requests, whose slots and pages others wait for."""
        return self._begin().plan(self._num_plans, {})

    def _begin(self) -> StepDraft:
        self._draft, self._next = self._next, StepDraft()
        self._num_plans += 1
        return self._draft

    def _budget(self, draft: StepDraft) -> int:
        return self.max_tokens - draft.num_tokens

    def _longest(self, draft: StepDraft, request: Request) -> int:
        """Most tokens of a request that the step has room for."""
        return min(self._budget(draft), request.longest_forward)

    def _tests_a_suspect(self) -> bool:
        """Whether a request runs that two failed steps are blamed on. None starts beside it: if the
        next step fails, too, it was this one."""
        if self._suspects:
            self._suspects = {request: None for request in self._suspects if request.is_suspect}
        return any(request.lease is not None for request in self._suspects)

    def _plan_work(self, draft: StepDraft, request: Request) -> None:
        """Add as many of the request's next tokens to the plan as the budget allows."""
        start = request.num_computed
        count = min(self._longest(draft, request), request.num_tokens - start)
        if not count or request.lease is None or not self._make_room(draft, request, start + count):
            return
        draws = start + count == request.num_tokens and not request.done
        draft.add(Chunk(request, start, start + count, draws))

    def _plan_drafts(
        self, draft: StepDraft, lengths: Mapping[Request, int], num_decodes: int
    ) -> None:
        """Let decodes go on by drafts, by what the planned step leaves: tokens of its budget, and
        pages that are free. So a step does the same beside them as without them.

        Args:
            lengths: of `_draft_lengths`.
            num_decodes: of the step.
        """
        found, left = [], self._budget(draft)
        for chunk in draft.chunks:
            request = chunk.request
            # What a restore without memory has drawn is void, so nothing may be appended to it.
            if not chunk.draws or request in draft.restores or chunk.end - chunk.start > 1:
                continue
            most = min(left, lengths.get(request, 0))
            if most > 0 and (tokens := self.drafts.propose(request, most)):
                found.append((chunk, tokens))
                left -= len(tokens)
        counts = {chunk.request: len(tokens) for chunk, tokens in found}
        if not self.drafts.batch_drafters and not self._pay(counts, num_decodes):
            return
        for chunk, tokens in found:
            draws = chunk.request.draft_draws(tokens)
            draft.add_drafts(chunk, draws[: self._lend(chunk.request, len(draws))])

    def _lend(self, request: Request, num_drafts: int) -> int:
        """Get room for drafts behind the known tokens of a request, until the step's end. Returns
        for how many of them there is some."""
        end = start = request.num_tokens
        with optional_decision(lambda error: None):
            end = self.cache.lend(request.lease, start, start + num_drafts)
        return end - start

    def _pay(self, counts: Mapping[Request, int], num_decodes: int) -> bool:
        """Whether a step is to have these numbers of drafts."""
        drafts = [(request.draft_length, count) for request, count in counts.items()]
        return pay_together(drafts, num_decodes, self.draft_costs.at(num_decodes), self._is_trial)

    @property
    def _is_trial(self) -> bool:
        return self._num_decode_steps % TRIAL_STEPS == 0

    def _draft_lengths(self, draft: StepDraft) -> dict[Request, int]:
        """The drafts of each decode that may have some, as many as pay; none if those that are
        computed before the step do not pay together."""
        decodes = [
            request
            for request in self.running
            if request.status is RequestStatus.DECODE
            and request.num_computed + 1 == request.num_tokens
            and request not in draft.restores
        ]
        self._num_decode_steps += bool(decodes)
        cost, lengths = self.draft_costs.at(max(1, len(decodes))), {}
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
        pay = not self.drafts.batch_drafters or self._pay(lengths, len(decodes))
        return lengths if pay else {}

    def _prepare_drafts(self, lengths: Mapping[Request, int]) -> None:
        """Have the drafts of all decodes computed, as far as pages are free. It writes pages, so it
        comes before the plan moves any; the plan has them again."""
        try:
            room = {request: self._lend(request, length) for request, length in lengths.items()}
            self.drafts.prepare({request: most for request, most in room.items() if most})
        finally:
            for request in lengths:
                self.cache.settle(request.lease)

    def _reserve_checkpoints(self, draft: StepDraft) -> None:
        """Reserve room for the states to save in this step; those without room are left out."""
        captures_left, spares = self.max_captures, []
        for chunk in draft.chunks:
            lease = chunk.request.lease
            positions = self.cache.positions_to_save(lease, chunk.end)
            if chunk.request.status is RequestStatus.CLOSING:
                positions = [chunk.end]
            if not positions:
                continue
            spare = [p for p in positions if lease.wanted.get(p) is Kind.SPARE]
            if spare:
                spares.append((chunk, spare))
                positions = [p for p in positions if p not in spare]
            captures_left -= self._reserve_of(chunk, positions, captures_left)
        for chunk, positions in spares:
            captures_left -= self._reserve_of(chunk, positions, captures_left)

    def _reserve_of(self, chunk: Chunk, positions: list[int], most: int) -> int:
        """Reserve room for the states of a chunk at these positions. Returns how many of them lie
        inside of it, `most` at most."""
        lease, end = chunk.request.lease, chunk.end
        inside = [position for position in positions if position < end]
        if len(inside) > most:
            declined = set(inside).difference(most_wanted(inside, lease.wanted, most))
            self.cache.decline(lease, sorted(declined))
            positions = [position for position in positions if position not in declined]
        captures = 0
        for position in positions:
            reservation = None
            with self._optional(lease, position):
                reservation = self.cache.reserve_checkpoint(lease, position)
            if reservation is not None:
                chunk.reservations.append(reservation)
                captures += position < end
        return captures

    def _make_room(self, draft: StepDraft, request: Request, end: int) -> bool:
        """Make room in the pool up to token `end`, if need be by preempting later requests."""
        while not self.cache.extend(request.lease, end):
            if self.fetches.poll():
                continue  # arrived fetches can be evicted now
            closing = self.closing
            victim = closing[-1] if closing else self.running[-1]
            # Admissions come last and find room, so no victim is yet to be restored.
            assert victim not in draft.restores
            if closing:
                draft.remove(victim)
                self._retire(victim)  # answered: only its last state is lost
            else:
                self._preempt(draft, victim)
            if victim is request:
                return False
        return True

    def _admit(self, draft: StepDraft, request: Request) -> bool:
        """Give a waiting request a lease and a slot, and its first chunk. False: no room now, or
        an allocation failed while others run, which must not fail with it."""
        try:
            return self._try_to_admit(draft, request)
        except Exception as error:
            is_alone = all(other is request for other in self.running)
            if is_alone or not is_lack_of_memory(error):
                raise
            note_decided_by_memory()
            draft.remove(request)
            if request.lease is not None:
                self._end_lease(request)
                self._requeue(request)
            return False

    def _try_to_admit(self, draft: StepDraft, request: Request) -> bool:
        tokens = request.tokens[: request.num_tokens]
        if request.parked_tokens:
            if not self._resume_parked(draft, request):
                return False
            self._plan_work(draft, request)
            return True
        lease = self.cache.acquire(
            tokens,
            request.options.salt,
            capacity_tokens=len(tokens),
            chunk_tokens=self._longest(draft, request),
            declared=request.options.cache_breakpoints,
            messages=request.message_starts,
            recompute_reason=request.recompute_reason,
            readmitted=request.report is not None,
        )
        if lease is None:
            return False
        if request.fetch is not None:
            lease.report.fetched_tokens = self.fetches.count(request.fetch, lease.skipped_tokens)
            request.fetch = None
        self._unqueue(request)
        self._start(request, lease)
        draft.restores[request] = Restore(
            request.request_id, request.slot, *copies_of(lease), lease.checkpoint_pages
        )
        request.num_computed = lease.skipped_tokens
        if self.drafts_need_hidden and lease.skipped_tokens and lease.checkpoint_pages is None:
            # The part for multi-token prediction needs the last hidden state before the next token.
            request.num_computed -= 1
        if request.num_computed == request.num_tokens:
            request.status = RequestStatus.DECODE
            draft.ready.append(request)
        else:
            self._plan_work(draft, request)
        return True

    def _start(self, request: Request, lease: Lease) -> None:
        request.lease = lease
        request.slot = self.free_slots.pop()
        request.mark_started()
        insort(self.running, request, key=lambda r: r.request_id)
        request.status = RequestStatus.PREFILL
        request.waits_for = None
        request.common_with.clear()
        if request.report is None:
            request.report = lease.report
        else:
            lease.report = request.report  # readmitted: the first report stays in use

    # Fetching ----------------------------------------------------------------------------------

    def _waits_for_fetch(self, draft: StepDraft, request: Request, can_start: bool) -> bool:
        """Whether a part of its prompt is being fetched from a tier.

        It is read ahead, but loaded into the pool only when the request can start: earlier, it
        would evict the fetches of requests before it, and be evicted itself.
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
                found = self.fetches.start(tokens, request.options.salt)
                if found is None:
                    return False
                request.fetch = found
            self.fetches.read(request.fetch, is_first=request is next(iter(self.waiting)))
            if can_start:
                self.fetches.bring(request.fetch, len(tokens), self._longest(draft, request))
            if not request.fetch.has_failed:
                return not request.fetch.is_over

    # Single flight -----------------------------------------------------------------------------

    def _waits_for_other(self, request: Request) -> bool:
        """Whether a running prefill will soon make a deeper position restorable than the present
        ones, so that the request need not compute the same tokens."""
        if self.cache.mode != "restore" or not request.starts_from_cache:
            return False
        if request.waits_for is not None:
            other, position = request.waits_for
            if other.status is RequestStatus.PREFILL and other.num_computed < position:
                return True
            request.waits_for = None
        tokens = request.tokens[: request.num_tokens]
        resume = None
        for other in self.running:
            if (
                other.status is not RequestStatus.PREFILL
                or other.options.salt != request.options.salt
            ):
                continue
            common = request.common_with.get(other.request_id)
            if common is None:
                common = common_prefix(tokens, other.tokens[: other.num_tokens])
                request.common_with[other.request_id] = common
            if common <= other.num_computed:
                continue  # its next states are beyond the common prefix
            if resume is None:
                resume = self.cache.match(tokens, request.options.salt).skipped_tokens
            position = self._position_in_flight(other, common, resume)
            if worth_waiting(resume, other.num_computed, position):
                request.waits_for = other, position
                return True
        return False

    def _position_in_flight(self, other: Request, common: int, resume: int) -> int:
        """Deepest position <= `common` that the running prefill `other` will make restorable.

        If the junction lies behind the states that `other` will save, ask it to save one there: the
        junction is known before the prefill reaches it.
        """
        if not self.cache.spec.needs_state:
            return common
        saved = self.cache.positions_to_save(other.lease, common)
        wanted = other.lease.wanted
        deepest = max((p for p in saved if wanted.get(p) is not Kind.SPARE), default=0)
        gain = common - max(deepest, resume, other.num_computed)
        # Below one block of gain the copy of a state costs more than computing the tokens.
        if gain >= self.cache.spec.block_size_tokens:
            self.cache.want(other.lease, common)
            deepest = common
        return deepest

    # After the forward -------------------------------------------------------------------------

    def accept(
        self,
        accepted: dict[int, list[Sampled]],
        append: Callable[[Request, Sampled], bool],
    ) -> list[Request]:
        """Append the accepted drafts of the plan, before `complete`: what an answer has behind its
        end is neither computed nor committed.

        Args:
            accepted: `StepResult.accepted`.
            append: appends a token, and returns whether the request is answered.

        Returns:
            Their requests, once for each token.
        """
        owners = []
        for chunk in self._draft.chunks:
            for sampled in accepted.get(chunk.request.request_id, ()):
                owners.append(chunk.request)
                chunk.num_accepted += 1
                if append(chunk.request, sampled):
                    chunk.has_ended = True
                    break
        return owners

    def complete(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Record the results of a step: blocks and saved states become visible to others. Returns
        the requests with a token in `result.sampled`: those of the plan, each before its forks.
        """
        draft, self._draft = self._draft, StepDraft()
        if plan.number != self._num_plans:
            raise ValueError(f"plan {plan.number} is completed, and {self._num_plans} was the last")
        for request in draft.parks:
            if request.request_id in result.not_parked:
                request.parked_tokens = 0
        for key in result.unloaded:
            self.fetches.fail(key)
        self._note_restored(draft, result)
        self.num_forward_tokens += draft.num_tokens
        for chunk in draft.chunks:
            request = chunk.request
            if request.status is RequestStatus.PREFILL:
                self.num_prefill_tokens += chunk.end - chunk.start
            if chunk.draft_draws:
                self.num_drafts += len(chunk.draft_draws)
                self.accepted_at.update(range(chunk.num_accepted))
                request.draft_length.note(len(chunk.draft_draws), chunk.num_accepted)
            if (scores := result.prompt_scores.get(request.request_id)) is not None:
                request.prompt_log_probs += scores.log_probs
                request.prompt_top_n_logprobs += scores.top_n_logprobs
            # One by one: after several tokens they would become visible at once.
            for end in range(chunk.end, chunk.last_computed + 1):
                request.num_computed = end
                self.cache.commit(request.lease, request.tokens, end)
            self.cache.settle(request.lease)
            self._publish(request, chunk.reservations, result)
            if chunk.draws:
                request.status = RequestStatus.DECODE
            if request.status is RequestStatus.CLOSING:
                self._retire(request)
        for request, reservation in draft.ending.items():
            self._commit_last(request)
            self._publish(request, [reservation], result)
            self._retire(request)
        owners = []
        for request in (*(chunk.request for chunk in draft.chunks), *draft.ready):
            if request.request_id in result.sampled:
                owners += (request, *self.fork(request))
        return owners

    def _note_restored(self, draft: StepDraft, result: StepResult) -> None:
        """Unpin the sources of restores. A request whose restore lacked memory is queued again: to
        start from the cache or, if that failed, from its first token.

        Raises:
            RestoreFailedError: a restore from the cache failed, and no other request runs.
        """
        for request, restore in list(draft.restores.items()):
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
            draft.remove(request)
            self._end_lease(request)
            self._requeue(request)

    def _publish(
        self, request: Request, reservations: list[Reservation], result: StepResult
    ) -> None:
        """Publish saved states, and release the reservations of others: of unsaved ones, and of
        those behind a rejected draft."""
        for reservation in reservations:
            position = reservation.position
            if position > request.num_computed:
                continue
            if (request.request_id, position) in result.unsaved:
                self.cache.decline(request.lease, [position])
                continue
            with self._optional(request.lease, position):
                self.cache.publish_checkpoint(reservation)
        while request.lease.reservations:
            self.cache.abandon(request.lease.reservations[0])

    def _optional(self, lease: Lease, position: int) -> AbstractContextManager[None]:
        """Context of saving a state: for lack of memory it is declined."""
        return optional_decision(lambda error: self.cache.decline(lease, [position]))

    def fork(self, request: Request) -> list[Request]:
        """Fork the request's further samples from its live slot, right after its prefill.

        Returns the forked samples; those without room are queued and start from the cache later.
        """
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
        """Roll back a failed step (`abort`), and blame it: on the request that was being admitted,
        or else on the suspect that ran, or else on all that ran, or else on the first in line.

        Two steps in a row that fail may have any cause, so all requests start again together. Then
        they start one at a time, so that the third one tells which of them it is. Returns the
        requests that were blamed for `MAX_FAILURES` in a row, to be cancelled.
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
        for request in self._draft.parks:
            request.parked_tokens = 0  # the runner may have its bytes, or not
        self._next = StepDraft(drops=self._draft.drops + self._next.drops)
        self._draft, self._admitting = StepDraft(), None
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
        """End an answered request, once its last state is saved; its last token may need one more
        forward pass for that."""
        request.status = RequestStatus.CLOSING
        if self.cache.mode != "restore" or request.num_computed == request.num_tokens:
            self._end(request)

    def cancel(self, request: Request) -> None:
        """Take the request out. Its computed tokens stay cached, with its last state if that is
        worth its room."""
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
        """End a running request: with the next plan if its state is worth its room, else now."""
        if request in self._next.restores:  # a fork that was not executed yet
            self._next.remove(request)
            self._end_lease(request)
            request.status = RequestStatus.FINISHED
            return
        reservation, done = None, request.num_computed
        try:
            if done:
                with self._optional(request.lease, done):
                    reservation = self.cache.reserve_checkpoint(request.lease, done)
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

    @property
    def num_kv_blocks(self) -> int:
        """Number of distinct KV blocks of the running requests."""
        tables = [request.lease.block_table for request in self.running]
        if not tables or not self.cache.spec.kv_pages_per_block:
            return 0
        return len(np.unique(np.concatenate([table[:, 0] for table in tables])))

    def retire_closing(self) -> None:
        """End them without their last states."""
        for request in self.closing:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Commit the computed tokens of a request, and end it."""
        try:
            self._give_up_lease(request)
        finally:
            request.status = RequestStatus.FINISHED

    def _give_up_lease(self, request: Request) -> None:
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
        """Take a request out of `running` and free its slot. Returns its lease, to release."""
        lease, request.lease = request.lease, None
        self.running.remove(request)
        self.free_slots.append(request.slot)
        request.slot = -1
        return lease

    # Preemption --------------------------------------------------------------------------------

    def _preempt(self, draft: StepDraft, request: Request) -> None:
        """Take the pages of a running request and queue it again. Its bytes are parked in host
        memory, to continue at the same token; if they cannot be, it starts from the cache."""
        self.num_preemptions += 1
        request.num_preemptions += 1
        draft.remove(request)
        lease, done = request.lease, request.num_computed
        # Where nothing is computed, or only the first draw is missing, the cache suffices.
        if 0 < done < request.num_tokens:
            request.parked_tokens, request.lease_before = done, lease
            draft.parks[request] = Park(request.request_id, request.slot, done, tables_of(lease))
        try:
            self._give_up_lease(request)
        finally:
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Queue a request that lost its slot as the first, or end it if it is answered."""
        if request.done:
            request.status = RequestStatus.FINISHED
        else:
            request.status = RequestStatus.WAITING
            self.waiting.put_first(request)

    def _resume_parked(self, draft: StepDraft, request: Request) -> bool:
        """Readmit a parked request at the token where it stopped. False: no room."""
        done = request.parked_tokens
        lease = self.cache.resume(
            request.lease_before,
            request.tokens[:done],
            capacity_tokens=request.num_tokens,
            chunk_tokens=self._longest(draft, request),
        )
        if lease is None:
            return False
        self._unqueue(request)
        self._start(request, lease)
        request.parked_tokens, request.lease_before = 0, None
        first_block = lease.shared_tokens // self.cache.spec.block_size_tokens
        draft.restores[request] = Unpark(
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
