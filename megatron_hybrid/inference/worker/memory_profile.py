"""The memory of the largest step, measured by running it."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.scheduling.step_plan import Save, Scored, StepPlan, Work
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.inference.worker.model_runner import ModelRunner
from megatron_hybrid.models.hybrid_model import HybridModel


def measured_step_bytes(
    model: HybridModel,
    context: DynamicInferenceContext,
    num_captures: int,
    max_tokens: int,
    ranks: Ranks,
) -> int:
    """Return how much a step of `max_tokens` tokens takes on a CUDA device besides pool, slots and
    inputs: prompts at the end of the longest sequence, with the log-probabilities of all tokens.
    Call it on all ranks of the model.

    context: over a pool of any size. The step reads and writes the null page and the live slots.

    Raises:
        RuntimeError: the device lacks the memory for the step.
    """
    runner = ModelRunner(model, context, None, "raw_logprobs", ranks)  # the plan has no fetch
    plan = _largest_plan(context, num_captures, max_tokens)
    return peak_bytes(context.memory.device, partial(_run, runner, plan))


def null_tables(spec: CacheSpec, num_tokens: int) -> list[np.ndarray]:
    """Block tables of the null page, as `Work.tables`, for steps of no request."""
    groups = (spec.kv_pages_per_block, *(spec.pages_per_block[own] for own in spec.local_groups))
    return [np.zeros((spec.num_blocks(num_tokens), pages), np.int32) for pages in groups]


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Return the most memory of a CUDA device that torch allocates at a time while `run` runs."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


@torch.inference_mode()
def _run(runner: ModelRunner, plan: StepPlan) -> None:
    logits_nV = runner.forward(plan)
    if logits_nV is not None:
        runner.score(plan, logits_nV)


def _largest_plan(context: DynamicInferenceContext, num_captures: int, max_tokens: int) -> StepPlan:
    plan, left, longest = StepPlan(), max_tokens, context.max_sequence_length
    params = SamplingParams(return_log_probs=True)
    tables = null_tables(context.memory.spec, longest)
    for slot in range(context.max_requests):
        count = min(left, longest)
        if not count:
            break
        start = longest - count
        saved = range(start + 1, start + count)[:num_captures]
        work = Work(slot, slot, start, np.zeros(count, np.int32), longest, tables, count)
        if count > 1:
            work.scored = Scored(start + 1, [0] * (count - 1), params)
        work.saves = [Save(position, np.zeros(0, np.int32)) for position in saved]
        plan.work.append(work)
        num_captures -= len(saved)
        left -= count
    return plan
