"""Tests that are coroutines."""

import asyncio
import functools
from collections.abc import Callable, Coroutine

from waiting import LIMIT_S


def in_loop(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """Run a test in an event loop of its own; a limit of time ends what hangs."""

    @functools.wraps(test)
    def call(**fixtures) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), LIMIT_S))

    return call
