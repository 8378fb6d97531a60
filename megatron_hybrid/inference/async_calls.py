"""AsyncCalls: the calls of coroutines in an engine, in the engine's own thread, a StepThread."""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from megatron_hybrid.inference.async_stream import AsyncCall, QueueTimeoutError
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.builder import Prompt, TextTokenizer
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import RequestOutput
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.weights.updates import WeightsUnfinishedError
from megatron_hybrid.utils.fork_guard import ForkGuard
from megatron_hybrid.utils.interrupts import defer_sigint

logger = logging.getLogger(__name__)
R = TypeVar("R")


class StepThread:
    """Runs jobs one after the other, until the last one. In a fork of its process it refuses all.

    A step is a job, too, and queues the next step while there is work. So jobs run between two
    steps, in order, and an idle engine takes no CPU.

    Args:
        name: of the thread.
        ended: text of the error for a job that comes after the last one.
    """

    def __init__(self, name: str, ended: str):
        self._ended = ended
        self._executor = ThreadPoolExecutor(1, name)
        self._home = ForkGuard()
        self._lock = threading.Lock()  # so that no job is queued after the last one
        self._last: Future | None = None
        self._has_next_step = False

    def submit(self, job: Callable[[], R]) -> Future[R]:
        """Queue a job.

        Raises:
            RuntimeError: the last job is queued, or the interpreter exits, or it is a fork.
        """
        self.require_home()
        with defer_sigint(), self._lock:
            if self._last is not None:
                raise RuntimeError(self._ended)
            return self._executor.submit(job)

    def require_home(self) -> None:
        """Raise RuntimeError in a fork, where jobs would wait for ever."""
        self._home.require("this engine")

    def submit_step(self, step: Callable[[], None]) -> None:
        """Queue a step, unless one is queued. Call it in the thread.

        Raises:
            RuntimeError: as `submit`.
        """
        if not self._has_next_step:
            self.submit(partial(self._run_step, step))
            self._has_next_step = True

    def _run_step(self, step: Callable[[], None]) -> None:
        self._has_next_step = False
        step()

    def end(self, job: Callable[[], None]) -> Future[None]:
        """Queue the last job and return its future. A second call returns the same future and
        ignores its job. In a fork nothing is to be ended, and the future is done."""
        if not self._home.is_here:
            nothing: Future[None] = Future()
            nothing.set_result(None)
            return nothing
        with defer_sigint(), self._lock:
            if self._last is None:
                self._last = self._executor.submit(job)
                self._executor.shutdown(wait=False)
            return self._last


def use_device_of(engine: DynamicInferenceEngine) -> None:
    """Make the engine's CUDA device the current one of this thread: kernels are launched there."""
    device = engine.memory.pool.device
    if device.type == "cuda":
        torch.cuda.set_device(device)


def follow_in_thread(engine: DynamicInferenceEngine) -> None:
    """Call `engine.follow()` in a thread of its own."""
    use_device_of(engine)
    engine.follow()


