"""Megatron's states of an engine."""

from enum import Enum, auto


class EngineState(Enum):
    """States of an engine. Without a coordinator it is RUNNING or SUSPENDED, with one in those
    that last: the others are of Megatron's own engine."""

    RUNNING = auto()
    PAUSING = auto()
    PAUSED = auto()
    UNPAUSING = auto()
    SUSPENDING = auto()
    SUSPENDED = auto()
    RESUMING = auto()
    RESUMED = auto()
    STOPPING = auto()
    STOPPED = auto()


STABLE = (
    EngineState.RUNNING,
    EngineState.PAUSED,
    EngineState.SUSPENDED,
    EngineState.RESUMED,
    EngineState.STOPPED,
)
"""States that last, and that one can wait for."""
