"""AsyncEngine from outside: answers, cancelling, slow readers, failing steps, loops, ends."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from commands import run_python
from differential import InjectedError
from forks import in_fork
from reference import greedy, random_tokens, tiny_engine, tiny_model
from scripted import ByteTokenizer
from waiting import LIMIT_S, wait_until

from megatron_hybrid import AsyncEngine, DynamicInferenceEngine, SamplingParams
from megatron_hybrid.inference.async_calls import AsyncCall, _put_all
from megatron_hybrid.inference.async_stream import QueueTimeoutError
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.output import OutputProcessor
from megatron_hybrid.inference.worker.model_runner import ModelRunner
from megatron_hybrid.text.guide import Guide

MODEL = tiny_model("MG*-")
PROMPTS = [random_tokens(20 + 7 * index, seed=index) for index in range(16)]
LONG = greedy(900)


def make(**fields) -> AsyncEngine:
    return AsyncEngine(MODEL, None, replace(tiny_engine(MODEL).config, **fields))


@pytest.fixture
def engine(request):
    """An engine, with the fields that its test gives, which is whole after it."""
    engine = make(**getattr(request, "param", {}))
    yield engine
    asyncio.run(engine.check_integrity())
    asyncio.run(engine.close())


def expected(prompts, params):
    return [result.token_ids for result in tiny_engine(MODEL).generate(prompts, params)]


async def is_idle(engine) -> bool:
    stats = await engine.stats()
    return stats["requests_running"] == stats["requests_waiting"] == 0


async def read(stream) -> list:
    return [output async for output in stream]


@pytest.fixture
def gate(monkeypatch):
    """Forwards wait while `is_open` is not set; `is_inside` is set by one that begins."""
    state = SimpleNamespace(is_open=threading.Event(), is_inside=threading.Event())
    state.is_open.set()
    forward = ModelRunner.forward

    def gated(self, plan):
        state.is_inside.set()
        assert state.is_open.wait(LIMIT_S)
        return forward(self, plan)

    monkeypatch.setattr(ModelRunner, "forward", gated)
    yield state
    state.is_open.set()


async def wait_for(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, LIMIT_S)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("async-engine")]


# Answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{"max_requests": 16}], indirect=True)
async def test_a_stream_has_one_output_for_each_token(engine):
    streams = await asyncio.gather(*(read(engine.stream(p, greedy(24))) for p in PROMPTS))
    assert [[len(output.token_ids) for output in outputs] for outputs in streams] == [[1] * 24] * 16
    tokens = [[token for output in outputs for token in output.token_ids] for outputs in streams]
    assert tokens == expected(PROMPTS, greedy(24))
    for outputs in streams:
        assert [output.result is None for output in outputs] == [True] * 23 + [False]


async def test_streams_run_from_when_they_are_made(engine):
    streams = [engine.stream(prompt, greedy(30)) for prompt in PROMPTS[:4]]
    outputs = [await read(stream) for stream in streams]  # one after another
    assert (await engine.stats())["steps"] < 40
    answers = [each[-1].result.token_ids for each in outputs]
    assert answers == expected(PROMPTS[:4], greedy(30))


def by_sample(outputs) -> dict[int, list[int]]:
    tokens = {}
    for output in outputs:
        tokens.setdefault(output.sample_index, []).extend(output.token_ids)
    return tokens


@pytest.mark.parametrize("engine", [{"max_requests": 3}], indirect=True)
async def test_a_stream_has_the_outputs_of_all_samples(engine):
    """Also where some of them wait for a slot, and one has a stop token before the others."""
    plain = SamplingParams(num_tokens_to_generate=9, seed=5)
    (expected,) = tiny_engine(MODEL).generate([PROMPTS[0]], plain, RequestOptions(n=3))
    stop = expected.samples[1].token_ids[3]
    params = replace(plain, stop_token_ids=(stop,))
    (expected,) = tiny_engine(MODEL).generate([PROMPTS[0]], params, RequestOptions(n=3))

    async with engine.stream(PROMPTS[1], greedy(40)) as beside:
        await anext(beside)
        outputs = await read(engine.stream(PROMPTS[0], params, RequestOptions(n=3)))
    samples = [s.token_ids for s in expected.samples]
    assert by_sample(outputs) == dict(enumerate(samples))
    assert len({len(tokens) for tokens in samples}) > 1
    ends = [output for output in outputs if output.result is not None]
    assert sorted(end.sample_index for end in ends) == list(range(len(samples)))
    assert outputs[-1].result is not None
    for end in ends:
        assert end.result.token_ids == samples[end.sample_index]
        own = [o.request_id for o in outputs if o.sample_index == end.sample_index]
        assert set(own) == {end.request_id}


async def test_the_state_behind_an_answer_is_there_when_it_comes(engine):
    first = await engine.generate(PROMPTS[0], greedy(10))
    again = await engine.generate(PROMPTS[0] + first.token_ids + [1, 2, 3], greedy(10))
    assert again.prefix.skipped_tokens == len(PROMPTS[0]) + 10


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [([1, 2, 400], ValueError, "400"), ("text", TypeError, "tokenizer")],
)
async def test_bad_input_is_refused_where_it_is_awaited_and_changes_nothing(
    engine, prompt, error, message
):
    beside = asyncio.create_task(engine.generate(PROMPTS[0], greedy(20)))
    with pytest.raises(error, match=message):
        await engine.generate(prompt)
    with pytest.raises(error, match=message):
        await anext(engine.stream(prompt))
    with pytest.raises(ValueError, match="n is 99"):
        await engine.generate(PROMPTS[0], options=RequestOptions(n=99))
    assert (await beside).token_ids == expected([PROMPTS[0]], greedy(20))[0]
    assert (await engine.stats())["requests"] == 1


# Ends of requests --------------------------------------------------------------------------------


async def test_a_cancelled_task_frees_its_pages_and_changes_no_other(engine):
    others = [asyncio.create_task(engine.generate(p, greedy(60))) for p in PROMPTS[:3]]
    long = asyncio.create_task(engine.generate(PROMPTS[3], LONG))
    samples = asyncio.create_task(engine.generate(PROMPTS[4], LONG, RequestOptions(n=2)))
    async with aclosing(engine.stream(PROMPTS[5], greedy(9))) as stream:
        async for _ in stream:
            pass  # all others run now
    assert (await engine.stats())["requests_running"] == 6
    for task in (long, samples):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await engine.check_integrity()
    assert (await engine.stats())["requests_running"] <= 3
    results = await asyncio.gather(*others)
    stats = await engine.stats()
    assert stats["requests_running"] == stats["kv_blocks_in_use"] == 0
    assert stats["steps"] < 600
    assert [result.token_ids for result in results] == expected(PROMPTS[:3], greedy(60))


@pytest.mark.parametrize("way", ["generate", "stream", "aclose"])
async def test_a_request_that_is_left_before_it_is_taken_is_not_added(engine, way, gate):
    gate.is_open.clear()
    running = asyncio.create_task(engine.generate(PROMPTS[0], greedy(3)))
    await wait_for(gate.is_inside)
    if way == "aclose":
        stream = engine.stream(PROMPTS[1], LONG)
        readers = [asyncio.create_task(anext(stream, "the end")) for _ in range(3)]
        await asyncio.sleep(0)
        await stream.aclose()
        assert await asyncio.gather(*readers) == ["the end"] * 3
    else:
        call = getattr(engine, way)(PROMPTS[1], LONG)
        task = asyncio.create_task(call if way == "generate" else read(call))
        await asyncio.sleep(0)  # it waits for the thread, which is in a step
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    gate.is_open.set()
    assert (await running).token_ids == expected([PROMPTS[0]], greedy(3))[0]
    assert await is_idle(engine)
    assert (await engine.stats())["requests"] == 1


@pytest.mark.parametrize("way", ["aclose", "break", "cancel"])
async def test_a_stream_that_is_left_cancels_its_request(engine, way):
    async def leaves(engine):
        stream = engine.stream(PROMPTS[0], LONG, RequestOptions(n=3))
        async for _ in stream:
            if way == "aclose":
                await stream.aclose()
            elif way == "break":
                break
            else:
                asyncio.current_task().cancel()
                await asyncio.sleep(0)

    beside = asyncio.create_task(engine.generate(PROMPTS[1], greedy(30)))
    await asyncio.gather(asyncio.create_task(leaves(engine)), return_exceptions=True)
    assert (await beside).token_ids == expected([PROMPTS[1]], greedy(30))[0]
    assert await is_idle(engine)
    stats = await engine.stats()
    assert stats["leases"] == 0 and stats["steps"] < 600


@pytest.mark.parametrize(
    ("engine", "n"), [({"max_requests": n}, n) for n in (1, 3)], indirect=["engine"]
)
@pytest.mark.parametrize("method", ["generate", "stream"])
async def test_a_request_that_has_waited_too_long_to_begin_is_given_up(engine, method, n, gate):
    gate.is_open.clear()
    first = asyncio.create_task(engine.generate(PROMPTS[0], greedy(30), RequestOptions(n=n)))
    await wait_for(gate.is_inside)
    if method == "generate":
        call = engine.generate(PROMPTS[1], greedy(3), RequestOptions(n=n), queue_seconds=0.0)
    else:
        call = engine.stream(PROMPTS[1], greedy(3), RequestOptions(n=n), queue_seconds=0.0).begun()
    late = asyncio.create_task(call)
    patient = asyncio.create_task(engine.generate(PROMPTS[2], greedy(3), queue_seconds=1e6))
    await asyncio.sleep(0)
    gate.is_open.set()
    with pytest.raises(QueueTimeoutError, match="has not begun"):
        await late
    assert not first.done()
    results = [(await task).token_ids for task in (first, patient)]
    assert results[0] == expected([PROMPTS[0]], greedy(30))[0]
    assert results[1] == expected([PROMPTS[2]], greedy(3))[0]
    stats = await engine.stats()
    assert stats["leases"] == 0 and stats["requests"] == n + 1


async def test_a_request_that_has_begun_is_not_given_up(engine):
    calls = [engine.generate(PROMPTS[i], greedy(9), queue_seconds=0.0) for i in (0, 1)]
    results = await asyncio.gather(*calls)
    assert [result.token_ids for result in results] == expected(PROMPTS[:2], greedy(9))


async def test_a_stream_that_has_begun_has_its_first_output_still(engine):
    stream = engine.stream(PROMPTS[0], greedy(9))
    await stream.begun()
    tokens = [token for output in await read(stream) for token in output.token_ids]
    assert [tokens] == expected(PROMPTS[:1], greedy(9))


async def test_a_step_wakes_an_event_loop_once(engine, monkeypatch):
    loop = asyncio.get_running_loop()
    call_soon = Mock(wraps=loop.call_soon_threadsafe)
    monkeypatch.setattr(loop, "call_soon_threadsafe", call_soon)
    streams = [engine.stream(prompt, greedy(20)) for prompt in PROMPTS[:8]]
    outputs = await asyncio.gather(*map(read, streams))
    monkeypatch.undo()
    assert [len(found) for found in outputs] == [20] * 8
    wakes = [call for call in call_soon.call_args_list if call.args[0] is _put_all]
    assert len(wakes) <= (await engine.stats())["steps"]


async def test_a_slow_reader_holds_nobody_back(engine):
    async with aclosing(engine.stream(PROMPTS[0], greedy(24))) as slow:
        outputs = [await anext(slow)]
        results = await asyncio.gather(*(engine.generate(p, greedy(30)) for p in PROMPTS[1:5]))
        outputs += slow.waiting()
        assert len(outputs) == 24  # all had been there
        assert [output async for output in slow] == slow.waiting() == []
    tokens = [token for output in outputs for token in output.token_ids]
    assert [tokens] == expected(PROMPTS[:1], greedy(24))
    others = [result.token_ids for result in results]
    assert others == expected(PROMPTS[1:5], greedy(30))


# Failing steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["generate", "stream"])
async def test_an_answer_survives_a_failing_step_behind_it(engine, method, monkeypatch):
    """The step that runs the last token for its state."""
    answer = expected([PROMPTS[0]], greedy(5))[0]
    forward = ModelRunner.forward

    def failing(self, plan):
        if plan.work and not any(work.draws for work in plan.work):
            raise InjectedError
        return forward(self, plan)

    monkeypatch.setattr(ModelRunner, "forward", failing)

    if method == "generate":
        result = await engine.generate(PROMPTS[0], greedy(5))
    else:
        result = (await read(engine.stream(PROMPTS[0], greedy(5))))[-1].result
    assert result.token_ids == answer


async def test_finished_calls_are_freed_by_an_idle_engine(engine):
    await engine.generate(PROMPTS[0], greedy(3))
    await read(engine.stream(PROMPTS[1], greedy(3)))
    gc.collect()
    assert not any(isinstance(each, AsyncCall) for each in gc.get_objects())


class Panic(BaseException):
    """As those of a tokenizer that is written in Rust."""


class BrokenTokenizer(ByteTokenizer):
    error = None

    def tokenize(self, text):
        raise StopIteration

    def detokenize(self, ids):
        if self.error is not None:
            raise self.error
        return super().detokenize(ids)


async def test_a_panic_of_the_tokenizer_stops_no_engine():
    tokenizer = BrokenTokenizer()
    async with AsyncEngine(MODEL, tokenizer, tiny_engine(MODEL).config) as engine:
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG))
        stream = engine.stream(PROMPTS[1], greedy(50))
        await anext(stream)
        tokenizer.error = Panic()
        task.cancel()
        result = (await read(stream))[-1].result
        assert (result.finish_reason, result.error) == ("error", "Panic: ")
        assert len(result.token_ids) == 50
        tokenizer.error = None
        result = await engine.generate(PROMPTS[2], greedy(5))
        stats = await engine.stats()
        assert stats["step_failures"] == stats["request_restarts"] == 0
    assert [result.token_ids] == expected(PROMPTS[2:3], greedy(5))


async def test_what_no_future_can_hold_is_raised():
    async with AsyncEngine(MODEL, BrokenTokenizer(), tiny_engine(MODEL).config) as engine:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await engine.generate("text")
        with pytest.raises(RuntimeError, match="StopIteration"):
            await anext(engine.stream("text"))


async def test_an_engine_that_cannot_get_rid_of_its_work_does_not_spin(engine, monkeypatch):
    broken = Mock(side_effect=InjectedError)
    with monkeypatch.context() as patch:
        patch.setattr(OutputProcessor, "take", broken)
        with pytest.raises(InjectedError):
            await engine.generate(PROMPTS[0], greedy(5))
        await asyncio.sleep(0.02)
        assert broken.call_count == 1
    result = await engine.generate(PROMPTS[0], greedy(5))
    assert result.token_ids == expected(PROMPTS[:1], greedy(5))[0]


# The engine's methods ----------------------------------------------------------------------------


async def test_the_methods_of_the_engine_work_beside_requests(engine, tmp_path):
    stream = engine.stream(PROMPTS[0], LONG)
    await anext(stream)
    assert (await engine.stats())["requests_running"] == 1
    assert "requests_running" in await engine.metrics()
    assert (await engine.explain(PROMPTS[0])).match.skipped_tokens > 0
    with pytest.raises(ValueError, match="salt is 3"):
        await engine.explain(PROMPTS[0], salt=3)
    await engine.generate(PROMPTS[1], greedy(5))
    saved = await engine.save_cache(tmp_path)
    assert saved.states > 0
    with pytest.raises(RuntimeError, match="1 requests run"):
        await engine.clear_cache()
    await stream.aclose()
    await engine.clear_cache()
    result = await engine.generate(PROMPTS[1], greedy(5))
    assert result.prefix.skipped_tokens == 0
    assert [result.token_ids] == expected(PROMPTS[1:2], greedy(5))
    with tiny_engine(MODEL, cache_dir=tmp_path, disk_cache_bytes=1 << 20) as other:
        assert other.generate([PROMPTS[1]], greedy(5))[0].prefix.skipped_tokens > 0


async def test_an_idle_engine_makes_no_step(engine, monkeypatch):
    steps, step = [], DynamicInferenceEngine.step

    def counted(self):
        steps.append(self)
        return step(self)

    monkeypatch.setattr(DynamicInferenceEngine, "step", counted)

    await asyncio.sleep(0.02)
    assert not steps
    await engine.generate(PROMPTS[0], greedy(5))
    count = len(steps)
    await asyncio.sleep(0.02)
    await engine.stats()
    assert 5 <= len(steps) == count <= 7


# Loops, ends -------------------------------------------------------------------------------------


def test_loops_of_two_threads_share_one_engine():
    engine = make()

    async def ask(prompts):
        results = await asyncio.gather(*(engine.generate(p, greedy(15)) for p in prompts))
        return [result.token_ids for result in results]

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(asyncio.run, ask(part)) for part in (PROMPTS[:4], PROMPTS[4:8])]
    asyncio.run(engine.close())
    assert calls[0].result() + calls[1].result() == expected(PROMPTS[:8], greedy(15))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::RuntimeWarning")
def test_a_loop_that_is_closed_takes_its_requests_along():
    engine = make()
    loop = asyncio.new_event_loop()

    async def begin():
        stream = engine.stream(PROMPTS[0], LONG)
        await anext(stream)
        return stream

    stream = loop.run_until_complete(begin())  # it is held: only its loop is gone
    loop.close()

    async def after():
        async with asyncio.timeout(300):
            while not await is_idle(engine):  # the next output finds no loop
                pass
        assert (await engine.stats())["steps"] < 600
        await engine.check_integrity()
        result = await engine.generate(PROMPTS[1], greedy(5))
        await engine.close()
        return [result.token_ids]

    assert asyncio.run(after()) == expected(PROMPTS[1:2], greedy(5))
    del stream


async def test_close_tells_those_who_wait_and_those_who_come():
    engine = make(max_requests=2)
    tasks = [asyncio.create_task(engine.generate(p, LONG)) for p in PROMPTS[:4]]
    reader = asyncio.create_task(read(engine.stream(PROMPTS[4], LONG)))
    await engine.stats()
    await asyncio.gather(engine.close(), engine.close())
    results = await asyncio.gather(*tasks, reader, return_exceptions=True)
    assert [type(result) for result in results] == [RuntimeError] * 5
    assert all("closed before this request was answered" in str(r) for r in results)
    await engine.close()
    for call in (engine.generate(PROMPTS[0]), engine.stats(), engine.clear_cache()):
        with pytest.raises(RuntimeError, match="is closed: make another"):
            await call
    with pytest.raises(RuntimeError, match="is closed: make another"):
        engine.stream(PROMPTS[0])
    wait_until(lambda: not threads())


def test_errors_of_the_constructor_are_those_of_the_engine():
    config = tiny_engine(MODEL).config
    with pytest.raises(TypeError, match="config must be an InferenceConfig"):
        AsyncEngine(MODEL, None, 3)
    with pytest.raises(TypeError, match="model must be one of"):
        AsyncEngine(3, None, config)
    with pytest.raises(ValueError, match="raise cache_bytes"):
        AsyncEngine(MODEL, None, replace(config, cache_bytes=1000))
    wait_until(lambda: not threads())


def test_an_engine_that_is_dropped_ends_its_thread():
    engine = make()
    asyncio.run(engine.generate(PROMPTS[0], greedy(3)))
    assert len(threads()) == 1
    del engine
    gc.collect()
    wait_until(lambda: not threads())


def test_a_program_that_forgets_to_close_ends():
    script = """