class AsyncCalls:
    """Makes an engine, gives it the requests of coroutines, runs its steps, and sends what they
    give. All of it runs in the engine's thread; only `abandoned` is for everyone.

    Args:
        thread: of the engine.
    """

    engine: DynamicInferenceEngine

    def __init__(self, thread: StepThread):
        self._thread = thread
        self.abandoned: deque[AsyncCall] = deque()
        """Calls that nobody waits for any more, to cancel. Anyone may append to it."""
        self._calls: dict[int, AsyncCall] = {}  # by the id of each sample
        self._answered: dict[AsyncCall, None] = {}  # those of them that took all outputs
        self._queued: dict[AsyncCall, float] = {}  # until when they may wait to begin
        self._mail: dict[asyncio.AbstractEventLoop, list[tuple[AsyncCall, object]]] = {}
        self._pause: str | None = None  # its mode
        self._held: deque[tuple[AsyncCall, Callable[[], None]]] = deque()  # not in the engine yet
        self._on_empty: list[Future[None]] = []  # of those that wait until nothing runs

    @property
    def is_paused(self) -> bool:
        """Whether requests are held back."""
        return self._pause is not None

    @property
    def is_held(self) -> bool:
        """Whether requests are held back, or no step may run."""
        return self.is_paused or self._is_frozen

    def make(
        self,
        model: nn.Module | Sequence[nn.Module],
        tokenizer: TextTokenizer | None,
        config: InferenceConfig | None,
    ) -> None:
        """Make the engine, and lead its other ranks."""
        with ExitStack() as undo:
            engine = undo.enter_context(DynamicInferenceEngine(model, tokenizer, config))
            undo.enter_context(engine.lead())
            use_device_of(engine)
            self._leading = undo.pop_all()
        self.engine = engine

    def between_steps(self, job: Callable[[], R]) -> R:
        """Run a job when no step runs. Afterwards steps go on."""
        while self.abandoned:
            call = self.abandoned.popleft()
            if call.samples and call.samples[0].request_id in self._calls:
                self._cancel(call)
                self._go_on()  # with other ranks a cancellation is a part of the next step
        was_frozen = self._is_frozen
        try:
            return job()
        except StopIteration as error:  # no future can hold it
            raise RuntimeError(f"a tokenizer raised {error!r}") from error
        finally:
            self._let_in()
            if was_frozen:
                self._go_on()
            self._deliver()

    @property
    def _is_frozen(self) -> bool:
        """Whether no step may run."""
        engine = self.engine
        return self._pause == "keep" or engine.is_suspended or engine.awaits_weights

    def _let_in(self) -> None:
        """Give the engine the requests that were held back, if they may begin."""
        while self._held and self._pause is None and not self._is_frozen:
            call, add = self._held.popleft()
            try:
                add()
            except Exception as error:
                self._send(call, error)
        if self.engine.weights_failure is not None:
            while self._held:
                self._send(self._held.popleft()[0], self._unfinished())

    def _unfinished(self) -> WeightsUnfinishedError:
        return WeightsUnfinishedError(self.engine.weights_failure)

    def begin_pause(self, mode: str) -> None:
        if mode == "abort" and self._calls:
            calls = self._live_calls()
            self._take(self.engine.live.end([call.samples[0] for call in calls]))
            for call in calls:
                self._end(call, call.answer())
        self._pause = mode

    def tell_when_empty(self, empty: Future[None]) -> None:
        """Set the future when no request is left."""
        if empty.set_running_or_notify_cancel():  # unless the caller has given up
            self._on_empty.append(empty)
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._calls:
            waiting, self._on_empty = self._on_empty, []
            for each in waiting:
                each.set_result(None)

    def clear_paused(self) -> None:
        if self._pause is not None and not self.engine.is_suspended:  # it is still paused
            self.engine.clear_cache()

    def end_pause(self) -> None:
        if self.engine.is_suspended:
            raise RuntimeError("the engine sleeps: call wake_up first")
        self._pause = None
        waiting, self._on_empty = self._on_empty, []
        for each in waiting:
            each.set_exception(RuntimeError("resume_generation() has ended this pause"))

    def sleep(self, level: int, keep_cache: str) -> None:
        self.engine.suspend(keep_cache)
        self.engine.release_weights(keep=level == 1)

    def wake_up(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            self.engine.reacquire_weights()
        if "kv_cache" in tags:
            self.engine.resume()
        if not self.engine.is_suspended:
            self._pause = None

    def _send(self, call: AsyncCall, item: object) -> None:
        """Put an item into a call's mailbox, at the end of this job."""
        self._mail.setdefault(call.loop, []).append((call, item))

    def _deliver(self) -> None:
        """Wake each event loop once for all its items: every wake-up hands it the interpreter."""
        mail, self._mail = self._mail, {}
        for loop, items in mail.items():
            try:
                loop.call_soon_threadsafe(_put_all, items)
            except RuntimeError:  # the event loop is closed
                for call, _ in items:
                    call.abandon()

    def _live_calls(self) -> list[AsyncCall]:
        """List the calls, the oldest first."""
        return list(dict.fromkeys(self._calls.values()))

    def add(
        self,
        call: AsyncCall,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions | None,
    ) -> None:
        """Give a request to the engine, or hold it back during a pause."""
        if call.is_abandoned:
            return
        if self.engine.weights_failure is not None:
            raise self._unfinished()
        if self._pause is not None or self._is_frozen:
            self._held.append((call, partial(self.add, call, prompt, params, options)))
            return
        request = self.engine.add_request(prompt, params, options, growing_text=call.streams)
        call.samples = request.samples
        call.num_unanswered = len(call.samples)
        self._calls.update((sample.request_id, call) for sample in call.samples)
        if call.queue_seconds is not None:
            self._queued[call] = request.added_at + call.queue_seconds
        self._go_on()

    def _go_on(self) -> None:
        if self._is_frozen or not self.engine.has_work:
            return
        try:
            self._thread.submit_step(partial(self.between_steps, self._step))
        except RuntimeError:  # closed, or the interpreter exits
            self._end_all()

    def _step(self) -> None:
        if self._is_frozen:  # since it was queued
            return
        try:
            self._take(self.engine.step())
        except BaseException as error:  # the thread survives every error
            self._take(self.engine.live.take_outputs())
            self._fail(error)
            if not self._calls:  # nobody would get a second error: no step before the next job
                return
        for call in [call for call in self._answered if call.is_closed]:
            self._end(call, call.answer())
        self._give_up_late()
        self._go_on()

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            call = self._calls.get(output.request_id)
            if call is None:
                continue
            if call.streams:
                self._send(call, output)
            call.num_unanswered -= output.result is not None
            if not call.num_unanswered:
                self._answered[call] = None

    def _fail(self, error: BaseException) -> None:
        """End the calls that get the error of a step. All others are back in the queue."""
        failed = [request.request_id for request in self.engine.take_failed()]
        calls = dict.fromkeys(self._calls[number] for number in failed if number in self._calls)
        logger.error(
            "a step failed: of %d requests %d get its error, the others go on from what is cached",
            len(self._live_calls()),
            len(calls),
            exc_info=error,
        )
        for call in calls:
            self._cancel(call, error)

    def _give_up_late(self) -> None:
        now = time.perf_counter()
        for call, until in list(self._queued.items()):
            if call.has_begun:
                del self._queued[call]
            elif now > until:
                text = f"the request has waited {call.queue_seconds} s and has not begun"
                self._cancel(call, QueueTimeoutError(f"{text}: send it again later"))

    def _end(self, call: AsyncCall, item: object) -> None:
        for sample in call.samples:
            del self._calls[sample.request_id]
        self._answered.pop(call, None)
        self._queued.pop(call, None)
        self._send(call, item)
        self._note_empty()

    def _cancel(self, call: AsyncCall, error: BaseException | None = None) -> None:
        """Cancel a call. error: for its coroutine, if that waits for an answer."""
        self._end(call, call.answer() if call in self._answered else error)
        try:
            self.engine.live.cancel_soon(call.samples[0])
        except BaseException:  # such as a tokenizer's panic: the thread survives every error
            logger.exception("request %d is cancelled, but", call.samples[0].request_id)

    def _end_all(self) -> None:
        text = "the AsyncEngine was closed before this request was answered: await it first"
        for call in self._live_calls():
            self._cancel(call, RuntimeError(text))
        while self._held:
            self._send(self._held.popleft()[0], RuntimeError(text))

    def shut(self) -> None:
        self._end_all()
        self._deliver()
        self._leading.close()


def _put_all(items: list[tuple[AsyncCall, object]]) -> None:
    for call, item in items:
        call.put(item)
