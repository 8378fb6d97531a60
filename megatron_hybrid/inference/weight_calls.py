"""WeightCalls: the calls of an engine that change the weights, or give their memory back."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any

import torch

from megatron_hybrid.checkpoints.model_tensors import own_weights
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.inference.engine_parts import EngineParts
from megatron_hybrid.inference.exclusive import EngineSuspendedError, exclusive
from megatron_hybrid.inference.live_requests import LiveRequests
from megatron_hybrid.inference.rank_calls import on_all_ranks
from megatron_hybrid.inference.weights.memory import WeightMemory
from megatron_hybrid.inference.weights.transfer import (
    GroupInfo,
    Joining,
    Part,
    TrainerError,
    WeightGroup,
    drop_unread,
    part_of,
)
from megatron_hybrid.inference.weights.updates import (
    HOW,
    REMEDY,
    WRITTEN,
    Pairs,
    WeightsUnfinishedError,
    WeightUpdate,
    what_is_given,
)
from megatron_hybrid.models.hybrid_model import NO_MEMORY
from megatron_hybrid.models.parameter_names import is_of_prediction
from megatron_hybrid.utils.interrupts import defer_sigint

_LEFT = (
    "What the trainer sends for it is not known here, so its group was left: call "
    "init_weight_transfer_engine() again"
)
_DROPPED = "were dropped"


class WeightCalls:
    """Takes new weights, and gives back the memory of those of a suspended engine. It knows the
    update that is under way, and the tensors that need one. Its methods have the names and effects
    of the engine's.

    Args:
        parts, live: of the engine.
    """

    def __init__(self, parts: EngineParts, live: LiveRequests):
        self._guard, self._control, self._ranks = parts.guard, parts.control, parts.ranks
        self._live, self._epochs, self._model = live, parts.epochs, parts.model
        self._device = next(parts.model.parameters()).device
        self._memory = WeightMemory(parts.model)
        self._group: WeightGroup | None = None
        self._joining: Joining | None = None
        self._numbers = count()
        self._update: WeightUpdate | None = None
        self._lacking: set[str] = set()  # of all ranks: tensors without values of one model
        self._cause = ""  # why they lack them

    def require(self, name: str) -> None:
        """Raise RuntimeError if a call cannot use the weights now. name: of the call."""
        self._guard.refuse_inside_step(name)
        self._guard.refuse_closed(name)
        if self._memory.is_released:
            raise EngineSuspendedError(
                f"{name}() was called while the weights have no memory, and nothing has changed: "
                "call reacquire_weights() first"
            )

    @property
    def unfinished(self) -> str | None:
        """Why steps are refused until weights come, and how to go on, or None."""
        if not self._model.has_memory:
            return NO_MEMORY
        if self._update is not None:
            return "an update of the weights is under way: call finish_weight_update() first"
        if self._lacking and self._cause == _DROPPED:
            return f"the weights {_DROPPED}: send all of them, {HOW}"
        if self._lacking:
            names = f"{len(self._lacking)} tensors, such as {min(self._lacking)}"
            return (
                f"the weights are not those of one model, as {self._cause}. This is about {names}: "
                f"{REMEDY}"
            )
        return None

    @property
    def failure(self) -> str | None:
        """`unfinished`, if nobody is about to send the missing weights, or None."""
        if self._update is not None or not self._lacking or self._cause == _DROPPED:
            return None
        if self._control.has_failed:
            return f"the weights are not those of one model, as {self._control.failure}"
        return self.unfinished

    @defer_sigint()
    @on_all_ranks
    def update_weights(self) -> None:
        self.require("update_weights")
        self._update, self._lacking = None, set()
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
        """Load weights on this rank; all ranks call it."""
        self._guard.settle()
        control = self._control
        control.note("load_weights()")
        with control.inside("load_weights()"):
            self._guard.reads_pairs = True
            try:
                self._load(pairs, control.leads or control.follows)
            finally:
                self._guard.reads_pairs = False

    load_pairs.is_on_all_ranks = True

    def _load(self, pairs: Pairs, is_led: bool) -> None:
        """Make an update of one call. An epoch begins if the weights are new and those of one model
        afterwards. is_led: whether only the pairs of the first rank count."""
        with self._ranks.raise_on_all("load_weights()"):
            update = self._begin()
            try:
                with self._ranks.raise_on_all("load_weights()"):
                    update.take(what_is_given(pairs, is_led, self._ranks))
            except BaseException as error:
                self._give_up(_cause_of(error))
                raise
            self._update, self._lacking = None, self._lacking - update.begun
            if update.begun and not self._lacking:
                self._epochs.begin()

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

    # Its three parts: a caller with steps to run can run them in between.

    @on_all_ranks
    def begin_join(self, init_info: Mapping[str, Any]) -> Joining:
        """Begin to meet a trainer, which replaces an earlier one and ends its update; see
        `init_weight_transfer_engine`."""
        self._guard.refuse_inside_step("init_weight_transfer_engine")
        self._guard.refuse_closed("init_weight_transfer_engine")
        with self._ranks.raise_on_all("reading init_info"):
            given = GroupInfo.parse(init_info)
            given.check(self._ranks.size, self._device)
        self._give_up("another trainer has come in an update")
        self.leave()
        rank, number, control = self._ranks.rank, next(self._numbers), self._control
        joining = Joining(number, given, rank, self._device, lambda: control.watch.ends_waits)
        self._joining = joining
        return joining

    @on_all_ranks
    def end_join(self, number: int) -> bool:
        """Return at once whether all ranks have met the trainer. number: that of the `Joining`.

        Raises:
            TrainerError: a rank will not meet it, and the others have left. All ranks raise it.
        """
        self._guard.refuse_closed("init_weight_transfer_engine")
        joining = self._joining
        if joining is None or joining.number != number:
            raise TrainerError("the wait for this trainer has ended, or another one has come")
        said = self._ranks.gather(joining.state)
        for member, text in zip(self._ranks.members, said):
            if text:
                self.leave()
                raise TrainerError(text if self._ranks.size == 1 else f"{member}: {text}")
        if None in said:
            return False
        self._group, self._joining = joining.ended.result(), None
        return True

    @on_all_ranks
    def cancel_join(self) -> None:
        self._leave_joining()

    def _leave_joining(self) -> None:
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.leave()

    def leave(self) -> None:
        """Leave the trainer's group, and stop joining one."""
        self._leave_joining()
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def end_waits(self) -> None:
        """Let no rank wait for a trainer any more: a present or later wait raises TrainerError. Any
        thread may call it, before it closes the engine."""
        self._control.watch.end_waits()

    @on_all_ranks
    def start_weight_update(self) -> None:
        self.require("start_weight_update")
        self._begin()

    def _begin(self) -> WeightUpdate:
        """Begin an update, in place of one that is under way."""
        self._give_up("an update was begun anew before its end")
        self._update = WeightUpdate(self._model, self._ranks)
        return self._update

    def _give_up(self, cause: str) -> None:
        """End an update without its finish."""
        update, self._update = self._update, None
        if update is not None and update.begun:
            self._lacking |= update.begun
            self._cause = cause

    @on_all_ranks
    def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        try:
            self.require("receive_weights")
        except EngineSuspendedError as error:
            self._settle(update_info, error)
            raise
        part = None
        try:
            try:
                with self._ranks.raise_on_all("reading update_info"):
                    update = self._require_update("receive_weights")
                    part = part_of(update_info, self._group, self._device)
            except Exception as error:
                self._settle(update_info, error, part)
                raise
            with self._ranks.raise_on_all("receive_weights()"):
                update.take(part)
                if self._device.type == "cuda":  # the trainer may write there again
                    torch.cuda.synchronize(self._device)
        except BaseException as error:
            self._give_up(_cause_of(error))
            if self._group is not None and self._group.has_failed:
                self.leave()
            raise

    def _require_update(self, name: str) -> WeightUpdate:
        if self._update is None:
            raise RuntimeError(f"{name}() needs an update: call start_weight_update() first")
        return self._update

    def _settle(self, info: object, error: Exception, part: Part | None = None) -> None:
        """Receive and drop what the trainer sends for a part that no rank uses. If nobody knows
        what that is, leave the group: it would be mistaken for the next part.

        error: why no rank uses it; after leaving, it says to join again.
        """
        if part is not None:
            part.drop()
        elif self._group is not None:
            is_settled = False
            with suppress(TrainerError):
                is_settled = drop_unread(info, self._group)
            if not is_settled:
                self.leave()
                error.args = (f"{error}. {_LEFT}",)

    @defer_sigint()
    @on_all_ranks
    def finish_weight_update(self) -> None:
        self.require("finish_weight_update")
        update = self._require_update("finish_weight_update")
        with self._ranks.raise_on_all("finishing an update"):
            update.check_complete()
            if left := sorted(self._lacking - update.begun):
                more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
                raise CheckpointError(
                    f"{left[0]}{more} was not sent, and has no value of this model, as an earlier "
                    "update has failed or the weights were dropped: send it before the end"
                )
        self._update, self._lacking = None, set()
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
        if (reason := self.unfinished) is not None:
            raise WeightsUnfinishedError(reason)
        self._epochs.check()  # changes until now cannot be seen afterwards
        with self._ranks.raise_on_all("giving back the weights"):
            self._memory.release(keep)
        self._epochs.watch.accept()  # without addresses
        if not keep:  # trainers may send none of an MTP head: its values change no output
            of_ranks = self._ranks.gather(list(own_weights(self._model)))
            names = {name for of_rank in of_ranks for name in of_rank}
            self._lacking = {name for name in names if not is_of_prediction(name)}
            self._cause = _DROPPED

    @defer_sigint()
    @on_all_ranks
    def reacquire_weights(self) -> None:
        self._guard.refuse_closed("reacquire_weights")
        watch = self._epochs.watch
        has_changed = watch.has_changed()  # other changes than the new memory
        with self._ranks.raise_on_all("taking the memory of the weights again"):
            self._memory.reacquire()
        watch.accept()  # other addresses, and the same values
        if has_changed:
            watch.note_change()


def _cause_of(error: BaseException) -> str:
    text = str(error).removesuffix(WRITTEN).rstrip(".")
    return f"an update has failed with {type(error).__name__}: {text}"
