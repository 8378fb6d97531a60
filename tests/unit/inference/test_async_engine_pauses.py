"""Pauses and sleep of an `AsyncEngine`, and updates of its weights while requests run."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from reference import fresh_model, greedy, is_greedy, random_tokens

from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.options import RequestOptions

PROMPT, OTHER = random_tokens(60), random_tokens(40, seed=1)
CONFIG = dict(cache_bytes=1 << 20, max_requests=4, max_sequence_length=256)
LONG = 60


@asynccontextmanager
async def running():
    """An engine, a stream of a long answer that has begun, and a task of another one."""
    async with AsyncEngine(fresh_model("M*-"), None, InferenceConfig(**CONFIG)) as engine:
        stream = engine.stream(PROMPT, greedy(LONG))
        first = await anext(stream)
        task = asyncio.create_task(engine.generate(OTHER, greedy(LONG), RequestOptions(n=2)))
        while (await engine.stats())["requests_running"] < 2:
            await asyncio.sleep(0)
        yield engine, stream, first, task


async def rest_of(stream):
    return [output async for output in stream]


async def cached_tokens(engine):
    return (await engine.stats())["cached_tokens"]


async def test_abort_ends_requests_with_what_they_have():
    async with running() as (engine, stream, first, task):
        await engine.pause_generation("abort", clear_cache=False)
        assert await engine.is_paused() and await cached_tokens(engine)
        *_, last = await rest_of(stream)
        result = await task
        for each in (last.result, *result.samples):
            assert each.finish_reason == "cancelled"
            assert len(each.token_ids) < LONG
        assert last.result.token_ids[: len(first.token_ids)] == first.token_ids
        late = asyncio.create_task(engine.generate(PROMPT, greedy(4)))
        bad = asyncio.create_task(engine.generate([], greedy(4)))
        await engine.pause_generation()
        assert not await cached_tokens(engine) and not late.done()
        await engine.resume_generation()
        assert (await late).finish_reason == "length"
        with pytest.raises(ValueError):
            await bad
        assert not await engine.is_paused()


async def begun_pause(engine) -> asyncio.Task:
    """A wait for a pause that holds requests back."""
    pause = asyncio.create_task(engine.pause_generation("wait"))
    while not await engine.is_paused():
        await asyncio.sleep(0)
    return pause


async def test_wait_lets_requests_end_and_others_wait():
    async with running() as (engine, stream, _, task):
        pause = await begun_pause(engine)
        late = asyncio.create_task(engine.generate(PROMPT, greedy(4)))
        assert (await rest_of(stream))[-1].finish_reason == "length"
        assert len((await task).token_ids) == LONG
        await pause
        assert not late.done() and not await cached_tokens(engine)
        await engine.resume_generation()
        assert (await late).prefix.skipped_tokens == 0


async def test_a_wait_for_a_pause_that_was_ended_raises():
    async with running() as (engine, stream, _, task):
        pause = await begun_pause(engine)
        await engine.resume_generation()
        with pytest.raises(RuntimeError, match="has ended this pause"):
            await pause
        assert not await engine.is_paused()
        assert len((await task).token_ids) == LONG
        await rest_of(stream)


async def test_kept_requests_go_on_where_they_were():
    async with running() as (engine, stream, _, task):
        await engine.pause_generation("keep")
        steps = (await engine.stats())["steps"]
        await asyncio.sleep(0.02)
        stats = await engine.stats()
        assert stats["steps"] == steps and stats["requests_running"] == 3
        left = engine.stream(PROMPT[:20], greedy(LONG))
        await left.aclose()  # a request that is held back
        await engine.resume_generation()
        assert (await rest_of(stream))[-1].finish_reason == "length"
        assert len((await task).token_ids) == LONG
        await engine.check_integrity()
        assert (await engine.stats())["request_restarts"] == 0


async def test_an_update_holds_requests_back_and_they_go_on_with_it(tmp_path):
    save_checkpoint(fresh_model("M*-", 1), tmp_path)
    async with running() as (engine, stream, _, task):
        await engine.start_weight_update()
        late = asyncio.create_task(engine.generate(PROMPT, greedy(4)))
        steps = (await engine.stats())["steps"]
        await engine.receive_weights({"path": str(tmp_path)})
        assert (await engine.stats())["steps"] == steps and not late.done()
        await engine.finish_weight_update()
        result = (await rest_of(stream))[-1].result
        (_, _), (epoch, start) = result.epochs
        assert epoch == 1 == await engine.epoch()
        before = PROMPT + result.token_ids[:start]
        assert is_greedy(fresh_model("M*-", 1), before, result.token_ids[start:])
        assert [epoch for epoch, _ in (await task).epochs] == [0, 1]
        assert (await late).epochs == [(1, 0)]
        # A mistake that changed nothing ends the update.
        await engine.start_weight_update()
        with pytest.raises(ValueError):
            await engine.receive_weights({"path": "/nowhere"})
        assert (await engine.generate(PROMPT, greedy(4))).epochs == [(1, 0)]
        with pytest.raises(RuntimeError, match="needs an update"):
            await engine.finish_weight_update()


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_gives_memory_back_and_wake_up_takes_it_again(level, tmp_path):
    save_checkpoint(fresh_model("M*-", 1), tmp_path)
    async with running() as (engine, stream, _, task):
        await engine.sleep(level, "keep")
        model, memory = engine._engine.model, engine._engine.memory
        assert await engine.is_sleeping() and memory.held_bytes == 0
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
        with pytest.raises(RuntimeError, match="sleeps: call wake_up"):
            await engine.resume_generation()
        with pytest.raises(RuntimeError, match="reacquire_weights"):
            await engine.wake_up(["kv_cache"])
        task.cancel()  # a request that runs
        await engine.wake_up("weights")
        assert await engine.is_sleeping()
        if level == 2:
            await engine.start_weight_update()
            await engine.receive_weights({"path": str(tmp_path)})
            await engine.finish_weight_update()
        await engine.wake_up(["kv_cache"])
        assert not (await engine.is_sleeping() or await engine.is_paused())
        result = (await rest_of(stream))[-1].result
        assert [epoch for epoch, _ in result.epochs] == list(range(level))
        while (await engine.stats())["requests_running"]:
            await asyncio.sleep(0)
        await engine.check_integrity()


async def test_what_there_is_not_is_refused():
    async with AsyncEngine(fresh_model("M*-"), None, InferenceConfig(**CONFIG)) as engine:
        with pytest.raises(ValueError, match="mode is 'stop'; use one of abort, wait, keep"):
            await engine.pause_generation("stop")
        with pytest.raises(ValueError, match="level is 3; use 0, 1 or 2"):
            await engine.sleep(3)
        with pytest.raises(ValueError, match="no 'all' to wake up; use weights, kv_cache"):
            await engine.wake_up(["all"])
        await engine.sleep(0)
        assert await engine.is_paused() and not await engine.is_sleeping()
        waiting = asyncio.create_task(engine.generate(PROMPT, greedy(4)))
        await engine.stats()
    with pytest.raises(RuntimeError, match="closed before this request was answered"):
        await waiting
