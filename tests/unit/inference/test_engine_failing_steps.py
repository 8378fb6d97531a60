"""Steps that raise under eight streams: none loses or repeats a token, and what always fails ends
alone."""

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
from differential import InjectedError
from matrix import matrix_rows
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid import AsyncEngine, DynamicInferenceEngine, SamplingParams
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.distributed.rank_control import RankControl
from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.scheduling.scheduler import Scheduler
from megatron_hybrid.inference.worker.model_runner import ModelRunner

MODEL = tiny_model("MG*-")
PROMPTS = [random_tokens(20 + 17 * index, seed=index) for index in range(8)]
PARAMS = [
    greedy(40) if index % 2 else SamplingParams(num_tokens_to_generate=40, seed=index)
    for index in range(8)
]
POISON = 96
POSITIONS = {"first tokens": 0, "middle of a prefill": 140, "answer": 160, "admission": None}


@asynccontextmanager
async def serving(**fields):
    """An engine that holds nothing at the end, and is whole."""
    async with AsyncEngine(MODEL, None, replace(tiny_engine(MODEL).config, **fields)) as engine:
        yield engine
        await engine.check_integrity()
        stats = await engine.stats()
        assert stats["leases"] == stats["requests_running"] == stats["requests_waiting"] == 0


async def read(stream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


def expected(prompts=PROMPTS, params=PARAMS) -> list[list[int]]:
    results = tiny_engine(MODEL).generate(prompts, params)
    return [result.token_ids for result in results]


def streams(engine) -> list:
    return [engine.stream(prompt, own) for prompt, own in zip(PROMPTS, PARAMS)]


SMALL = {"cache_bytes": 300 << 10, "max_requests": 4}
PLACES = [
    (ModelRunner, "forward"),
    (ModelRunner, "run"),
    (Scheduler, "schedule"),
    (Scheduler, "complete"),
    (PrefixCache, "acquire"),
    (PrefixCache, "commit"),
    (PrefixCache, "reserve_checkpoint"),
]


@pytest.mark.parametrize(
    ("seed", "fields"),
    matrix_rows(product(range(3), ({}, SMALL)), (0, {}), (1, SMALL)),
)
async def test_failing_steps_lose_and_repeat_no_token(seed, fields, monkeypatch, caplog):
    """They fail before or behind what they do, at seven places; at most twice before all got on."""
    random, failures = np.random.default_rng(seed), [0]  # of each step

    def failing(method):
        def fails(self, *args, **kwargs):
            if random.random() < 0.05 and sum(failures[-12:]) < 2:
                failures[-1] = 1
                if random.random() < 0.5 and method.__name__ != "acquire":  # it would lose a lease
                    method(self, *args, **kwargs)
                raise InjectedError
            return method(self, *args, **kwargs)

        return fails

    def counting(self, step=DynamicInferenceEngine.step):
        failures.append(0)
        return step(self)

    monkeypatch.setattr(DynamicInferenceEngine, "step", counting)
    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))

    with caplog.at_level(logging.ERROR):
        async with serving(**fields) as engine:
            tokens = await asyncio.gather(*map(read, streams(engine)))
            stats = await engine.stats()
    monkeypatch.undo()
    assert tokens == expected()
    assert stats["step_failures"] == sum(failures) > 3
    assert stats["request_restarts"] > 3
    logged = [record for record in caplog.records if "a step failed" in record.message]
    assert len(logged) == sum(failures)
    assert all("0 get its error" in record.message for record in logged)


@pytest.mark.parametrize("place", matrix_rows(POSITIONS, "answer", "admission"))
async def test_a_request_that_always_fails_ends_after_three_tries_and_no_other(place, monkeypatch):
    tries, position = [], POSITIONS[place]
    prompt, params = [POISON] * 150, SamplingParams(num_tokens_to_generate=60, seed=1)
    forward, acquire = ModelRunner.forward, PrefixCache.acquire

    def fail_in_forward(self, plan):
        logits = forward(self, plan)
        for work in plan.work:
            end = work.start + len(work.tokens)
            if work.request_id == 8 and work.start <= position < end:
                tries.append(len(plan.work))
                raise InjectedError
        return logits

    def fail_in_admission(self, tokens, *args, **kwargs):
        if tokens[0] == POISON:
            tries.append(1)
            raise InjectedError
        return acquire(self, tokens, *args, **kwargs)

    if position is None:
        monkeypatch.setattr(PrefixCache, "acquire", fail_in_admission)
    else:
        monkeypatch.setattr(ModelRunner, "forward", fail_in_forward)

    async with serving(max_requests=16, max_tokens=128) as engine:
        tasks = [asyncio.create_task(read(stream)) for stream in streams(engine)]
        poisoned = asyncio.create_task(read(engine.stream(prompt, params)))
        later = asyncio.create_task(engine.generate(PROMPTS[0][:9], greedy(5)))
        with pytest.raises(InjectedError):
            await poisoned
        assert (await later).token_ids == expected([PROMPTS[0][:9]], greedy(5))[0]
        tokens = await asyncio.gather(*tasks)
        # In a prefill the second try begins further than the first, and they are counted anew.
        assert len(tries) == 3 + (position == 140) == (await engine.stats())["step_failures"]
    monkeypatch.undo()
    assert tokens == expected()


async def test_where_every_step_fails_each_request_gets_its_error_and_nothing_spins(monkeypatch):
    async with serving() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "forward", Mock(side_effect=InjectedError))
            results = await asyncio.gather(*map(read, streams(engine)), return_exceptions=True)
        assert [type(result) for result in results] == [InjectedError] * 8
        assert await asyncio.gather(*map(read, streams(engine))) == expected()
        # Ten where all are in the queue before the first step.
        assert 2 + 8 <= (await engine.stats())["step_failures"] <= 3 * 8


async def test_one_sample_that_always_fails_ends_its_request(monkeypatch):
    forward = ModelRunner.forward

    def failing(self, plan):
        if any(work.request_id == 1 and work.start > 22 for work in plan.work):
            raise InjectedError
        return forward(self, plan)

    monkeypatch.setattr(ModelRunner, "forward", failing)
    async with serving() as engine:
        samples = asyncio.create_task(engine.generate(PROMPTS[0], PARAMS[0], RequestOptions(n=3)))
        other = asyncio.create_task(engine.generate(PROMPTS[1], PARAMS[1]))
        with pytest.raises(InjectedError):
            await samples
        assert (await other).token_ids == expected(PROMPTS[1:2], PARAMS[1:2])[0]


async def test_where_a_rank_has_failed_all_requests_get_the_error(monkeypatch):
    step = Mock(side_effect=RankFailedError("rank 1 has failed"))
    async with serving() as engine:
        with monkeypatch.context() as patch:
            patch.setattr(RankControl, "has_failed", property(lambda self: True))
            patch.setattr(DynamicInferenceEngine, "step", step)
            results = await asyncio.gather(*map(read, streams(engine)), return_exceptions=True)
        assert [type(result) for result in results] == [RankFailedError] * 8
    assert step.call_count < 8
