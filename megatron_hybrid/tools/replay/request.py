"""Request: one request of a trace."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a trace. A trace is an iterable of these, in order of arrival."""

    prompt: np.ndarray
    """int32 [L], L >= 1; read-only, often a view shared by the requests of a session."""
    output: np.ndarray
    """int32 [m]: the answer; empty: not known."""
    session: int | str
    """Each turn of a session starts after the end of the turn before."""
    turn: int
    arrival: float
    """Seconds since the trace began."""
    message_starts: tuple[int, ...] = ()
    """Starts of messages in the prompt, where other chats may part from it."""
