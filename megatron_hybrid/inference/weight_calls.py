"""WeightCalls: the calls of an engine that change the weights, or give their memory back."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.exclusive import EngineSuspendedError, exclusive
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.rank_calls import on_all_ranks
from megatron_hybrid.inference.weights.memory import WeightMemory
from megatron_hybrid.inference.weights.transfer import Joining
from megatron_hybrid.inference.weights.updates import Pairs, WeightsUnfinishedError
from megatron_hybrid.utils.interrupts import defer_sigint


class WeightCalls:
    """Takes new weights, and gives back the memory of those of a suspended engine. Its methods
    have the names and effects of the engine's.

    Args:
        parts, live: of the engine.
    """

    def __init__(self, parts: EngineParts, live: LiveRequests):
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._live, self._updates, self._epochs = live, parts.updates, parts.epochs
        self._memory = WeightMemory(parts.model)

    def require(self, name: str) -> None:
        """Raise RuntimeError where a call cannot use the weights. name: of the call."""
        self._guard.refuse_inside_step(name)
        self._guard.refuse_closed(name)
        if self._memory.is_released:
            raise EngineSuspendedError(
                f"{name}() was called while the weights have no memory, and nothing has changed: "
                "call reacquire_weights() first"
            )

    @property
    def unfinished(self) -> str | None:
        """Why steps are refused until weights have come, and how to go on; None: they are not."""
        return self._updates.reason_to_wait

    @property
    def failure(self) -> str | None:
        if self._updates.has_failed and self._control.has_failed:
            return f"the weights are not those of one model, as {self._control.failure}"
        return self._updates.reason_to_wait if self._updates.has_failed else None

    @defer_sigint()
    @on_all_ranks
    def update_weights(self) -> None:
        self.require("update_weights")
        self._updates.note_whole()
        self._epochs.begin()

    @exclusive
    @defer_sigint()
    def load_weights(self, pairs: Pairs) -> None:
        self.require("load_weights")
        with self._control.inside("load_weights()"):
            if self._control.leads:
                self._live.call_followers(WeightCalls.load_pairs, ())
            self.load_pairs(pairs)

    def load_pairs(self, pairs: Pairs) -> None:
        """Load weights on this rank, when all ranks know of it."""
        self._guard.settle()
        control = self._control
        control.note("load_weights()")
        with control.inside("load_weights()"):
            self._guard.reads_pairs = True
            try:
                self._updates.load(pairs, control.leads or control.follows, self._epochs.begin)
            finally:
                self._guard.reads_pairs = False

    load_pairs.is_on_all_ranks = True

    # A trainer in another process

    @exclusive
    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        # Where all ranks wait, Ctrl-C on one must not leave an exchange that the others are in.
        all_wait = self._ranks.size > 1 and not self._control.leads
        with defer_sigint() if all_wait else nullcontext():
            joining = self.begin_join(init_info)
            try:
                while not self.end_join(joining.number):
                    joining.wait()
            except KeyboardInterrupt:
                self.cancel_join()
                raise

    # Its three parts: whoever has steps to run runs them in between.

    @on_all_ranks
    def begin_join(self, init_info: Mapping[str, Any]) -> Joining:
        """Set out to meet a trainer; see `init_weight_transfer_engine`."""
        self._guard.refuse_inside_step("init_weight_transfer_engine")
        self._guard.refuse_closed("init_weight_transfer_engine")
        return self._updates.begin_join(init_info)

    @on_all_ranks
    def end_join(self, number: int) -> bool:
        """Return whether all ranks have met the trainer; see `WeightUpdates.end_join`. number: that
        of the `Joining`."""
        self._guard.refuse_closed("init_weight_transfer_engine")
        return self._updates.end_join(number)

    @on_all_ranks
    def cancel_join(self) -> None:
        self._updates.cancel_join()

    def end_waits(self) -> None:
        """Let no rank wait for a trainer any more: who waits, or will, gets a TrainerError. Any
        thread may call it, before it closes the engine."""
        self._control.end_waits()

    @on_all_ranks
    def start_weight_update(self) -> None:
        self.require("start_weight_update")
        self._updates.start()

    @on_all_ranks
    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        try:
            self.require("receive_weights")
        except EngineSuspendedError as error:
            self._updates.settle(update_info, error)
            raise
        self._updates.receive(update_info)

    @defer_sigint()
    @on_all_ranks
    def finish_weight_update(self) -> None:
        self.require("finish_weight_update")
        self._updates.finish()
        self._epochs.begin()

    # The memory of the weights

    @defer_sigint()
    @on_all_ranks
    def release_weights(self, keep: bool = True) -> None:
        self._guard.refuse_inside_step("release_weights")
        self._guard.refuse_closed("release_weights")
        if not self._guard.is_suspended:
            raise RuntimeError("release_weights() needs a suspended engine: call suspend() first")
        if self._memory.is_released:
            return
        if (reason := self._updates.reason_to_wait) is not None:
            raise WeightsUnfinishedError(reason)
        self._epochs.check()  # what is seen now is not seen afterwards
        with self._ranks.raise_on_all("giving back the weights"):
            self._memory.release(keep)
        self._epochs.watch.accept()  # without addresses
        if not keep:
            self._updates.note_dropped()

    @defer_sigint()
    @on_all_ranks
    def reacquire_weights(self) -> None:
        self._guard.refuse_closed("reacquire_weights")
        watch = self._epochs.watch
        has_changed = watch.has_changed()  # other things than what is taken now
        with self._ranks.raise_on_all("taking the memory of the weights again"):
            self._memory.reacquire()
        watch.accept()  # other addresses, and the same values
        if has_changed:
            watch.note_change()
