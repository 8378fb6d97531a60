"""WeightUpdates: updates of a model's weights that come in parts, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_hybrid.checkpoints.checkpoint import own_weights
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.inference.weight_loading import Pairs, WeightLoader
from megatron_hybrid.inference.weight_transfer import GroupInfo, TrainerError, WeightGroup, part_of
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.parameter_names import is_of_prediction
from megatron_hybrid.ranks import Ranks


class WeightUpdates:
    """The update that is under way, and the tensors that need one. All ranks make the same calls.

    Args:
        model: of this rank.
        ranks: of the engine.
    """

    def __init__(self, model: HybridModel, ranks: Ranks):
        self._model, self._ranks = model, ranks
        self._device = next(model.parameters()).device
        self._group: WeightGroup | None = None
        self._loader: WeightLoader | None = None
        self._lacking: set[str] = set()  # this rank's tensors without values of one model
        self._is_whole = True  # on all ranks

    @property
    def reason_to_wait(self) -> str | None:
        """Why no step may use the weights; None: it may."""
        if self._loader is not None:
            return "an update of the weights is under way: call finish_weight_update() first"
        if not self._is_whole:
            return (
                "the weights are not those of one model, as an update has failed or they were "
                "dropped: send all of them, by start_weight_update() and so on, or load_weights()"
            )
        return None

    def join(self, info: object) -> None:
        """Meet a trainer, in place of an earlier one."""
        with self._ranks.together("reading init_info"):
            given = GroupInfo.parse(info)
        self.leave()
        self._group = given.join(self._ranks.rank, self._device)

    def leave(self) -> None:
        """Leave the trainer's group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def start(self) -> None:
        """Begin an update, in place of one that is under way."""
        self._give_up()
        self._loader = WeightLoader(self._model, self._ranks)

    def receive(self, info: object) -> None:
        """Take a part of the weights.

        Raises:
            ValueError: `info` is none, or the model has no such tensors. If nothing of the update
                has been written before, it is over, and nothing has changed.
            RuntimeError: no update is under way, or the trainer has failed.
        """
        self._require_open("receive_weights")
        with self._ranks.together("reading update_info"):
            part = part_of(info, self._group, self._device)
        failure: BaseException | None = None
        try:
            with self._ranks.together("receiving weights"):
                self._loader.load_part(part)
                if self._device.type == "cuda":  # the trainer may write there again
                    torch.cuda.synchronize(self._device)
        except Exception as error:
            failure = error
        if failure is not None:
            self._give_up()
            if isinstance(failure, TrainerError):
                self.leave()
            raise failure

    def finish(self) -> None:
        """End an update.

        Raises:
            ValueError: tensors are missing; the update goes on.
            RuntimeError: no update is under way.
        """
        self._require_open("finish_weight_update")
        with self._ranks.together("finishing an update"):
            self._loader.end()
            if left := sorted(self._lacking - self._loader.written):
                more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
                raise CheckpointError(
                    f"{left[0]}{more} was not sent, and has no value of this model, as an earlier "
                    "update has failed or the weights were dropped: send it before the end"
                )
        self._loader = None
        self.note_whole()

    def load(self, pairs: Pairs, is_led: bool, begin_epoch: Callable[[], None]) -> None:
        """Load weights that are no update in parts; if any was written, an epoch begins. Arguments
        and errors as those of `WeightLoader.load`."""
        with self._ranks.together("load_weights()"):
            loader, failure = WeightLoader(self._model, self._ranks), None
            try:
                with self._ranks.together("load_weights()"):
                    loader.load(pairs, is_led)
            except Exception as error:
                failure = error
            if any(self._ranks.maximum([len(loader.written)])):
                self._lacking -= loader.written
                self._is_whole = not any(self._ranks.maximum([len(self._lacking)]))
                begin_epoch()
            if failure is not None:
                raise failure

    def note_whole(self) -> None:
        """All tensors are those of one model."""
        self._lacking, self._is_whole = set(), True

    def note_dropped(self) -> None:
        """No tensor has a value. Trainers may send none of a part for multi-token prediction: its
        values change no output."""
        needed = {name for name in own_weights(self._model) if not is_of_prediction(name)}
        self._lacking, self._is_whole = needed, False

    def _require_open(self, name: str) -> None:
        if self._loader is None:
            raise RuntimeError(f"{name}() needs an update: call start_weight_update() first")

    def _give_up(self) -> None:
        """End an update without its finish."""
        if self._loader is None:
            return
        written, self._loader = self._loader.written, None
        if any(self._ranks.maximum([len(written)])):
            self._lacking |= written
            self._is_whole = False
