"""Guides in a process of their own: stopped, limited, cached. One process serves all tests."""

import asyncio
import json
import os
import time
from concurrent.futures import CancelledError

import pytest

from megatron_hybrid.text import guide_pool
from megatron_hybrid.text.guide import Guide, GuideCompiler, grammar_of
from megatron_hybrid.text.guide_pool import GuidePool

TOKENS = [bytes([byte]) for byte in range(256)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SECONDS = 240  # for what takes 3 s on a quiet machine


def endless(number: int) -> Guide:
    """A guide that takes minutes."""
    properties = {
        f"p{i}": {"type": "integer", "minimum": -i * 7919, "maximum": i * 104729 + number}
        for i in range(3000)
    }
    schema = json.dumps({"type": "object", "properties": properties})
    return Guide.json_schema(schema, check=False)


@pytest.fixture(scope="module")
def pool():
    pool = GuidePool(TOKENS, len(TOKENS))
    yield pool
    pool.close()


def test_a_guide_comes_back_with_the_grammar_that_is_written_in_place(pool):
    guide = Guide.json_schema(SCHEMA, check=False)
    done = pool.compile(guide).result(SECONDS)
    assert (done, guide.ebnf, done.ebnf) == (guide, None, grammar_of(guide))
    matcher = GuideCompiler(TOKENS, len(TOKENS)).matcher(done, ())
    matcher.add(list(b'{"a": 1}'))
    assert matcher.is_over


def test_abandoned_guides_stop_and_the_next_one_is_served_before_any_of_them(pool):
    pool.compile(Guide.regex("warm")).result(SECONDS)
    futures = [pool.compile(endless(number)) for number in range(8)]
    again = pool.compile(endless(0))  # one job for both
    assert pool.num_unfinished == 8
    worker = pool._workers[0]
    process, before = worker._process, pool.num_compiled
    while not any(job.worker for job in pool._jobs.values()):
        time.sleep(0.001)
    futures[0].cancel()
    assert pool.num_unfinished == 8  # `again` waits for it
    for future in (*futures, again):
        assert future.cancel()
    assert pool.num_unfinished == 0
    assert pool.compile(Guide.regex("next")).result(SECONDS) == Guide.regex("next")
    assert pool.num_compiled == before + 1
    assert worker.process_id == process.pid and len(pool._workers) == 1  # nothing starts anew


def test_a_small_guide_overtakes_large_ones_that_wait(pool):
    large = [pool.compile(endless(number)) for number in range(3)]
    small = pool.compile(Guide.regex("small"))
    order = sorted(pool._heap)
    assert {job.guide for job in order[-2:]} < {endless(number) for number in range(3)}
    for future in large:
        future.cancel()
    assert small.result(SECONDS) == Guide.regex("small")


def test_a_guide_that_takes_too_long_or_is_too_large_is_refused_by_its_limit(pool, monkeypatch):
    pool.compile(Guide.regex("ready")).result(SECONDS)
    monkeypatch.setattr(pool, "seconds", 0.05)
    with pytest.raises(ValueError, match=r"more than 0\.05 s"):
        pool.compile(endless(1)).result(SECONDS)
    with pytest.raises(ValueError, match="characters, and may have 262144"):
        pool.compile(Guide.regex("a" * (guide_pool.MAX_GUIDE_CHARS + 1)))
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"bad JSON schema: .*not"):
        pool.compile(Guide.json_schema({"not": {}}, check=False)).result(SECONDS)


def test_equal_guides_are_compiled_once(pool):
    guide, before = Guide.regex("[a-z]+"), pool.num_compiled
    first = pool.compile(guide).result(SECONDS)
    assert pool.compile(Guide.regex("[a-z]+")).result(0) is first
    assert pool.num_compiled == before + 1


def test_a_cancelled_task_cancels_its_guide(pool):
    async def leave() -> None:
        task = asyncio.ensure_future(asyncio.wrap_future(pool.compile(endless(5))))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert pool.num_unfinished == 0


def test_the_process_has_a_low_priority(pool):
    pool.compile(Guide.regex("low")).result(SECONDS)
    process = pool._workers[0].process_id
    assert os.getpriority(os.PRIO_PROCESS, process) >= guide_pool.NICENESS


def test_the_process_ends_with_its_parent_however_busy_it_is(pool):
    """All that a killed parent leaves is the end of its connection."""
    pool.compile(Guide.regex("b")).result(SECONDS)
    worker = pool._workers[0]
    process = worker._process
    worker._connection.send(endless(1))
    worker._connection.close()
    assert process.wait(SECONDS) == 0


def test_a_closed_pool_ends_its_guides_and_its_process():
    pool = GuidePool(TOKENS, len(TOKENS))
    waiting = pool.compile(endless(1))
    while pool._workers[0].process_id is None:
        time.sleep(0.001)
    process = pool._workers[0]._process
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(SECONDS)
    process.wait(SECONDS)
    with pytest.raises(RuntimeError, match="closed"):
        pool.compile(Guide.regex("a"))