import asyncio, atexit, threading
from reference import greedy, tiny_engine, tiny_model
from megatron_hybrid import AsyncEngine, DynamicInferenceEngine

steps, step = [], DynamicInferenceEngine.step
DynamicInferenceEngine.step = lambda engine: (steps.append(1), step(engine))[1]
atexit.register(lambda: print("ended early:", len(steps) < 50_000))
config = tiny_engine(tiny_model("M*"), max_sequence_length=100_000, cache_bytes=64 << 20).config
idle, busy = (AsyncEngine(tiny_model("M*"), None, config) for _ in range(2))

def waits():
    try:
        asyncio.run(busy.generate([3, 4], greedy(99_000)))
    except RuntimeError as error:
        print(error)

threading.Thread(target=waits).start()
loop = asyncio.new_event_loop()
loop.run_until_complete(idle.generate([1, 2], greedy(2)))
async def begin():
    await anext(busy.stream([1, 2], greedy(99_000)))

loop.run_until_complete(begin())
"""
    helpers = Path(__file__).parents[2] / "helpers"
    result = run_python(f"import sys; sys.path.append({str(helpers)!r}){script}", check=True)
    waited, ended = result.stdout.splitlines()
    assert "closed before this request was answered" in waited
    assert ended == "ended early: True"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_an_engine_says_at_once_that_it_is_in_a_fork():
    engine = make()
    asyncio.run(engine.generate(PROMPTS[0], greedy(1)))
    guided = RequestOptions(guide=Guide.regex("a"))
    calls = (
        engine.stats,
        engine.save_cache,
        engine.update_weights,
        lambda: engine.generate(PROMPTS[0]),
        lambda: engine.generate(PROMPTS[0], options=guided),
    )

    async def check():
        for call in calls:
            with pytest.raises(RuntimeError, match="is a fork: make an engine of its own in each"):
                await call()
        for options in (None, guided):
            with pytest.raises(RuntimeError, match="is a fork"):
                engine.stream(PROMPTS[0], options=options)
        await engine.close()

    assert in_fork(lambda: asyncio.run(check())) == 0
    asyncio.run(engine.generate(PROMPTS[0], greedy(1)))
    asyncio.run(engine.close())
