"""Errors for lack of memory, from any library."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORDS = ("out of memory", "can't allocate memory", "can't start new thread", "ALLOC_FAILED")


def is_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation. On a CPU, only torch's message says so."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def optional_work(failed: Callable[[Exception], object]) -> Iterator[None]:
    """Make a context for optional work. An error for lack of memory is passed to `failed` and
    suppressed; any other error propagates."""
    try:
        yield
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        failed(error)


num_decided_by_memory = 0
"""Number of decisions of this process that a lack of memory has changed. Other ranks have decided
otherwise, and cannot know it."""


@contextmanager
def optional_decision(failed: Callable[[Exception], object]) -> Iterator[None]:
    """Make a context as `optional_work`, for a decision that all ranks make, each for itself."""
    with optional_work(lambda error: (note_decided_by_memory(), failed(error))):
        yield


def note_decided_by_memory() -> None:
    """Count a decision that a lack of memory has changed."""
    global num_decided_by_memory
    num_decided_by_memory += 1
