"""PlanBuilder: a step with its requests and leases, from which the plan of plain data is made."""

from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from megatron_hybrid.cache.lease import Lease, Reservation
from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.inference.sampling_params import Draw
from megatron_hybrid.inference.scheduling.step_plan import (
    Park,
    Ready,
    Restore,
    Save,
    Scored,
    SlotSave,
    StepPlan,
    Unpark,
    Work,
)

_UNKNOWN = np.zeros(1, np.int32)


@dataclass(slots=True)
class Chunk:
    """Tokens [start, end) of a request that the next step computes."""

    request: Request
    start: int
    end: int
    draws: bool
    """Whether the known tokens end with its last row, so that the next token is drawn."""
    draft_draws: list[Draw] = field(default_factory=list)
    """Draws of drafts, as `Work.draft_draws`; the drafts lie after the request's known tokens."""
    num_accepted: int = 0
    """Drafts that are in the answer, after the forward."""
    has_ended: bool = False
    """Whether the last of them has ended the answer."""
    reservations: list[Reservation] = field(default_factory=list)
    source: int = -1
    """Number as `Work.source`, if its only token is not known yet."""

    @property
    def last(self) -> int:
        """The end of its drafts."""
        return self.end + len(self.draft_draws)

    @property
    def last_computed(self) -> int:
        """The end of its accepted drafts, without one that has ended the answer: like the last
        token of other answers, that one is not computed yet."""
        return self.end + self.num_accepted - self.has_ended

    def saves(self) -> list[Save]:
        ordered = sorted(self.reservations, key=attrgetter("position"))
        return [Save(each.position, each.pages) for each in ordered]

    def work(self) -> Work:
        request, lease = self.request, self.request.lease
        work = Work(
            request.request_id,
            request.slot,
            self.start,
            request.tokens[self.start : self.last],
            lease.shared_tokens,
            tables_of(lease),
        )
        if self.reservations:
            work.saves = self.saves()
        if request.adapter is not None:
            work.adapter_slot = request.adapter.slot
        if self.source >= 0:  # its draw follows when its token is known
            work.tokens, work.num_logits = _UNKNOWN, 1
            work.source, work.stops = self.source, request.dropped_stops
        elif self.draws:
            work.num_logits, work.draws = 1 + len(self.draft_draws), draws_of(request)
            work.draft_draws = self.draft_draws
        if request.prompt_needs_logits:
            work.num_logits = self.end - self.start
            # A preempted request that computes its prompt again has some of them already.
            first = len(request.prompt_log_probs) + 1
            last = min(self.end, request.num_prompt_tokens - 1)
            if first <= last:
                tokens = request.tokens[first : last + 1].tolist()
                work.scored = Scored(first, tokens, request.params)
        return work


def tables_of(lease: Lease) -> list[np.ndarray]:
    """Return block tables, as `Work.tables`."""
    return [lease.block_table, *lease.local_tables]


def copies_of(lease: Lease) -> tuple[np.ndarray, np.ndarray]:
    """Return source and target pages of a new lease's copies, int32 [n] each."""
    nothing = np.empty(0, np.int32)
    return (
        np.concatenate([nothing, *(copy.src_pages for copy in lease.copies)]),
        np.concatenate([nothing, *(copy.dst_pages for copy in lease.copies)]),
    )


def draws_of(request: Request) -> dict[int, Draw]:
    """Return the draws of a request and of the samples to fork from it, by request id."""
    draws = {request.request_id: request.draw()}
    for sibling in request.siblings:
        draws[sibling.request_id] = sibling.draw()
    return draws


@dataclass
class PlanBuilder:
    """A step with the objects that `Scheduler.complete` needs after it has run."""

    chunks: list[Chunk] = field(default_factory=list)
    ready: list[Request] = field(default_factory=list)
    restores: dict[Request, Restore | Unpark] = field(default_factory=dict)
    parks: dict[Request, Park] = field(default_factory=dict)
    drops: list[int] = field(default_factory=list)
    ending: dict[Request, Reservation] = field(default_factory=dict)
    """Requests that end with the step, with the reservation for their last state."""
    num_tokens: int = 0
    kept: dict[Request, int] = field(default_factory=dict)
    """Tokens of the budget that are kept for short prompts, while the step is planned."""
    launched: dict[Request, int] = field(default_factory=dict)
    """The end of each request's tokens that the step before computes, if that one still runs."""
    is_ahead: bool = False
    """Whether the step is planned while the one before runs; then it preempts nobody."""
    is_short: bool = False
    """Whether a running request has no row, for lack of room or as its token was drawn again."""

    def start_of(self, request: Request) -> int:
        """Return the first of a request's tokens that no step before this one computes."""
        return self.launched.get(request, request.num_computed)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.num_tokens += chunk.end - chunk.start

    def drop_chunk(self, request_id: int) -> None:
        self.chunks = [each for each in self.chunks if each.request.request_id != request_id]

    def remove(self, request: Request) -> None:
        """Remove a request that was preempted, or ended, while the step was planned."""
        self.drop_chunk(request.request_id)
        self.num_tokens = sum(chunk.last - chunk.start for chunk in self.chunks)
        self.ready = [ready for ready in self.ready if ready is not request]
        self.restores.pop(request, None)
        self.ending.pop(request, None)

    def plan(self, loads: dict[bytes, list[np.ndarray]]) -> StepPlan:
        works = [chunk.work() for chunk in self.chunks]
        return StepPlan(
            drops=self.drops,
            parks=list(self.parks.values()),
            loads=loads,
            restores=list(self.restores.values()),
            # Single tokens come first, then decodes with drafts, so that each takes the same path
            # through recurrent layers, whatever is computed next to it.
            work=sorted(works, key=lambda work: (len(work.tokens) > 1, not work.draft_draws)),
            ready=[Ready(r.request_id, r.slot, draws_of(r)) for r in self.ready],
            saves=[
                SlotSave(saved.position, saved.pages, r.request_id, r.slot)
                for r, saved in self.ending.items()
            ],
        )
