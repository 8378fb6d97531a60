"""Replicas: engines side by side, each of a data-parallel replica of one model.

Rank 0 of the job takes all requests, and sends each to the replica where it costs least
(`routing.Router`). The first rank of each replica leads the other ranks of that replica.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.exclusive import EngineSuspendedError
from megatron_hybrid.inference.rank_watch import RankFailedError
from megatron_hybrid.inference.request import GenerationResult, Request
from megatron_hybrid.inference.request_builder import (
    Prompt,
    RequestBuilder,
    RequestSpec,
    TextTokenizer,
)
from megatron_hybrid.inference.routing.restorable import Delta, RestorableIndex
from megatron_hybrid.inference.routing.router import Router
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.step_thread import use_device_of
from megatron_hybrid.interrupts import interrupts_wait, poll_until
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.processes import HomeProcess
from megatron_hybrid.ranks import leaders_of, ranks_of
from megatron_hybrid.text.guide import Guide

logger = logging.getLogger(__name__)


@dataclass
class _News:
    """What a replica tells after a step, by the ids of first samples."""

    delta: Delta
    prefilled: list[int] = field(default_factory=list)
    answered: list[GenerationResult] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)


class Replicas:
    """One engine on each data-parallel replica of a model. Make it on all ranks of the job.

    On rank 0 call `lead`, on all others `follow`. `engine` is that of this rank's replica: outside
    of `lead` and `follow` all ranks may call it, for example `update_weights` or `suspend`.

    Args:
        model, tokenizer, config: as for `DynamicInferenceEngine`. `cache_dir` gets a folder for
            each replica.
    """

    def __init__(
        self,
        model: HybridModel,
        tokenizer: TextTokenizer | None = None,
        config: InferenceConfig | None = None,
    ) -> None:
        self._home = HomeProcess()
        ranks = ranks_of(model.pg_collection)
        self._leaders = leaders_of(ranks)
        own = (0, 0) if self._leaders is None else (self._leaders.rank, self._leaders.size)
        self.number, self.size = ranks.broadcast(own)
        """Number of this rank's replica, and of all replicas."""
        config = InferenceConfig() if config is None else config
        if config.cache_dir is not None:
            config = replace(config, cache_dir=Path(config.cache_dir) / f"replica-{self.number}")
        self.engine = DynamicInferenceEngine(model, tokenizer, config, ranks=ranks)
        self._index = None if self._leaders is None else RestorableIndex(self.engine.cache)
        own = self.engine.request_builder
        self._builder = RequestBuilder(own.config, own.cache, own.tokenizer, own.vocab_size)

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the requests."""
        return self.number == 0 and self.engine.ranks.is_first

    @contextmanager
    def lead(self) -> Iterator[Front]:
        """Context in which rank 0 of the job takes requests for all replicas, and all other ranks
        are in `follow`."""
        self._home.require("this Replicas", "replicas of its own")
        if not self.is_first:
            raise RuntimeError("lead() was called on another rank than 0: call follow() there")
        if self.engine.is_suspended:
            raise EngineSuspendedError("lead() was called on a suspended engine: call resume()")
        front_end, replica_end = Pipe()
        thread = threading.Thread(target=self._run, args=(replica_end,), name="replica-0")
        thread.start()
        # Ids go on from all earlier ones, since they are the seeds of requests without one.
        self._builder.next_id = max(self._builder.next_id, self.engine.request_builder.next_id)
        front = Front(self._builder, [front_end, *self._leaders.connections])
        try:
            yield front
        finally:
            front.close()
            thread.join()

    def follow(self) -> None:
        """Run what rank 0 of the job sends to this replica, until it ends `lead`."""
        self._home.require("this Replicas", "replicas of its own")
        if self.is_first:
            raise RuntimeError("follow() was called on rank 0 of the job: call lead()")
        if self._leaders is None:
            self.engine.follow()
        else:
            self._run(self._leaders.connections[0])

    def close(self) -> None:
        """Close this rank's engine. In a fork it does nothing."""
        if not self._home.is_here:
            return
        self.engine.close()
        if self._leaders is not None:
            self._leaders.close()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, front: Connection) -> None:
        """Run the requests of a replica."""
        use_device_of(self.engine)
        running: dict[int, Request] = {}
        failed: dict[int, Exception] = {}
        try:
            with self.engine.lead():
                while self._take(front, running, failed):
                    if self.engine.has_work or failed:
                        _tell(front, self._step(running, failed))
        except Exception as error:
            with suppress(RankFailedError):
                _tell(front, RankFailedError(f"replica {self.number} has failed: {error!r}"))
            raise
        _tell(front, None)

    def _take(
        self, front: Connection, running: dict[int, Request], failed: dict[int, Exception]
    ) -> bool:
        """Take new requests and cancellations; wait for one if there is nothing else to do. False:
        it was the last message."""
        while True:
            try:
                if not front.poll(0 if self.engine.has_work or failed else None):
                    return True
                message = front.recv()
            except (OSError, EOFError):
                raise RankFailedError("rank 0 of the job has ended") from None
            if message is None:
                for request in running.values():
                    self.engine.cancel(request)
                return False
            if isinstance(message, RequestSpec):
                try:
                    running[message.first_id] = self.engine.add_spec(message)
                except MemoryError as error:
                    failed[message.first_id] = error
            elif message in running:
                self.engine.cancel(running.pop(message))

    def _step(self, running: dict[int, Request], failed: dict[int, Exception]) -> _News:
        error, outputs = None, []
        try:
            if self.engine.has_work:
                outputs = self.engine.step()
        except RankFailedError:
            raise
        except Exception as raised:
            error, outputs = raised, self.engine.take_outputs()
        new = {output.request_id for output in outputs}
        prefilled = [i for i, r in running.items() if i in new and r.num_generated == 1]
        answered = [i for i, r in running.items() if all(sample.closed for sample in r.samples)]
        results = [running.pop(number).result() for number in answered]
        if error is not None:
            ended = set(self.engine.take_failed())
            for number in [i for i, r in running.items() if not ended.isdisjoint(r.samples)]:
                self.engine.cancel(running.pop(number))
                failed[number] = error
        news = _News(self._index.delta(), prefilled, results, {})
        for number, error in failed.items():  # of any class: it must be unpickled elsewhere
            is_plain = type(error).__module__ == "builtins"
            news.failed[number] = error if is_plain else RuntimeError(repr(error))
        failed.clear()
        return news


