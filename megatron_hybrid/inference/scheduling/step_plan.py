"""StepPlan, the input of a runner, and StepResult, its output: plain data.

They hold no tensor and no request, so they can be pickled, compared and sent to another process.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_hybrid.inference.sampling_params import Draw, Sampled, SamplingParams


@dataclass
class Save:
    """A state to save."""

    position: int
    """Tokens that it has seen."""
    pages: np.ndarray
    """int32 [checkpoint_pages]."""


@dataclass
class Park:
    """A copy of a preempted request's bytes to host memory."""

    request_id: int
    slot: int
    num_tokens: int
    """Tokens whose KV is copied."""
    tables: list[np.ndarray]
    """Block tables, as `Work.tables`."""


@dataclass
class Unpark:
    """A copy of parked bytes back to the device."""

    request_id: int
    slot: int
    first_block: int
    """KV of full attention is copied from this block on; the blocks before it are shared."""
    tables: list[np.ndarray]
    """Block tables, as `Work.tables`."""


@dataclass
class Restore:
    """The start of a newly admitted request; its sources stay pinned until `Scheduler.complete`."""

    request_id: int
    slot: int
    sources: np.ndarray
    """Pages of blocks that are shared in part, int32 [n]."""
    targets: np.ndarray
    """The request's own pages for copies of them, int32 [n]."""
    checkpoint_pages: np.ndarray | None = None
    """Pages to load into the live slot, int32 [checkpoint_pages]."""
    source_slot: int | None = None
    """The live slot to fork from. Without it and a checkpoint the request starts from zeros."""


@dataclass
class Scored:
    """Prompt tokens that need a log-probability, each predicted by the row before it."""

    first: int
    """Position of the first one."""
    tokens: list[int]
    params: SamplingParams


@dataclass(slots=True)
class Work:
    """Tokens [start, end) of one request to compute in the step."""

    request_id: int
    slot: int
    start: int
    tokens: np.ndarray
    """int32 [end - start]."""
    shared_tokens: int
    """KV of full attention is written from this position on."""
    tables: list[np.ndarray]
    """Block tables, int32 [blocks, pages per block]: of full attention, then of each local group. A
    changed table is a new array."""
    num_logits: int = 0
    """Number of last rows that need logits: 0, 1, or all to score the prompt."""
    draws: dict[int, Draw] = field(default_factory=dict)
    """Draws from the row of the last known token, by request id: for the request, and for the
    samples to fork from it."""
    draft_draws: list[Draw] = field(default_factory=list)
    """One draw from the row of each draft; so many last tokens are drafts. A draw counts if this
    draft and those before it are what the rows before them draw."""
    scored: Scored | None = None
    """Prompt tokens that need a log-probability."""
    saves: list[Save] = field(default_factory=list)
    """States to save at positions in (start, end], ascending."""
    adapter_slot: int = -1
    """The slot of the request's adapter, or -1."""
    source: int = -1
    """Number of the draw in the step before that draws its token, if this step is launched ahead
    and `tokens` do not have that token yet, or -1."""
    stops: tuple[int, ...] = ()
    """Tokens that a row with a `source` does not compute, as the request has ended before them. It
    computes none below 0 either."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def drafts(self) -> np.ndarray:
        """int32 [len(draft_draws)]."""
        return self.tokens[len(self.tokens) - len(self.draft_draws) :]

    @property
    def captures(self) -> list[int]:
        """Positions before the end whose states the forward keeps, ascending: without drafts those
        to save, with drafts all at which a draft may be rejected."""
        if self.draft_draws:
            return list(range(self.end - len(self.draft_draws), self.end))
        return [save.position for save in self.saves if save.position < self.end]


@dataclass
class Ready:
    """A request that draws without a forward, as a checkpoint holds its last hidden state."""

    request_id: int
    slot: int
    draws: dict[int, Draw]


@dataclass
class SlotSave(Save):
    """The state of an ending request, to save from its live slot."""

    request_id: int
    slot: int


@dataclass
class StepPlan:
    """One step; its fields are executed in this order, requests in batch order. Without `work`
    there is no forward."""

    drops: list[int] = field(default_factory=list)
    """Ids of requests that ended while they waited, perhaps parked."""
    parks: list[Park] = field(default_factory=list)
    loads: dict[bytes, list[np.ndarray]] = field(default_factory=dict)
    """Target pages of each record of a fetch, int32 [n], by its key. They are published after the
    arrival."""
    restores: list[Restore | Unpark] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    saves: list[SlotSave] = field(default_factory=list)

    def __bool__(self) -> bool:
        moves = self.drops or self.parks or self.loads or self.restores or self.saves
        return bool(moves or self.work or self.ready)

    def draws(self) -> list[tuple[int, Draw]]:
        """List all draws of the step, each with its request's id, in the order of the logits."""
        found = []
        for work in self.work:
            found += work.draws.items()
            found += [(work.request_id, draw) for draw in work.draft_draws]
        return found + [drawn for ready in self.ready for drawn in ready.draws.items()]

    def save_keys(self) -> list[tuple[int, int]]:
        """List the request id and position of each save, as in `StepResult.unsaved`."""
        inside = [(work.request_id, save.position) for work in self.work for save in work.saves]
        return inside + [(save.request_id, save.position) for save in self.saves]


@dataclass
class StepResult:
    """The result of a plan. Parts that lacked memory are left out, with the error's text."""

    sampled: dict[int, Sampled] = field(default_factory=dict)
    """Last draw that counts, by request id."""
    accepted: dict[int, list[Sampled]] = field(default_factory=dict)
    """The draws before it, equal to the first drafts, by the ids of requests that have any."""
    not_parked: dict[int, str] = field(default_factory=dict)
    """Parks that lacked memory, by request id."""
    unloaded: dict[bytes, str] = field(default_factory=dict)
    """Loads that lacked memory, by the key of the fetch."""
    unrestored: dict[int, str] = field(default_factory=dict)
    """Restores that lacked memory, by request id; what these requests drew and saved is void."""
    again: set[int] = field(default_factory=set)
    """Ids of requests whose token was drawn again; a step launched ahead has another token."""
    prompt_scores: dict[int, tuple[list[float], list[dict[int, float]]]] = field(
        default_factory=dict
    )
    """Log-probabilities of `Work.scored`, and those of the most likely tokens at these positions
    (empty if none were asked for), by request id."""
    unsaved: dict[tuple[int, int], str] = field(default_factory=dict)
    """Saves that lacked memory, by request id and position."""
