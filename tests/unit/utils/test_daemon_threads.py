"""Threads that no exit waits for."""

import asyncio
import threading

import pytest

from megatron_hybrid.utils.daemon_threads import DaemonThreads


def test_jobs_run_in_order_in_a_bounded_number_of_threads():
    threads, done = DaemonThreads("test", 1), []
    gate = threading.Event()
    futures = [threads.submit(gate.wait)]
    futures += [threads.submit(lambda number=number: done.append(number)) for number in range(9)]
    assert futures[3].cancel()
    gate.set()
    futures[-1].result(60)
    assert done == [0, 1, *range(3, 9)]
    assert sum(thread.name == "test" for thread in threading.enumerate()) == 1


def test_an_error_is_that_of_its_future():
    with pytest.raises(ZeroDivisionError):
        DaemonThreads("test", 1).submit(lambda: 1 / 0).result(60)


def test_the_end_of_an_event_loop_waits_for_no_job():
    gate, threads = threading.Event(), DaemonThreads("test", 1)

    async def leave() -> None:
        asyncio.wrap_future(threads.submit(gate.wait))

    asyncio.run(leave())  # with asyncio's own threads it would wait for ever
    gate.set()
