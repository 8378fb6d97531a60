"""Coordination: an engine under megatron-core's own coordinator of data-parallel replicas.

The coordinator and its clients are core's. Ours is the part of an engine: it takes requests and
signals from the coordinator, steps, and replies.
"""

import asyncio
import logging
import multiprocessing
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_hybrid.compat import coordinator_parts
from megatron_hybrid.distributed.ranks import RankError, is_one_machine
from megatron_hybrid.distributed.rendezvous import Member, announce_failure, exchange, has_ended
from megatron_hybrid.distributed.watchdog import RankFailedError
from megatron_hybrid.inference.async_calls import follow_in_thread
from megatron_hybrid.megatron.errors import ContextErrorFactory, ContextOverflowError
from megatron_hybrid.megatron.request import DynamicInferenceRequestRecord, FinishedRequestRecord
from megatron_hybrid.megatron.sampling_params import SamplingParams
from megatron_hybrid.utils.child_lifetime import end_with_parent

logger = logging.getLogger(__name__)
POLL_SECONDS = 0.005
_LOOK_SECONDS = 1.0
"""Seconds between two checks whether others are there."""
_NOTHING = b""
"""Message by which a coordinator checks whether an engine is there."""
_STARTING = "starting Megatron's coordinator"
_WITHOUT_EFFECT = {
    **dict.fromkeys(("START_CUDA_PROFILER", "STOP_CUDA_PROFILER"), "use megatron-hybrid profile"),
    **dict.fromkeys(("RELEASE_KV", "SEND_KV"), "prefill and decode run in one engine"),
}
"""Messages that do nothing here, and why."""


class EngineState(Enum):
    """States of an engine. Without a coordinator it is RUNNING or SUSPENDED, with one in any state
    of `STABLE`; only Megatron's own engine has the others."""

    RUNNING = auto()
    PAUSING = auto()
    PAUSED = auto()
    UNPAUSING = auto()
    SUSPENDING = auto()
    SUSPENDED = auto()
    RESUMING = auto()
    RESUMED = auto()
    STOPPING = auto()
    STOPPED = auto()


STABLE = (
    EngineState.RUNNING,
    EngineState.PAUSED,
    EngineState.SUSPENDED,
    EngineState.RESUMED,
    EngineState.STOPPED,
)
"""States that last, and that a caller can wait for."""


class CoordinatorError(NotImplementedError):
    """A call that needs the coordinator of a newer megatron-core, or a package that is not
    installed."""


def core_parts() -> SimpleNamespace:
    """Return `compat.coordinator_parts`, or raise CoordinatorError in place of its ImportError."""
    try:
        return coordinator_parts()
    except ImportError as error:
        raise CoordinatorError(
            f"Megatron's coordinator is not there. {error}. Or serve one replica in this process, "
            "with step_modern(), generate(), MegatronLLM or MegatronAsyncLLM"
        ) from error


def _run_coordinator(policy: str, pipe_connection: Connection, **arguments: Any) -> None:
    """Run core's coordinator in this process, which ends with the one that started it. The pipe
    gets its address, or why it did not start."""
    end_with_parent()
    core = coordinator_parts()
    try:
        _coordinator_class(core).entrypoint(
            pipe_connection=pipe_connection,
            prefix_caching_coordinator_policy=core.PrefixCachingCoordinatorPolicy(policy),
            **arguments,
        )
    except Exception as error:
        if pipe_connection.closed:  # it had begun
            raise
        pipe_connection.send(f"{type(error).__name__}: {error}")


def _is_new(core: SimpleNamespace) -> bool:
    """Return whether core is 0.20, whose answers come in parts and have their request's uid."""
    return hasattr(core.Headers, "ENGINE_REPLY_PARTIAL")


