"""What a replay asks of a cache manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megatron_hybrid.tools.replay.request import Request


def step_tokens(windows: bool) -> int:
    """Longest forward of one request, the same for all engines that cut prompts. Where windows
    roll, a forward holds the KV of all of its tokens in all layers: there it is shorter."""
    return 2048 if windows else 8192


class Attempts:
    """Of an engine that may find out in the middle of a prompt that there is no room: by then it
    has cached a part, which the next attempt finds and must not count."""

    def __init__(self):
        self._prompt, self._skipped = None, 0

    def refused(self, prompt: Any, skipped_tokens: int) -> None:
        """`begin` of this prompt (the object) failed, having skipped so many tokens."""
        self._prompt, self._skipped = prompt, self.admitted(prompt, skipped_tokens)

    def admitted(self, prompt: Any, skipped_tokens: int) -> int:
        """Tokens that did not have to be computed in any attempt."""
        return min(skipped_tokens, self._skipped) if prompt is self._prompt else skipped_tokens


class Handle(Protocol):
    """A request between `begin` and `finish`."""

    skipped_tokens: int
    """Leading tokens of the prompt that are not computed."""


class Engine(Protocol):
    """A cache manager under replay. A request begins (lookup, room, the whole prefill in one
    piece, so that what it saves can be found by the next) and finishes (its answer in one piece,
    then its hold on the cache ends)."""

    def prepare(self, tokens: np.ndarray) -> Any:
        """int32 [n] in the form in which the engine gets its tokens; not timed."""

    def begin(self, prompt: Any) -> Handle | None:
        """The prompt as from `prepare`. None: there is no room beside the requests in flight."""

    def finish(self, handle: Handle, tokens: Any) -> None:
        """Prompt and answer as from `prepare`."""


@runtime_checkable
class KnowsMessages(Protocol):
    """An engine that is told where the messages of a chat start."""

    def begin_chat(self, prompt: Any, message_starts: Sequence[int]) -> Handle | None:
        """As `begin`. message_starts: of `Request`."""


@runtime_checkable
class Foreseeing(Protocol):
    """An engine that has to know the trace before it begins."""

    def foresee(self, requests: Sequence[Request]) -> None:
        """All requests, in order of arrival."""
