"""What an error means, whoever raised it."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_WORDS = ("out of memory", "can't allocate memory", "can't start new thread", "ALLOC_FAILED")


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch says it in words only on a CPU."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def optional_work(failed: Callable[[Exception], object]) -> Iterator[None]:
    """Around work that nobody has to wait for: without memory it is left out, and `failed` is told
    of the error. Other errors pass."""
    try:
        yield
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        failed(error)