def _coordinator_class(core: SimpleNamespace) -> type:
    """Return a class of core's coordinator, which notices the end of an engine only when it sends
    something to it, and forgets its requests. This class checks every second, gives the requests
    to other engines, and answers them with the engine's error if there are none."""
    headers, pack = core.Headers, core.msgpack.packb

    class Coordinator(core.DataParallelInferenceCoordinator):
        def __init__(self, *given: Any, **named: Any):
            self._unanswered: dict[int, bytes] = {}
            self._why = "no engine has joined the coordinator"
            super().__init__(*given, **named)
            self.router_socket.setsockopt(core.zmq.RCVTIMEO, int(1000 * _LOOK_SECONDS))
            self.router_socket = _Looking(self.router_socket, self._look, core.zmq.Again)
            for header, handle in (
                (headers.SUBMIT_REQUEST, self._submit),
                (headers.DISCONNECT, self._disconnect),
            ):
                self._handlers[header] = partial(handle, self._handlers[header])

        def _look(self) -> None:
            for identity in list(self.identities_of_data_parallel_ranks):
                if identity in self.identities_of_data_parallel_ranks:
                    self._send_to_engine(identity, _NOTHING)
            for number in self._unanswered.keys() - self.request_id_to_client_id.keys():
                del self._unanswered[number]

        def _submit(self, handle: Callable, _: Any, client: bytes, message: list) -> None:
            if handle(self, client, message):  # there is no engine; core ends the coordinator here
                self._fail(client, message[1])

        def _disconnect(self, handle: Callable, _: Any, engine: bytes, message: list) -> None:
            if len(message) > 1:
                self._why = message[1]
            handle(self, engine, message)

        def _send_to_engine(self, identity: bytes, payload: bytes) -> bool:
            was_sent = super()._send_to_engine(identity, payload)
            if was_sent and payload != _NOTHING:
                header, *rest = core.msgpack.unpackb(payload, raw=False)
                if header == headers.SUBMIT_REQUEST.value:
                    self._unanswered[rest[0]] = payload
            return was_sent

        def _remove_engine(self, identity: bytes) -> None:
            super()._remove_engine(identity)
            lost = [n for n, owner in self.request_id_to_rank.items() if owner == identity]
            for number in lost:
                del self.request_id_to_rank[number]
            for number in lost:
                if not self._give_to_another(number):
                    client = self.request_id_to_client_id.pop(number)
                    self._fail(client, self.request_id_to_client_request_id.pop(number))

        def _give_to_another(self, number: int) -> bool:
            while self._identities_list:
                other = self.get_least_loaded_data_parallel_rank()
                if self._send_to_engine(other, self._unanswered[number]):
                    self.request_id_to_rank[number] = other
                    self._pending_counts[self.identity_to_rank_index[other]] += 1
                    return True
            return False

        def _fail(self, client: bytes, number: int) -> None:
            """Answer a request with the engine's error. `number` is the client's."""
            record = DynamicInferenceRequestRecord.of_error(number, RankFailedError(self._why))
            reply = [headers.ENGINE_REPLY.value, number, _plain(record, _is_new(core))]
            self.router_socket.send_multipart([client, pack(reply, use_bin_type=True)])

    return Coordinator


