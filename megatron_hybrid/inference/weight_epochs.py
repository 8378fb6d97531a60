"""Epochs: the weights that cached content belongs to, and what is dropped when they change."""

import logging

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.output import OutputProcessor
from megatron_hybrid.inference.scheduling.scheduler import Scheduler
from megatron_hybrid.inference.weights.change_detector import WeightWatch
from megatron_hybrid.inference.weights.fingerprint import fingerprint
from megatron_hybrid.inference.worker.model_runner import ModelRunner
from megatron_hybrid.inference.worker.mtp_drafter import cached_layers
from megatron_hybrid.offload.offload import Offload

logger = logging.getLogger(__name__)


class Epochs:
    """Begins an epoch, with an empty cache, when the weights have changed. All ranks make the same
    calls.

    Args:
        scheduler, offload, runner: have what older weights computed.
        output: counts the epochs, which it notes for each token.
        config: of the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        offload: Offload,
        runner: ModelRunner,
        output: OutputProcessor,
        config: InferenceConfig,
    ):
        self._scheduler, self._offload, self._runner = scheduler, offload, runner
        self._output, self._config = output, config
        self._model, self._memory, self._ranks = runner.model, runner.memory, runner.ranks
        self.watch = WeightWatch(self._model)
        """Detects whether the weights of this rank may have changed in this epoch."""

    def check(self) -> None:
        """Begin an epoch if the weights have changed, on any rank."""
        if any(self._ranks.maximum([self.watch.has_changed()])):
            self.begin_unsaid()

    def begin(self) -> None:
        """Put the model into eval mode, and begin an epoch, as the weights have changed."""
        self._model.eval()
        self._begin()

    def begin_unsaid(self) -> None:
        """Log that the weights have changed without a call, and begin an epoch."""
        logger.warning(
            "the weights have changed: what was cached belongs to the old ones and is dropped, and "
            "%d requests are computed anew; tokens that they have generated stay",
            self._scheduler.num_unanswered,
        )
        self._begin()

    def _begin(self) -> None:
        """Drop all that older weights computed. If it raises, the watch still says that the weights
        have changed."""
        self.watch.note_change()  # perhaps seen on another rank only
        self.start_over()
        self._memory.keep(None)  # what a suspended engine keeps
        try:
            self.clear()
        except OSError as error:
            logger.warning("%s cannot be emptied: %s", self._config.cache_dir, error)

    def start_over(self) -> None:
        """Queue all running requests again, and keep only their tokens."""
        self._scheduler.start_over()
        self._runner.parked.clear()

    def clear(self) -> None:
        """Empty the cache, and bind it to the present weights. New ones begin an epoch.

        Raises:
            OSError: the folder could not be rewritten; it is unused from here on.
        """
        is_new = any(self._ranks.maximum([self.watch.has_changed()]))
        disk = self._offload.disk
        with self._ranks.raise_on_all("dropping what older weights computed"):
            try:
                self._offload.clear()  # first: it waits for the loads into the pool
            finally:
                self._offload.cache.clear()
            self._memory.weights_changed(cached_layers(self._model, self._config))
            self._runner.drop_old_weights()
            made_for = {}
            if disk is not None:
                made_for = fingerprint(self._model, self._memory.spec, self._config)
        self.watch.accept()
        self._output.epoch += is_new
        if disk is not None:
            disk.store.rebind(made_for)