def _tell(front: Connection, message: object) -> None:
    try:
        front.send(message)
    except OSError:
        raise RankFailedError("rank 0 of the job has ended") from None


class Front:
    """Takes requests for all replicas; see `Replicas.lead`. Any thread may call it.

    Args:
        builder: checks the arguments; for this Front alone.
        replicas: connections to all of them.
    """

    def __init__(self, builder: RequestBuilder, replicas: Sequence[Connection]):
        self._builder = builder
        self._replicas = replicas
        self.router = Router(len(replicas))
        self.sent_to: dict[int, int] = {}
        """Replica of each request under way, by its id."""
        self._futures: dict[int, Future[GenerationResult]] = {}
        self._home = HomeProcess()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._is_closed = False
        self._outbox: SimpleQueue[tuple[Connection, object] | None] = SimpleQueue()
        # Replicas may be slow to read: what waits to be sent must hold up no answer.
        self._threads = [
            threading.Thread(target=job, name=name, daemon=True)
            for name, job in (("to-replicas", self._send), ("of-replicas", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        guide: Guide | None = None,
        salt: str = "",
        cache_breakpoints: Sequence[int] = (),
        n: int = 1,
        priority: int = 0,
    ) -> Future[GenerationResult]:
        """Send one prompt to a replica; arguments as for `DynamicInferenceEngine.add_request`. In
        asyncio await `asyncio.wrap_future` of the result. `cancel()` of the future cancels it.

        Raises:
            TypeError, ValueError: the request cannot be served; nothing has changed.
            RuntimeError: `lead` has ended, or a replica has failed, or this process is a fork.
        """
        self._home.require("this Front of replicas", "replicas of its own")
        with self._lock:
            if self._is_closed or self._error:
                raise RuntimeError(
                    "lead() has ended: submit inside of it"
                    if self._error is None
                    else f"a replica has failed ({self._error}): end the job"
                ) from self._error
            samples = self._builder.build(
                prompt, params, salt, cache_breakpoints, n, priority, guide
            )
            spec = RequestSpec.of(samples)
            route = self.router.choose(np.asarray(spec.tokens, dtype=np.int32), salt)
            number = spec.first_id
            self.router.note_sent(number, route)
            self.sent_to[number] = route.replica
            future: Future[GenerationResult] = Future()
            self._futures[number] = future
            self._outbox.put((self._replicas[route.replica], spec))
        future.add_done_callback(partial(self._end_cancelled, number))
        return future

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        n: int = 1,
    ) -> list[GenerationResult]:
        """Answer prompts on all replicas; results in their order."""
        futures: list[Future[GenerationResult]] = []
        with interrupts_wait() as let_in:
            try:
                for prompt in prompts:
                    futures.append(self.submit(prompt, params, salt=salt, n=n))
                for future in futures:
                    poll_until(future.done, let_in)
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def close(self) -> None:
        """End all replicas' work; unanswered requests are cancelled. In a fork it does nothing."""
        if not self._home.is_here:
            return
        with self._lock:
            self._is_closed = True
            for replica in self._replicas:
                self._outbox.put((replica, None))
            self._outbox.put(None)
        for thread in self._threads:
            thread.join()
        self._fail_all(RuntimeError("lead() has ended before this request was answered"))

    def _end_cancelled(self, number: int, future: Future) -> None:
        if not future.cancelled():
            return
        with self._lock:
            if self._futures.pop(number, None) is not None:
                self.router.note_done(number)
                if not self._is_closed:
                    self._outbox.put((self._replicas[self.sent_to.pop(number)], number))

    def _send(self) -> None:
        """Until the front is closed."""
        while (item := self._outbox.get()) is not None:
            replica, message = item
            with suppress(OSError):  # it is gone: `_receive` is told
                replica.send(message)

    def _receive(self) -> None:
        """Until the last message of every replica, or a failure."""
        numbers = {replica: number for number, replica in enumerate(self._replicas)}
        while numbers:
            for replica in wait(list(numbers)):
                number = numbers[replica]
                try:
                    news = replica.recv()
                    if isinstance(news, _News):
                        self._note(number, news)
                        continue
                except (OSError, EOFError):
                    news = RankFailedError(f"replica {number} has lost its first rank")
                except Exception as error:  # no future may wait for ever
                    news = error
                if news is not None:
                    with self._lock:
                        self._error = self._error or news
                    self._fail_all(news)
                del numbers[replica]

    def _note(self, number: int, news: _News) -> None:
        results: list[tuple[Future, object]] = []
        with self._lock:
            self.router.apply(number, news.delta)
            for first in news.prefilled:
                if first in self._futures:
                    self.router.note_prefilled(first)
            for result in news.answered:
                if (future := self._end(result.request_id, result.generated_tokens)) is not None:
                    results.append((future, result))
            for first, error in news.failed.items():
                if (future := self._end(first)) is not None:
                    results.append((future, error))
        for future, outcome in results:  # callbacks may submit
            if future.set_running_or_notify_cancel():
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    def _end(self, number: int, output: Sequence[int] | None = None) -> Future | None:
        future = self._futures.pop(number, None)
        if future is not None:
            self.router.note_done(number, None if output is None else np.array(output, np.int32))
            del self.sent_to[number]
        return future

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            futures, self._futures = self._futures, {}
        for future in futures.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
