"""Interface between a replay and a cache manager."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

STEP_TOKENS, WINDOW_STEP_TOKENS = 8192, 2048
"""Tokens of the longest forward, the same for all engines that split prompts, vLLM's default on
large GPUs; and with windows, where a forward holds the KV of all its tokens in all layers."""


class Attempts:
    """Corrects the skipped tokens of an engine that may run out of room inside a prompt: the next
    attempt must not count the tokens cached by the failed one."""

    def __init__(self):
        self._prompt, self._skipped = None, 0

    def refused(self, prompt: Any, skipped_tokens: int) -> None:
        """Note a failed `begin` of this prompt (the object) and its skipped tokens."""
        self._prompt, self._skipped = prompt, self.admitted(prompt, skipped_tokens)

    def admitted(self, prompt: Any, skipped_tokens: int) -> int:
        """Tokens that were computed in no attempt."""
        return min(skipped_tokens, self._skipped) if prompt is self._prompt else skipped_tokens


class Engine(Protocol):
    """A cache manager under replay. A request begins (lookup, room, and the whole prefill, so that
    its states are there for the next request) and finishes (the whole answer, then its pins are
    dropped). One with a method `foresee` gets all requests in advance, in order of arrival."""

    def prepare(self, tokens: np.ndarray) -> Any:
        """Convert int32 [n] to the engine's form of tokens; not timed."""
        return tokens

    def begin(self, prompt: Any, message_starts: Sequence[int] = ()) -> Any:
        """Begin a request; prompt: from `prepare`, message_starts: of `Request`.

        Returns:
            Its handle, which has `skipped_tokens`: leading tokens of the prompt that are not
            computed. None: those in flight leave no room.
        """

    def finish(self, handle: Any, tokens: Any) -> None:
        """Finish a request; tokens: prompt and answer, from `prepare`."""
