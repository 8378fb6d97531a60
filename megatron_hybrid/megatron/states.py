"""Megatron's states of an engine."""

from enum import Enum, auto


class EngineState(Enum):
    """Without a coordinator an engine is RUNNING or SUSPENDED. Behind one it is in those states
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
