"""What a trace is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Request:
    """One request of a trace. A trace is an iterable of these, in order of arrival."""

    prompt: np.ndarray
    """int32 [L], L >= 1; often a view that requests of one session share: never written."""
    output: np.ndarray
    """int32 [m]: what the model is said to have answered; empty: not known."""
    session: int | str
    """Turns of one session follow each other: none starts before the one before has ended."""
    turn: int
    arrival: float
    """Seconds since the trace began."""
    message_starts: tuple[int, ...] = ()
    """Positions of the prompt where messages of a chat start, at which others may part from it."""
