"""Threads that no exit waits for."""

import asyncio
import threading
import weakref

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


def test_keys_take_turns():
    threads, done, gate = DaemonThreads("test", 1), [], threading.Event()
    threads.submit(gate.wait)
    futures = [
        threads.submit(lambda name=f"{key}{number}": done.append(name), key)
        for key, count in (("a", 4), ("b", 2), ("c", 1))
        for number in range(count)
    ]
    gate.set()
    for future in futures:
        future.result(60)
    assert done == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


def test_large_jobs_leave_threads_to_small_ones_and_to_other_keys():
    threads, gate = DaemonThreads("test", 4), threading.Event()
    began = threading.Semaphore(0)

    def large() -> bool:
        began.release()
        return gate.wait(60)

    running = [threads.submit(large, "a", is_large=True) for _ in range(9)]
    assert all(began.acquire(timeout=60) for _ in range(2))  # two of one key
    running.append(threads.submit(large, "b", is_large=True))
    assert began.acquire(timeout=60)  # and one of another
    more = threads.submit(large, "c", is_large=True)
    assert threads.submit(lambda: "small", "a").result(60) == "small"
    assert not began.acquire(blocking=False) and not more.running()
    assert running[5].cancel()
    gate.set()
    assert all(future.result(60) for future in (*running[:5], *running[6:], more))


def test_what_a_cancelled_job_holds_is_freed_at_once():
    threads, gate = DaemonThreads("test", 1), threading.Event()
    threads.submit(gate.wait)

    class Text:
        def read(self) -> None: ...

    text = Text()
    future, held = threads.submit(text.read), weakref.ref(text)
    del text
    assert held() is not None and future.cancel()
    assert held() is None
    gate.set()
