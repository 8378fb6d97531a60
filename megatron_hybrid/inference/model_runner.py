"""ModelRunner: executes plans on the device."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_hybrid.errors import optional_work
from megatron_hybrid.inference.context import DynamicInferenceContext
from megatron_hybrid.inference.memory import CacheMemory
from megatron_hybrid.inference.sampling import log_probs_of, sample, top_log_probs
from megatron_hybrid.inference.sampling_params import Draw, Sampled
from megatron_hybrid.inference.step_plan import Restore, StepPlan, StepResult
from megatron_hybrid.models.hybrid_model import HybridModel


class ModelRunner:
    """Runs the model over one step's batch, samples, and saves states.

    Args:
        model: in eval mode.
        memory: pool and live slots.
        context: lays out the batch.
    """

    def __init__(self, model: HybridModel, memory: CacheMemory, context: DynamicInferenceContext):
        self.model = model
        self.memory = memory
        self.context = context

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Restores, then a forward, then draws, then saves."""
        result = StepResult()
        for restore in plan.restores:
            with optional_work(partial(_note, result.unrestored, restore.request_id)):
                self._restore(restore)
        if result.unrestored:
            plan = replace(
                plan,
                work=[work for work in plan.work if work.request_id not in result.unrestored],
                ready=[ready for ready in plan.ready if ready.request_id not in result.unrestored],
            )
        if plan.work or plan.ready:
            logits_nV = self.forward(plan)
            result.sampled = self.sample(plan, logits_nV)
            result.prompt_log_probs = self.score(plan, logits_nV)
            self._save(plan, result)
        return result

    def _restore(self, restore: Restore) -> None:
        if restore.checkpoint_pages is None:
            self.memory.clear_slot(restore.slot)
        else:
            self.memory.load_checkpoint(restore.checkpoint_pages, restore.slot)
        if len(restore.sources):
            self.memory.copy_pages(restore.sources, restore.targets)

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits [n, V] of the wanted rows: those of `plan.work`, then those of `plan.ready`."""
        self.context.begin_step(plan)
        if not plan.work:
            return self.model.compute_logits(self.context.ready_hidden())
        return self.model(self.context.input_ids, inference_context=self.context)[0]

    def sample(self, plan: StepPlan, logits_nV: Tensor) -> dict[int, Sampled]:
        """What is drawn for each request, by id."""
        ids: list[int] = []
        draws: list[Draw] = []
        rows: list[int] = []
        end = 0
        for entry, count in [
            *((work, work.num_logits) for work in plan.work),
            *((ready, 1) for ready in plan.ready),
        ]:
            end += count
            ids += entry.draws
            draws += entry.draws.values()
            rows += [end - 1] * len(entry.draws)
        if not ids:
            return {}
        drawn_nV = logits_nV[rows]
        tokens = sample(drawn_nV, draws)
        scored = any(draw.params.return_log_probs for draw in draws)
        log_probs = log_probs_of(drawn_nV, tokens) if scored else [None] * len(tokens)
        sampled = {}
        for row, request_id in enumerate(ids):
            count = draws[row].params.top_n_logprobs
            top = top_log_probs(drawn_nV[row], count) if count else None
            sampled[request_id] = Sampled(tokens[row], log_probs[row], top)
        return sampled

    def score(self, plan: StepPlan, logits_nV: Tensor) -> dict[int, list[float]]:
        """Log-probabilities of prompt tokens, by request id."""
        scores, start = {}, 0
        for work in plan.work:
            if work.scored:
                first = start + work.first_scored - 1 - work.start
                rows_TV = logits_nV[first : first + len(work.scored)]
                scores[work.request_id] = log_probs_of(rows_TV, work.scored)
            start += work.num_logits
        return scores

    def _save(self, plan: StepPlan, result: StepResult) -> None:
        captured = iter(self.context.captured_states())
        for work in plan.work:
            for save in work.saves:
                # The state at the end is the live slot itself.
                is_end = save.position == work.end
                state = self.memory.slots[work.slot] if is_end else next(captured)
                place = work.request_id, save.position
                with optional_work(partial(_note, result.unsaved, place)):
                    self.memory.save_checkpoint(state, save.pages)


def _note(failed: dict, key, error: Exception) -> None:
    failed[key] = str(error)
