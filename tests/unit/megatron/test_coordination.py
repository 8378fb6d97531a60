"""Engines behind megatron-core's own coordinator, asked by its own client: all in one process."""

import asyncio
import enum
import threading
from contextlib import ExitStack, asynccontextmanager
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from commands import free_port
from door import LetterTokenizer, door_engine, fail_forwards, greedy_params
from reference import is_greedy, random_tokens, tiny_model
from waiting import LIMIT_S

from megatron_hybrid import compat
from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.megatron import EngineState, InferenceClient
from megatron_hybrid.megatron import coordination as module

PROMPTS = [random_tokens(40, seed=seed, vocab_size=95) for seed in range(4)]

if compat.HAVE_COORDINATOR:  # 0.16 has another one
    from megatron.core.inference.contexts.dynamic_context import ContextOverflowError as CoreError
    from megatron.core.inference.inference_request import DynamicInferenceRequest as CoreRequest

    @asynccontextmanager
    async def coordinated(num_engines, deserialize=False):
        """Engines that have joined a coordinator in a thread, and a client of it."""
        port, ours = free_port(), compat.coordinator_parts()
        (pipe, other), ready = Pipe(), threading.Event()
        thread = threading.Thread(
            target=module._coordinator_class(ours).entrypoint,
            kwargs={
                "pipe_connection": other,
                "ready_event": ready,
                "data_parallel_size": num_engines,
                "tokenizer": LetterTokenizer(),
                "max_requests": 8,
                "inference_coordinator_port": port,
                "block_size_tokens": 16,
                "enable_prefix_caching": True,
                "prefix_caching_coordinator_policy": (
                    ours.PrefixCachingCoordinatorPolicy.LONGEST_PREFIX
                ),
                "hostname": "127.0.0.1",
            },
            daemon=True,
        )
        thread.start()
        address = await asyncio.to_thread(pipe.recv)
        engines = [door_engine(tiny_model.__wrapped__("M*-")) for _ in range(num_engines)]
        for number, engine in enumerate(engines):
            engine.engine.replica = number, num_engines
            assert address == await engine.start_listening_to_data_parallel_coordinator(
                port, launch_inference_coordinator=False, hostname="127.0.0.1"
            )
        await asyncio.to_thread(ready.wait)  # before, it takes a client for an engine
        client = InferenceClient(address, deserialize=deserialize)
        client.start()
        # It is stopped in any case: messages that nobody takes would hold up its end for ever.
        with ExitStack() as end:
            end.callback(client.stop)
            try:
                yield client, engines
            finally:
                client.pause_engines()
                for engine in engines:
                    await asyncio.wait([engine.engine_loop_task], timeout=0)
                    if not engine.engine_loop_task.done():
                        await engine.wait_until(EngineState.PAUSED)
                client.stop_engines()
                for engine in engines:
                    await engine.engine_loop_task
                    assert engine.state is EngineState.STOPPED and not engine.use_coordinator
                client.shutdown_coordinator()
                await asyncio.to_thread(thread.join, LIMIT_S)
        assert not thread.is_alive()

    async def all_of(engines, state):
        for engine in engines:
            await engine.wait_until(state)
            assert engine.state is (EngineState.PAUSED if state is EngineState.RESUMED else state)

    @pytest.mark.parametrize("num_engines", [1, 2])
    async def test_a_client_is_answered_and_changes_states(num_engines):
        async with coordinated(num_engines) as (client, engines):
            assert all(engine.use_coordinator for engine in engines)
            params = greedy_params(4)
            asked = [client.add_request(prompt, params) for prompt in (*PROMPTS, "Hello")]
            answers = await asyncio.gather(*asked)
            for prompt, answer in zip(PROMPTS, answers):
                assert is_greedy(tiny_model("M*-"), prompt, answer["generated_tokens"])
            text = LetterTokenizer().detokenize(answers[-1]["generated_tokens"])
            assert answers[-1]["generated_text"] == text
            assert all(engine.engine.num_steps for engine in engines)
            again = [await client.add_request(prompt, params) for prompt in PROMPTS]
            assert all(answer["num_cached_tokens"] == 40 for answer in again)
            client.pause_engines()
            await all_of(engines, EngineState.PAUSED)
            waits = client.add_request(PROMPTS[0], params)
            client.suspend_engines()
            await all_of(engines, EngineState.SUSPENDED)
            client.set_generation_epoch(5)
            client.resume_engines()
            await all_of(engines, EngineState.RESUMED)
            assert not waits.done()
            client.unpause_engines()
            await all_of(engines, EngineState.RUNNING)
            answer = await waits
            assert answer["policy_epoch"] == [[0, 5]] and answer["num_cached_tokens"] == 0
            with pytest.raises(ValueError, match="PAUSING does not last"):
                await engines[0].wait_until(EngineState.PAUSING)
            with pytest.raises(RuntimeError, match="was called before: make another engine"):
                await engines[0].start_listening_to_data_parallel_coordinator()

    @pytest.mark.parametrize("leaves", [True, False])
    async def test_requests_of_a_lost_engine_are_answered_by_another(leaves, monkeypatch):
        """Whether it says that it leaves, as where a rank of it has failed, or is killed."""
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.05)
        async with coordinated(2) as (client, engines):
            asked = [client.add_request(prompt, greedy_params(40)) for prompt in PROMPTS]
            while not all(engine.requests for engine in engines):
                await asyncio.sleep(0)
            lost = engines.pop()._coordination
            if not leaves:
                lost._socket.disable_monitor()
                lost._socket.close(linger=0)
                lost._socket = None
            lost.task.cancel()
            await asyncio.wait([lost.task])
            for prompt, answer in zip(PROMPTS, await asyncio.gather(*asked)):
                assert len(answer["generated_tokens"]) == 40
                assert is_greedy(tiny_model("M*-"), prompt, answer["generated_tokens"])
            with pytest.raises(RuntimeError, match="has stopped, and does not come to be PAUS"):
                await lost.wait_until(EngineState.PAUSED)

    async def test_requests_of_an_engine_whose_loop_dies_get_its_error(monkeypatch):
        async with coordinated(1) as (client, engines):
            engine = engines.pop()
            asked = [client.add_request(prompt, greedy_params(40)) for prompt in PROMPTS]
            while not engine.requests:
                await asyncio.sleep(0)
            monkeypatch.setattr(engine, "has_unfinished_requests", lambda: 1 / 0)
            answers = await asyncio.gather(*asked)
            answers.append(await client.add_request("later", greedy_params(2)))
            why = "its engine has ended: ZeroDivisionError: division by zero"
            for answer in answers:
                assert answer["status"] == "FAILED" and why in str(answer["events"])
            with pytest.raises(ZeroDivisionError):
                await engine.engine_loop_task

    class Headers(enum.IntEnum):
        """Those of core 0.20 that engines read and write."""

        SUBMIT_REQUEST = 20
        ENGINE_REPLY = 21
        ENGINE_REPLY_PARTIAL = 22
        ABORT_REQUEST = 23
        SUBMIT_REQUEST_WITH_KV = 24
        RELEASE_KV = 25

    class Socket:
        """In place of an engine's socket: what it receives, and what was sent."""

        def __init__(self, ours, *messages):
            self._ours, self._messages, self.sent = ours, list(messages), []

        def recv(self, flags):
            if not self._messages:
                raise self._ours.zmq.Again
            return self._ours.msgpack.packb(self._messages.pop(0))

        def send(self, data):
            self.sent.append(self._ours.msgpack.unpackb(data))

    def test_messages_are_read_by_their_length_and_kind():
        engine = door_engine(tiny_model("M*-"))
        joined = module.Coordination(engine)
        joined._is_new = True
        ours = joined._core = SimpleNamespace(**vars(joined._core) | {"Headers": Headers})
        params, streams = (greedy_params(9, streaming=each).serialize() for each in (False, True))
        words = greedy_params(9, streaming=True, stop_words=["0123"]).serialize()
        socket = joined._socket = Socket(
            ours,
            [20, 0, PROMPTS[0], params],
            [20, 1, PROMPTS[1], streams, None],
            [20, 2, PROMPTS[2], words, None],
            [20, 3, PROMPTS[3], params, {"image": [b"png"]}],
            [20, 4, PROMPTS[3], params, None, "a field that is new"],
            [20, 5, 7, params, None],
            [20, 6, PROMPTS[3], "no params", None],
            [20, 7, PROMPTS[3], params, None],
            [23, 7],
            [23, 77],
            [24, 8, PROMPTS[3], params, {}, []],
            [25, 8],
            [99, "a kind that is new"],
            99,
        )
        joined._take_messages()
        replies = [record for _, (record,) in socket.sent]
        assert [reply["request_id"] for reply in replies] == [3, 4, 5, 6, 7, 8]
        for reply, why in zip(replies, ("multi_modal_data", "multi_", "", "", "aborted", "one en")):
            assert reply["status"] == "FAILED" and why in str(reply["events"])
            assert reply["uid"].startswith("chatcmpl-")
        assert list(engine.requests) == [0, 1, 2] and not joined._signals
        socket.sent.clear()
        while engine.requests:
            joined._step()
        parts = {1: [], 2: []}
        for _, records in (sent for sent in socket.sent if sent[0] == 22):
            for record in records:
                assert record["new_tokens"]
                parts[record["request_id"]] += record["new_tokens"]
        ends = {
            r["request_id"]: r["generated_tokens"] for k, rs in socket.sent if k == 21 for r in rs
        }
        assert parts == {1: ends[1][:8], 2: ends[2][:5]} and len(ends[0]) == 9
        for number, tokens in ends.items():
            assert is_greedy(tiny_model("M*-"), PROMPTS[number], tokens)

    def test_engines_notice_that_their_coordinator_has_ended():
        async def run():
            async with coordinated(1) as (client, (engine,)):
                client.shutdown_coordinator()
                with pytest.raises(RankFailedError, match="Megatron's coordinator has ended"):
                    await engine.engine_loop_task
                assert engine.state is EngineState.STOPPED

        with pytest.raises(RankFailedError):  # of the end of the context, which stops it
            asyncio.run(run())

    async def test_cores_own_requests_are_read_of_replies_failures_too(monkeypatch):
        async with coordinated(1, deserialize=True) as (client, (engine,)):
            empty = await client.add_request([], greedy_params(2))
            assert isinstance(empty, CoreRequest) and empty.status.name == "FAILED"
            assert isinstance(empty.events[-2].payload, CoreError)
            fail_forwards(monkeypatch, engine, 3)
            failed = await client.add_request(PROMPTS[0], greedy_params(2))
            message = failed.events[-2].payload.message
            assert failed.status.name == "FAILED"
            assert message == "ArithmeticError: the device is broken"
            params = greedy_params(2, return_prompt_tokens=True)
            answer = await client.add_request(PROMPTS[0], params)
            assert answer.status.name == "COMPLETED" and answer.prompt_length == 40
            assert answer.prompt_tokens.tolist() == PROMPTS[0]
            assert is_greedy(tiny_model("M*-"), PROMPTS[0], answer.generated_tokens)

    def test_an_engine_without_a_tokenizer_is_refused():
        engine = SimpleNamespace(controller=SimpleNamespace(tokenizer=None))
        with pytest.raises(ValueError, match="writes the texts of answers, and this engine has"):
            module.Coordination(engine)
