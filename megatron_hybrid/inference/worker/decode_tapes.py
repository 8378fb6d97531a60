"""DecodeTapes: steps of decodes on a CPU, without most of the Python of a forward."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_hybrid.inference.scheduling.step_plan import StepPlan
from megatron_hybrid.inference.weights.change_detector import unrecorded_calls
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.models.hybrid_model import HybridModel, has_foreign_layers
from megatron_hybrid.ops.tape import Tape

logger = logging.getLogger(__name__)

_MOST_DECODES = 16
"""Forwards of more decodes than this take far longer than the Python around them."""


class DecodeTapes:
    """Runs forwards; those of so many decodes, of one row each, by a tape from the third one on.

    A tape calls the ops that read positions, slots or numbers of rows on the host as they are, with
    the layout and the block tables of its step. Layers of other packages may do so anywhere: models
    with some have no tapes.
    """

    def __init__(self, model: HybridModel, context: DynamicInferenceContext):
        self._model, self._context = model, context
        self._known: set[tuple[int, int]] = set()
        self._calls: dict[tuple[int, int], Callable[[], Tensor]] = {}

    def drop(self) -> None:
        """Drop all tapes, as weights have changed, or memory its place."""
        self._known.clear()
        self._calls.clear()

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits [n, V] of a plan that is laid out."""
        context = self._context
        layout = context.ragged_layout()
        key = layout.num_sequences, sum(work.num_logits for work in plan.work)
        is_plain = key[0] == layout.num_tokens <= _MOST_DECODES
        # Steps in which many end do not come again.
        is_plain = is_plain and key[1] >= key[0] - 1 and not (plan.ready or layout.captures)
        if not is_plain or context.adapter_slots is not None or torch.is_autocast_enabled("cpu"):
            return self._run()
        if (call := self._calls.get(key)) is not None:
            return call()
        if key not in self._known:
            self._known.add(key)
            return self._run()
        if unrecorded_calls(self._model) or has_foreign_layers(self._model):
            self._calls[key] = self._run
            return self._run()
        with context.recording(context.single_decodes()) as live:
            tape = self._calls[key] = Tape(self._run, live)
        if tape.reason is not None:
            logger.info("decodes run without a tape: %s", tape.reason)
        return tape.take_first()

    def _run(self) -> Tensor:
        context = self._context
        return self._model(context.input_ids, inference_context=context)[0]
