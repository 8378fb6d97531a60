"""Steps of the end of a server: each has its time, and one that fails does not stop the next."""

import asyncio
import logging
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

logger = logging.getLogger(__name__)
STEP_SECONDS = 30.0
"""Time of a step that no request and no disk holds up."""
SAVE_SECONDS = 600.0
"""Time in which the cache is saved, and that in which the engine completes its folder."""
Step = tuple[str, Callable[[], Any], float]
"""What a step does, for the log; its function, or coroutine function; and its seconds."""


async def run_steps(*steps: Step) -> None:
    """Run steps one after the other. One that fails, or takes too long, is logged and left."""
    for name, work, seconds in steps:
        try:
            async with asyncio.timeout(seconds):
                if isawaitable(result := work()):
                    await result
        except TimeoutError:
            logger.error("%s was given up after %g s", name, seconds)
        except Exception:
            logger.exception("%s failed", name)
