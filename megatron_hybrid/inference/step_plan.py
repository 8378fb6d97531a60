"""One step as plain data: all that a runner needs, and what it gives back.

No tensor and no request: a plan can be pickled, compared and sent to another process.
"""

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from megatron_hybrid.inference.sampling_params import Draw, Sampled


@dataclass
class Save:
    """A state to be saved."""

    position: int
    """Tokens that it has seen."""
    pages: np.ndarray
    """int32 [checkpoint_pages]."""


@dataclass
class Park:
    """A preempted request's bytes, to be copied to host memory."""

    request_id: int
    slot: int
    num_tokens: int
    """Tokens whose KV is copied."""
    tables: list[np.ndarray]
    """As `Work.tables`."""


@dataclass
class Unpark:
    """The parked bytes of a request that runs again."""

    request_id: int
    slot: int
    first_block: int
    """KV of full attention is copied from this block on; those before it are shared."""
    tables: list[np.ndarray]
    """As `Work.tables`."""


@dataclass
class Restore:
    """What a newly admitted request starts from; its sources stay pinned until it is there."""

    request_id: int
    slot: int
    sources: np.ndarray
    """int32 [n]: pages of blocks that are shared in part."""
    targets: np.ndarray
    """int32 [n]: the request's own, to which they are copied."""
    checkpoint_pages: np.ndarray | None = None
    """int32 [checkpoint_pages]: goes into the live slot."""
    source_slot: int | None = None
    """The live slot that it is forked from. Without this and a checkpoint it starts from zeros."""


@dataclass
class Work:
    """Tokens [start, end) of one request, to be run in one step."""

    request_id: int
    slot: int
    start: int
    tokens: np.ndarray
    """int32 [end - start]."""
    shared_tokens: int
    """KV of full attention is written from this position on."""
    tables: list[np.ndarray]
    """Block tables, int32 [blocks, pages per block]: of full attention, then each local group. One
    that changes is another array."""
    num_logits: int = 0
    """Last rows whose logits are wanted: 0, 1, or all to score the prompt."""
    draws: dict[int, Draw] = field(default_factory=dict)
    """From the last row, by request id: for the request, and for samples to be forked from it."""
    scored: list[int] = field(default_factory=list)
    """Prompt tokens that want a log-probability."""
    first_scored: int = 0
    """Position of the first of them; the row before it predicts it."""
    saves: list[Save] = field(default_factory=list)
    """In (start, end], ascending."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class Ready:
    """A request whose prompt needs no forward: its last hidden state came with a checkpoint."""

    request_id: int
    slot: int
    draws: dict[int, Draw]


@dataclass
class SlotSave(Save):
    """The state of a request that ends, as its live slot has it."""

    request_id: int
    slot: int


@dataclass
class StepPlan:
    """One step, in the order in which it is executed; requests in batch order. One without work has
    no forward.
    """

    number: int = 0
    drops: list[int] = field(default_factory=list)
    """Ids of requests that ended while they waited, maybe parked."""
    parks: list[Park] = field(default_factory=list)
    loads: dict[bytes, list[np.ndarray]] = field(default_factory=dict)
    """By the key of a fetch: pages for each of its records, int32 [n]. Others see them once the
    fetch has arrived."""
    restores: list[Restore | Unpark] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    ready: list[Ready] = field(default_factory=list)
    saves: list[SlotSave] = field(default_factory=list)

    def __bool__(self) -> bool:
        moves = self.drops or self.parks or self.loads or self.restores or self.saves
        return bool(moves or self.work or self.ready)

    def tokens_digest(self) -> int:
        """Of the tokens that the step computes; the same in every process."""
        digest = 0
        for work in self.work:
            digest = crc32(work.tokens, digest)
        return digest


@dataclass
class StepResult:
    """What came of a plan."""

    sampled: dict[int, Sampled] = field(default_factory=dict)
    """By request id."""
    unparked: dict[int, str] = field(default_factory=dict)
    """Requests whose bytes found no host memory, and why."""
    unloaded: dict[bytes, str] = field(default_factory=dict)
    """Fetches, by key, for which memory was short, and why."""
    unrestored: dict[int, str] = field(default_factory=dict)
    """Requests that lacked the memory for what they start from, which were left out, and why."""
    prompt_log_probs: dict[int, list[float]] = field(default_factory=dict)
    """Of `Work.scored`, by request id."""
    unsaved: dict[tuple[int, int], str] = field(default_factory=dict)
    """Saves, by request id and position, for which memory was short, and why."""