class _Looking:
    """A socket of core's, whose `recv_multipart` calls `look` every second. `timed_out` is the
    error of a receive that has waited so long."""

    def __init__(self, socket: Any, look: Callable[[], None], timed_out: type[Exception]):
        self._socket, self._look, self._timed_out = socket, look, timed_out
        self._looked_at = time.monotonic()

    def recv_multipart(self) -> list[bytes]:
        while True:
            if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
                self._look()
                self._looked_at = time.monotonic()
            with suppress(self._timed_out):
                return self._socket.recv_multipart()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class Coordination:
    """Runs one engine by the messages of a coordinator.

    Args:
        engine: a DynamicInferenceEngine of this package, which imports this module. Each rank of a
            model has one; the first one speaks with the coordinator, and leads the others.

    Raises:
        CoordinatorError: this megatron-core has no such coordinator.
        ValueError: the engine has no tokenizer, which the coordinator needs.
    """

    def __init__(self, engine: Any):
        self._core = core_parts()
        if engine.controller.tokenizer is None:
            raise ValueError(
                "Megatron's coordinator writes the texts of answers, and this engine has no "
                "tokenizer: give the controller one"
            )
        self._engine = engine
        self._reached = engine._state_events
        self._signals: deque[list] = deque()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._socket: Any = None
        self._monitor: Any = None
        self._barrier: Any = None
        self._replicas: list[Member] = []
        self._streamed: dict[int, int] = {}  # request -> number of tokens that were sent
        self._is_new = _is_new(self._core)
        self._is_over = False
        self.task: asyncio.Task[None] | None = None

    async def start(
        self,
        port: int | None,
        launches: bool,
        hostname: str | None,
        schedule_output_path: str | None,
    ) -> str:
        """Start the coordinator on the first rank of all if `launches`, and join it on all ranks.
        Return its address."""
        ours, ranks = self._engine.engine, self._engine.engine.ranks
        replica, replicas = ours.replica
        is_local = is_one_machine() or not dist.is_initialized() or dist.get_world_size() == 1
        host = hostname or ("127.0.0.1" if is_local else socket.gethostname())
        address, ready = f"tcp://{host}:{port}", None
        with announce_failure(_STARTING):
            if launches and replica == 0 and ranks.is_first:
                address, ready = await self._launch(port, host, schedule_output_path)
            if launches:
                address = self._of_first_replica(address)
        self._engine.use_coordinator = True
        if not ranks.is_first:
            self.task = asyncio.ensure_future(self._follow())
            return address
        zmq = self._core.zmq
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"mp-coord-{replica}".encode())
        self._socket.connect(address)
        self._socket.send(b"")  # which registers it
        dp = self._engine.pg_collection.dp
        if replicas > 1 and dp.size() == replicas:  # else other ranks of the models are in it
            self._barrier = self._core.AsyncZMQCommunicator(
                zmq.Context.instance(), process_group=dp, hostname=host
            )
        if ready is not None:
            await self._await(ready)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.task = asyncio.ensure_future(self._run())
        return address

    async def _launch(
        self, port: int | None, host: str, schedule_output_path: str | None
    ) -> tuple[str, Callable[[], bool]]:
        """Start core's process. Return its address, and a check whether it takes requests."""
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        ready = context.Event()
        config = self._engine.context.config
        self._process = context.Process(
            target=_run_coordinator,
            args=(config.prefix_caching_coordinator_policy.value,),
            kwargs={
                "pipe_connection": other,
                "ready_event": ready,
                "data_parallel_size": self._engine.engine.replica[1],
                "tokenizer": self._engine.controller.tokenizer,
                "max_requests": self._engine.context.max_requests,
                "inference_coordinator_port": port,
                "deterministic_mode": torch.are_deterministic_algorithms_enabled(),
                "block_size_tokens": self._engine.context.block_size_tokens,
                "enable_prefix_caching": self._engine.context.enable_prefix_caching,
                "prefix_caching_routing_alpha": config.prefix_caching_routing_alpha,
                "schedule_output_path": schedule_output_path,
                "hostname": host,
            },
            daemon=True,  # it ends with this process
        )
        self._process.start()
        other.close()
        await self._await(pipe.poll)
        address = pipe.recv()
        if not address.startswith("tcp://"):
            raise RuntimeError(f"Megatron's coordinator cannot start: {address}")
        if port is not None and not address.endswith(f":{port}"):
            self._process.kill()  # clients would wait at the port that they know
            raise RuntimeError(
                f"Megatron's coordinator cannot start: port {port} of {host} is in use; give "
                "another inference_coordinator_port, or None for any"
            )
        return address, ready.is_set

    async def _await(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if not self._process.is_alive() and not ready():
                raise RuntimeError(
                    f"Megatron's coordinator has ended with exit code {self._process.exitcode}, as "
                    "it says above"
                )
            self._check_replicas()
            await asyncio.sleep(POLL_SECONDS)

    def _of_first_replica(self, address: str) -> str:
        dp = self._engine.pg_collection.dp
        if dp.size() > 1:
            met = exchange(_STARTING, address, dist.get_process_group_ranks(dp))
            self._replicas = [member for member, _ in met]
            address = met[0][1]
        return self._engine.engine.ranks.broadcast(address)

    def _check_replicas(self) -> None:
        """Raise RankError if the process of a replica has ended."""
        if (gone := next(filter(has_ended, self._replicas), None)) is not None:
            raise RankError(
                f"{gone} (process {gone.pid}) has ended, and replicas change their states together"
            )

    # States ------------------------------------------------------------------------------------

    async def wait_until(self, state: EngineState) -> None:
        """Wait until the engine is in one of the states that last.

        Raises:
            ValueError: the state is another one.
            RuntimeError: this rank follows another one, which knows, or the engine has stopped.
        """
        if state not in self._reached:
            stable = ", ".join(each.name for each in self._reached)
            raise ValueError(f"{state.name} does not last: wait for one of {stable}")
        if self._socket is None and state is not EngineState.STOPPED and not self._is_over:
            raise RuntimeError(
                f"this rank follows rank 0 of the model: wait for {state.name} there, or for "
                "STOPPED"
            )
        waits = [
            asyncio.ensure_future(self._reached[s].wait()) for s in (state, EngineState.STOPPED)
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in waits:
            each.cancel()
        if not self._reached[state].is_set():
            raise RuntimeError(f"the engine has stopped, and does not come to be {state.name}")

    async def _apply(self, signal: list) -> None:
        """Apply a signal, on all replicas together."""
        headers, engine = self._core.Headers, self._engine
        header, state = headers(signal[0]), engine.state
        if header == headers.PAUSE and state is EngineState.RUNNING:
            await self._enter(EngineState.PAUSED, leaves=EngineState.RUNNING)
        elif header == headers.UNPAUSE and state is EngineState.PAUSED:
            await self._enter(EngineState.RUNNING, leaves=EngineState.PAUSED)
        elif header == headers.SUSPEND and state is EngineState.PAUSED:
            engine.suspend()
            await self._enter(EngineState.SUSPENDED, leaves=EngineState.RESUMED)
        elif header == headers.RESUME and state is EngineState.SUSPENDED:
            engine.resume()
            await self._enter(EngineState.RESUMED, leaves=EngineState.SUSPENDED)
            engine.state = EngineState.PAUSED
        elif header == headers.STOP and state in (EngineState.PAUSED, EngineState.SUSPENDED):
            self._reached[EngineState.SUSPENDED].clear()
            await self._meet()
            self._is_over = True
        else:
            logger.warning("%s has no effect on an engine that is %s", header.name, state.name)

    async def _enter(self, state: EngineState, leaves: EngineState) -> None:
        self._reached[leaves].clear()
        await self._meet()
        self._engine.state = state
        self._reached[state].set()

    async def _meet(self) -> None:
        """Wait until all replicas come here."""
        if self._barrier is None:
            return
        met = asyncio.ensure_future(self._barrier.all_reduce_max(1))
        try:
            while not (await asyncio.wait([met], timeout=_LOOK_SECONDS))[0]:
                self._check_replicas()
        finally:
            met.cancel()

    # The loop ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        engine, why = self._engine, "its engine has stopped"
        try:
            with engine.engine.lead():
                while not self._is_over:
                    self._check()
                    self._take_messages()
                    if self._signals:
                        await self._apply(self._signals.popleft())
                    elif engine.state is EngineState.RUNNING and engine.has_unfinished_requests():
                        self._step()
                        await asyncio.sleep(0)  # for the other tasks of this loop
                    else:
                        await asyncio.sleep(POLL_SECONDS)
        except BaseException as error:
            why = f"its engine has ended: {type(error).__name__}: {error}"
            raise
        finally:
            self._close(why)

    async def _follow(self) -> None:
        try:
            await asyncio.to_thread(follow_in_thread, self._engine.engine)
        finally:
            self._close()

    def _check(self) -> None:
        """Raise RankFailedError if a rank of this replica failed, or the coordinator ended."""
        if (failure := self._engine.engine.rank_failure) is not None:
            raise RankFailedError(failure)
        if self._monitor.poll(0):
            raise RankFailedError(
                "Megatron's coordinator has ended, or rank 0, which started it: end the job"
            )

    def _take_messages(self) -> None:
        unpack = self._core.msgpack.unpackb
        while True:
            try:
                message = self._socket.recv(self._core.zmq.NOBLOCK)
            except self._core.zmq.Again:
                return
            if message == _NOTHING:
                continue
            try:
                message = [number, *fields] = unpack(message, raw=False)
                name = self._core.Headers(number).name
            except Exception:  # core's own kind, or msgpack's
                logger.warning("a message of an unknown kind is ignored: %.60r", message)
                continue
            if name.startswith("SUBMIT_REQUEST"):
                self._submit(name, *fields)
            elif name == "ABORT_REQUEST":
                if fields[0] in self._engine.requests:
                    error = RuntimeError("its client has aborted it")
                    self._engine.fail_request(fields[0], error)
                    self._reply(self._engine.take_finished())
            elif name == "SET_GENERATION_EPOCH":
                self._engine.begin_generation_epoch(fields[0])
            elif name in _WITHOUT_EFFECT:
                logger.warning("%s has no effect: %s", name, _WITHOUT_EFFECT[name])
            else:
                self._signals.append(message)

    def _submit(
        self, name: str, request_id: int, prompt: Any, params: Any, media: Any = None, *more: Any
    ) -> None:
        """Take a request, or answer it with an error if it cannot be served. The fields are those
        of core's newest message; older ones have fewer."""
        try:
            if name != "SUBMIT_REQUEST":
                raise ValueError(f"{name} is not supported: prefill and decode run in one engine")
            if media or more:
                raise ValueError("multi_modal_data is not supported: prompts are text or tokens")
            given = SamplingParams.deserialize(params)
            streams, given.streaming = given.streaming, False
            self._engine.add_request(request_id, prompt, given)
        except Exception as error:
            self._reply([DynamicInferenceRequestRecord.of_error(request_id, error)])
            return
        if request_id not in self._engine.requests:  # it has failed
            self._reply(self._engine.take_finished())
        elif streams and not given.return_log_probs and self._is_new:
            self._streamed[request_id] = 0  # log-probabilities come with the end

    def _send_parts(self) -> None:
        """Send the new tokens of streamed requests, except those that a stop word may cut off."""
        parts = []
        for request_id, num_sent in list(self._streamed.items()):
            if (entry := self._engine.requests.get(request_id)) is None:
                del self._streamed[request_id]  # its last tokens are in its reply
                continue
            request, params = entry.request, entry.request.sampling_params
            words = () if params.detokenize_stop_sequence else params.stop_words or ()
            held = max((len(word.encode()) - 1 for word in words), default=0)
            end = len(request.generated_tokens) - held
            if end - num_sent >= params.streaming_interval:
                new = request.generated_tokens[num_sent:end]
                parts.append({"request_id": request_id, "new_tokens": new})
                self._streamed[request_id] = end
        if parts:
            self._send("ENGINE_REPLY_PARTIAL", parts)

    def _step(self) -> None:
        records = self._engine.serve_step()
        self._send_parts()
        self._reply(records)

    def _reply(self, records: list[DynamicInferenceRequestRecord]) -> None:
        if self._engine.local_metadata_ledger_enabled:
            for request in (record.merge() for record in records):
                if request.succeeded():
                    known = FinishedRequestRecord.from_request(request)
                    self._engine.local_metadata_ledger[request.uid] = known
        if records:
            self._send("ENGINE_REPLY", [_plain(each, self._is_new) for each in records])

    def _send(self, header: str, *fields: Any) -> None:
        message = [getattr(self._core.Headers, header).value, *fields]
        self._socket.send(self._core.msgpack.packb(message, use_bin_type=True))

    def _close(self, why: str = "") -> None:
        engine = self._engine
        engine.state = EngineState.STOPPED
        engine.use_coordinator = False
        for entry in engine.requests.values():
            if not entry.future.done():
                entry.future.cancel()
        if self._socket is not None:
            self._socket.setsockopt(self._core.zmq.SNDTIMEO, 0)
            with suppress(self._core.zmq.Again):  # the coordinator has ended
                self._send("DISCONNECT", why)
            self._socket.disable_monitor()
            self._socket.close(linger=1000)
        if self._barrier is not None:
            self._barrier.close()
        self._is_over = True
        self._reached[EngineState.STOPPED].set()


def _plain(record: DynamicInferenceRequestRecord, has_uid: bool) -> dict[str, Any]:
    """Return a record for core's client. `has_uid` says whether requests of this core have one."""
    data = record.merge().serialize()
    if not has_uid:
        del data["uid"]
    data["inference_parameters"] = None  # an older name of `sampling_params`
    data["block_size_tokens"] = None  # by which core would hash the prompt again
    for event in data["events"]:
        payload = event["payload"]
        if isinstance(payload, dict) and "message" in payload and "is_transient" not in payload:
            error = ContextOverflowError(
                data["request_id"], f"{payload['type']}: {payload['message']}", is_transient=False
            )
            event["payload"] = ContextErrorFactory.serialize(error)
    return data
