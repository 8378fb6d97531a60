"""RequestView: a request at one moment as plain data, and the memory of those that ended."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.inference.requests.request import Request

MAX_ENDED = 32
"""Ended requests that are remembered."""
_MAX_TOKENS = 1 << 15
"""Tokens of each that are remembered, to find them in the tree."""


@dataclass(frozen=True)
class RequestView:
    """A request, or one sample of it."""

    request_id: int
    sample_index: int
    status: str
    """`RequestStatus`; of an ended one, its `finish_reason`."""
    is_ended: bool
    priority: int
    seconds: float
    """Seconds from its arrival to its end, or until now."""
    seconds_to_first_token: float | None
    prompt_tokens: int
    shared_tokens: int
    """Zero, as `skipped_tokens`, while it waits."""
    skipped_tokens: int
    fetched_tokens: int
    computed_tokens: int
    """All that are computed by now, skipped ones included, of the prompt and of the answer."""
    generated_tokens: int
    draft_tokens: int
    """Drafts of its answer that were computed."""
    accepted_draft_tokens: int
    """How many of these were drawn and kept."""
    miss_reason: MissReason | None
    edge: int = 0
    """Number of the edge that spans its last known token, see `EdgeView`, or 0."""
    last_tokens: list[int] = field(default_factory=list)
    """Last tokens of the prompt, as many as were asked for."""


def view_request(request: Request) -> RequestView:
    """Make the view of a request, without its edge and tokens."""
    report, ended_at = request.lease_report, request.finished_at
    first = request.first_token_at
    return RequestView(
        request.request_id,
        request.sample_index,
        request.finish_reason or request.status.value,
        request.done,
        request.options.priority,
        (time.perf_counter() if ended_at is None else ended_at) - request.added_at,
        None if first is None else first - request.added_at,
        request.num_prompt_tokens,
        report.shared_tokens if report else 0,
        report.skipped_tokens if report else 0,
        report.fetched_tokens if report else 0,
        request.num_computed,
        request.num_generated,
        request.draft_length.num_drafts,
        request.draft_length.num_accepted,
        report.miss_reason if report else None,
    )


class EndedRequests:
    """The last `MAX_ENDED` requests that ended."""

    def __init__(self):
        self._ended: deque[tuple[RequestView, np.ndarray, str]] = deque(maxlen=MAX_ENDED)

    def note(self, request: Request) -> None:
        tokens = request.tokens[: min(request.num_tokens, _MAX_TOKENS)].copy()
        self._ended.appendleft((view_request(request), tokens, request.salt))

    def views(
        self,
        live: Iterable[Request],
        edge_number: Callable[[np.ndarray, str], int],
        num_tokens: int,
    ) -> list[RequestView]:
        """Return views of requests and, after them, of those that ended, the last one first.

        Args:
            live: in order; answered ones are left out.
            edge_number: of tokens and their salt, see `CacheContents`.
            num_tokens: last tokens of each prompt to show.
        """
        found = [
            *((view_request(r), r.tokens[: r.num_tokens], r.salt) for r in live if not r.done),
            *self._ended,
        ]
        return [
            replace(
                view,
                edge=edge_number(tokens, salt),
                last_tokens=tokens[: view.prompt_tokens][-num_tokens:].tolist()
                if num_tokens
                else [],
            )
            for view, tokens, salt in found
        ]
