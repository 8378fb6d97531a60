"""Interface between a replay and a cache manager: requests, and who takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

STEP_TOKENS, WINDOW_STEP_TOKENS = 8192, 2048
"""Tokens of the longest forward, for all engines that split prompts: vLLM's default on large GPUs;
and a limit for windows, where a forward holds the KV of all its tokens in all layers."""


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a trace. A trace is an iterable of these, in order of arrival."""

    prompt: np.ndarray
    """int32 [L], L >= 1; read-only, often a view shared by the requests of a session."""
    output: np.ndarray
    """int32 [m]: the answer; empty if it is unknown."""
    session: int | str
    """Each turn of a session starts after the end of the turn before."""
    turn: int
    arrival: float
    """Seconds since the trace began."""
    message_starts: tuple[int, ...] = ()
    """Starts of messages in the prompt, where other chats may part from it."""


class Attempts:
    """A correction of skipped tokens for an engine that may run out of room inside a prompt: the
    next attempt must not count the tokens that the failed one has cached."""

    def __init__(self):
        self._prompt, self._skipped = None, 0

    def refused(self, prompt: Any, skipped_tokens: int) -> None:
        """Note a failed `begin` of this prompt (the object) and its skipped tokens."""
        self._prompt, self._skipped = prompt, self.admitted(prompt, skipped_tokens)

    def admitted(self, prompt: Any, skipped_tokens: int) -> int:
        """Count the tokens that no attempt has computed."""
        return min(skipped_tokens, self._skipped) if prompt is self._prompt else skipped_tokens


class Engine(Protocol):
    """A cache manager under replay. A request begins (lookup, room, and the whole prefill, so that
    its states are there for the next request) and finishes (the whole answer, then its pins are
    dropped)."""

    def begin(self, prompt: Any, message_starts: Sequence[int] = ()) -> Any:
        """Begin a request. prompt, message_starts: those of a `Request`.

        Returns:
            Its handle, which has `skipped_tokens`: leading tokens of the prompt that are not
            computed. None if the requests in flight leave no room.
        """

    def finish(self, handle: Any, tokens: Any) -> None:
        """Finish a request. tokens: prompt and answer."""
