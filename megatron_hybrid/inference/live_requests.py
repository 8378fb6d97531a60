"""LiveRequests: the requests of an engine from their arrival to their end, and their outputs."""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.exclusive import exclusive
from megatron_hybrid.inference.metrics.meter import Meter
from megatron_hybrid.inference.requests.request import Request, RequestOutput, RequestSpec
from megatron_hybrid.inference.requests.view import EndedRequests
from megatron_hybrid.inference.sampling_params import Sampled
from megatron_hybrid.utils import out_of_memory
from megatron_hybrid.utils.interrupts import defer_sigint


class LiveRequests:
    """Queues requests, makes their outputs, and ends or cancels them. Ranks that follow get a
    message. A method with the name of one of the engine's has the effect of that one.

    Args:
        parts: of the engine.
    """

    def __init__(self, parts: EngineParts):
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._scheduler, self._runner = parts.scheduler, parts.runner
        self._builder, self._output = parts.request_builder, parts.output
        self.meter, self._tracer = Meter(), parts.tracer
        self.ended = EndedRequests()
        self.abandoned: deque[Request] = deque()
        """Requests of dropped streams, to cancel."""
        self._changed: dict[Request, None] = {}  # with new tokens and no output yet
        self._outputs: list[RequestOutput] = []  # not yet returned, if a step failed
        self._followed: dict[int, Request] = {}  # first samples, of the leading rank's requests

    @property
    def has_work(self) -> bool:
        is_cancelling = self._control.leads and bool(self.abandoned)
        return self._scheduler.has_work or is_cancelling or bool(self._changed or self._outputs)

    @property
    def has_unanswered(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.num_unanswered)

    def add(self, samples: list[Request]) -> None:
        """Queue a request with all its samples."""
        if self._ranks.size > 1:
            spec = samples[0].spec
            if self._control.leads:
                self._control.queue(LiveRequests.follow_add, spec)
            self._control.note("add_request()", spec.values())
        self._scheduler.add(samples[0])

    # Outputs

    def append(self, request: Request, sampled: Sampled) -> bool:
        """Append a drawn token, and return whether the request is answered."""
        self._changed[request] = None
        return self._output.append(request, sampled)

    def finish(self, request: Request) -> None:
        self._output.finish(request)
        self._scheduler.finish(request)
        self._note_end(request)

    def make_outputs(self) -> None:
        """Make the outputs of a step. If some cannot be made (`without_output`), raise the error of
        the last of them; the next step tries again."""
        changed, self._changed = self._changed, {}
        for request in changed:
            try:
                self._outputs.append(self._output.take(request))
            except BaseException as error:
                self._changed[request], failure = None, error
        if self._changed:
            raise failure

    @property
    def without_output(self) -> list[Request]:
        """Requests whose outputs are to be made by the next step."""
        return list(self._changed)

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def forget_outputs(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._changed.pop(request, None)
        own = {request.request_id for request in requests}
        self._outputs = [output for output in self._outputs if output.request_id not in own]

    def _note_end(self, request: Request) -> None:
        with out_of_memory.optional_work(lambda error: None):  # only page and spans lack it
            self.ended.note(request)
            if self._tracer is not None:
                self._tracer.note_end(request)
        self.meter.note_end(request)

    # Ends

    @exclusive
    def cancel_soon(self, request: Request) -> None:
        """Cancel a request as `cancel` does, or before the next step if that is refused now."""
        if self._guard.is_stepping or self._guard.is_suspended:
            self.abandoned.append(request)
        else:
            self.cancel(request)

    @exclusive
    @defer_sigint()
    def cancel(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise TypeError(
                f"request must be what add_request returned, got {type(request).__name__}"
            )
        if request.origin is not self._builder:
            raise ValueError("this request was added to another engine: cancel it there")
        self._guard.refuse_inside_step("cancel")
        if all(sample.closed for sample in request.samples):
            return
        self._guard.refuse_suspended("cancel")
        self.cancel_or_queue(request)

    def cancel_or_queue(self, request: Request) -> None:
        """Cancel a request. If other ranks follow, it is cancelled with the next step or call."""
        if self._control.leads:
            self.abandoned.append(request)
        elif self._control.has_failed:
            for sample in reversed(request.samples):
                self._cancel_sample(sample)
        else:
            with self._control.inside("cancel()"):
                self._control.note("cancel()", {"request_id": request.request_id})
                self._cancel(request)

    def cancel_abandoned(self) -> None:
        """Cancel requests of dropped streams, unless other ranks follow: see `call_followers`."""
        if self.abandoned and not self._control.leads:
            self._guard.settle()  # first: if it raises, the next step cancels them
        while self.abandoned and not self._control.leads:
            self._cancel(self.abandoned.popleft())

    def close(self) -> None:
        """Cancel the requests that wait, and send the last spans."""
        for request in list(self._scheduler.waiting):
            for sample in (request, *request.siblings):
                self._cancel_sample(sample)
        if self._tracer is not None:
            self._tracer.close()

    @exclusive
    @defer_sigint()
    def end(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """End requests with what they have generated, and return the outputs that are due and their
        last ones, whose results have the `finish_reason` "cancelled". If all ranks make the same
        calls, use `cancel`.

        Raises:
            RuntimeError: a step of this engine is running, or it is suspended; nothing has changed.
        """
        self._guard.refuse_inside_step("end")
        self._guard.refuse_suspended("end")
        unanswered = [s for request in requests for s in request.samples if not s.done]
        with self._control.inside("end()"):
            self.abandoned.extend(requests)
            self.call_followers() if self._control.leads else self.cancel_abandoned()
        # A step that was launched ahead may have answered some.
        ended = [sample for sample in unanswered if sample.finish_reason == "cancelled"]
        return [*self.take_outputs(), *map(self._output.take, ended)]

    def _cancel(self, request: Request) -> None:
        self._guard.settle()
        with ExitStack() as ends:  # all of them, even if one raises
            ends.callback(self._move_between_steps)
            for sample in reversed(request.samples):
                ends.callback(self._cancel_sample, sample)
        request.siblings = []

    def _cancel_sample(self, request: Request) -> None:
        if request.closed:
            return
        if not request.done:
            request.mark_answered("cancelled")
            self._output.finish(request)
            request.lease_report = request.prefix
            self._changed.pop(request, None)
            if request.unread is not None:
                self._output.take(request)
            self._note_end(request)
        self._scheduler.cancel(request)

    def run_moves(self) -> None:
        """Execute the moves that are due before the next step."""
        if plan := self._scheduler.schedule_moves():
            self._scheduler.complete(self._runner.run(plan))

    def _move_between_steps(self) -> None:
        try:
            self.run_moves()
        except BaseException as error:
            self._scheduler.abort()
            self._control.report(error)
            raise

    # Ranks that follow

    def call_followers(self, function: object = None, *args: object, **kwargs: object) -> None:
        """Make the following ranks cancel what is abandoned, and then make a call, if any."""
        self._guard.refuse_inside_load("step" if function is None else function.__name__)
        cancelled = []
        while self.abandoned and not self._guard.is_suspended:
            request = self.abandoned.popleft()
            if not all(sample.closed for sample in request.samples):
                cancelled.append(request)
                self._control.queue(LiveRequests.follow_cancel, request.request_id)
        if function is not None:
            self._control.queue(function, *args, **kwargs)
        self._control.send()
        for request in cancelled:
            self._cancel(request)

    def follow_add(self, spec: RequestSpec) -> None:
        """Queue a request of the leading rank."""
        samples = self._builder.make(spec)
        self._followed[samples[0].request_id] = samples[0]
        self._scheduler.add(samples[0])

    def follow_cancel(self, request_id: int) -> None:
        self._cancel(self._followed[request_id])

    def forget_closed(self) -> None:
        """Forget the requests of the leading rank that have ended."""
        self._followed = {
            request_id: request
            for request_id, request in self._followed.items()
            if not all(sample.closed for sample in request.samples)
        }
