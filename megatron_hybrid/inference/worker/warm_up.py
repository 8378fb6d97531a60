"""Steps of no request: the warm-up, so that no request waits for kernels; the times of drafts; and
the memory of the largest step.

A kernel is compiled at its first launch. If it has several configs, it times them then, and keeps
the fastest. torch and its libraries load their kernels in the same way. So the warm-up launches all
kernels that later steps may launch, the largest steps first. Its steps run like all others, over
live slots that nobody has, the null page, and free pages.
"""

import logging
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import torch

from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.requests.draft_length import DraftCost, DraftCosts, break_even
from megatron_hybrid.inference.sampling_params import Draw, SamplingParams
from megatron_hybrid.inference.scheduling.step_plan import Restore, Save, Scored, StepPlan, Work
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.inference.worker.graph_runner import graph_sizes
from megatron_hybrid.inference.worker.model_runner import ModelRunner
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.utils.out_of_memory import is_lack_of_memory
from megatron_hybrid.utils.progress import progress

logger = logging.getLogger(__name__)

WARMED = {"cuda"}
"""Types of devices whose kernels are compiled or loaded at their first launch."""

_DRAWN = [
    SamplingParams(top_k=1).resolved(),
    SamplingParams().resolved(),
    SamplingParams(
        top_k=50, top_p=0.9, min_p=0.1, return_log_probs=True, top_n_logprobs=1
    ).resolved(),
]
"""Ways to draw tokens that launch different kernels."""
_TIMED_DECODES = {"cpu": (1, 8), "cuda": (1, 8, 64)}
"""Numbers of decodes whose drafts are timed, by the type of a device. The last number keeps a CPU
busy."""
_TIMED_STEPS = 3, 12
_TIMED_MICROSECONDS = 300_000
"""Time spent on each number of decodes, about, between the least and the most steps. If other
programs run on the machine, the shortest of many steps is more exact."""
_TIMED_POSITION = 512
"""Largest number of tokens before these decodes."""


def warm_up(runner: ModelRunner, max_tokens: int, saves: bool) -> float:
    """Run the warm-up, on all ranks of a model, and return the seconds that it took. The engine has
    no request and an empty pool; afterwards pool and live slots are zeros again.

    Args:
        runner: the engine's.
        max_tokens: of a step.
        saves: whether states are ever saved.

    Raises:
        MemoryError: the device lacks the memory for a step.
    """
    began = time.perf_counter()
    context, memory = runner.context, runner.memory
    launching = copy(runner)  # graphs read the values that it derives from weights
    launching.graphs = None
    num_pages = len(memory.pool) - 1
    pages = np.arange(1, 1 + memory.spec.checkpoint_pages, dtype=np.int32)
    plans = list(_plans(context, max_tokens, pages if saves and len(pages) <= num_pages else None))
    shows = runner.ranks.is_first
    if shows:
        logger.info(
            "warming up: %d steps compile and load kernels, before the first request", len(plans)
        )
    with progress("warming up", len(plans), False, has_lines=False, is_shown=shows) as advance:
        try:
            for plan in plans:
                launching.run(plan)
                advance(1)
        except Exception as error:
            if not is_lack_of_memory(error):
                raise
            raise MemoryError(
                f"{memory.device} has no room for a step of max_tokens={max_tokens} and "
                f"max_requests={context.max_requests} next to the pool ({error}): lower one of "
                "them, or cache_bytes; with warm_up=False the first such step fails"
            ) from error
    memory.refill()
    seconds = time.perf_counter() - began
    if shows:
        logger.info("warmed up in %.1f s", seconds)
    return seconds


@torch.inference_mode()
def measure_draft_costs(runner: ModelRunner, max_tokens: int) -> DraftCosts:
    """Time steps of decodes without drafts, with one and with as many as there may be, all
    rejected, and return costs that all ranks use. If the model's MTP head drafts, its passes count,
    too. Call it after `warm_up`, on all ranks of a model.

    max_tokens: of a step.
    """
    context, memory, most = runner.context, runner.memory, runner.context.max_drafts
    start = min(_TIMED_POSITION, context.max_sequence_length - 1 - most)
    tables = _null_tables(context)
    found: dict[int, DraftCost] = {}
    sizes = _TIMED_DECODES[memory.device.type]
    for size in dict.fromkeys(min(size, context.max_requests) for size in sizes):
        drafts = min(most, max_tokens // size - 1)
        if drafts < 1:
            break
        numbers = dict.fromkeys((0, 1, drafts))
        plans = [StepPlan(work=_decodes(size, each, start, tables)) for each in numbers]
        for _ in range(2):  # the first ones compile and load kernels
            first = sum(_seconds(runner, plan) for plan in plans)
        (longest,) = runner.ranks.maximum([round(1e6 * first)])
        count = min(max(_TIMED_MICROSECONDS // max(1, longest), _TIMED_STEPS[0]), _TIMED_STEPS[1])
        times = [[_seconds(runner, plan) for plan in plans] for _ in range(count)]
        plain, *drafted = map(min, zip(*times))
        of_one, of_all = (each / plain - 1 for each in (drafted[0], drafted[-1]))
        more = max(0.0, (of_all - of_one) / (drafts - 1)) if drafts > 1 else max(0.0, of_one)
        own = (more, max(0.0, of_one - more))
        slowest = runner.ranks.maximum([round(1e6 * part) for part in own])
        found[size] = DraftCost(*(part / 1e6 for part in slowest))
        for slot in (*range(size), len(memory.slots) - 1):  # the last one fills up graphs
            memory.clear_slot(slot)
    memory.pool[0].zero_()
    if runner.graphs is not None:
        runner.graphs.num_replays = 0
    costs = DraftCosts(tuple(found), tuple(found.values())) if found else DraftCosts()
    if runner.ranks.is_first:
        least = {size: break_even(cost, most) for size, cost in found.items()}
        logger.info(
            "drafts pay above an acceptance of %s",
            ", ".join(f"{acceptance:.2f} at {size} decodes" for size, acceptance in least.items()),
        )
    return costs


def _seconds(runner: ModelRunner, plan: StepPlan) -> float:
    drafting = [work for work in plan.work if work.draft_draws]
    began = time.perf_counter()
    if drafting and runner.context.prediction is not None:
        known = [replace(w, tokens=w.tokens[:1], num_logits=1, draft_draws=[]) for w in drafting]
        runner.predict(known, [len(work.draft_draws) for work in drafting])
    runner.run(plan)
    runner.take_back(plan, {work.request_id: work.start + 1 for work in plan.work})
    if runner.memory.device.type == "cuda":
        torch.cuda.synchronize(runner.memory.device)
    return time.perf_counter() - began


def _decodes(
    size: int, num_drafts: int, start: int, tables: list[np.ndarray], kinds: Any = None
) -> list[Work]:
    """Plan so many decodes with drafts at a position. kinds: an iterator over ways to draw."""
    made, count = [], 1 + num_drafts
    for slot in range(size):
        params = next(kinds or iter(_DRAWN))
        draws = [Draw(params, 0, 0, start + i) for i in range(1, 1 + count)]
        work = Work(slot, slot, start, np.zeros(count, np.int32), start + count, tables, count)
        work.draws, work.draft_draws = {slot: draws[0]}, draws[1:]
        made.append(work)
    return made


def _plans(
    context: DynamicInferenceContext, max_tokens: int, pages: np.ndarray | None
) -> Iterator[StepPlan]:
    """Yield prompts of several sizes, the largest first; decodes next to a prompt; decodes of each
    size that has a graph; starts of requests.

    pages: of a checkpoint, if states are saved.
    """
    most, longest = context.max_requests, context.max_sequence_length
    tables, kinds = _null_tables(context), cycle(_DRAWN)

    def works(counts: list[int]) -> list[Work]:
        """Make one work for each number of tokens, from position 0."""
        made = []
        for slot, count in enumerate(counts):
            draw = Draw(next(kinds), seed=0, sample_index=0, position=count)
            tokens = np.zeros(count, np.int32)
            work = Work(slot, slot, 0, tokens, count, tables, num_logits=1, draws={slot: draw})
            if count > 1 and pages is not None:  # inside and at the end
                work.saves = [Save(position, pages) for position in (count // 2, count)]
            made.append(work)
        return made

    num_tokens = min(max_tokens, most * longest)
    while num_tokens > 1:
        full, rest = divmod(num_tokens, longest)
        yield StepPlan(work=works([longest] * full + [rest] * (rest > 0)))
        num_tokens //= 2
    if (num_decodes := min(most, max_tokens // 2) - 1) > 0:
        prompt = min(max_tokens - num_decodes, longest)
        yield StepPlan(work=works([1] * num_decodes + [prompt]))
    for rows, sizes in graph_sizes(most, max_tokens, context.max_drafts).items():
        for size in reversed(sizes):
            yield StepPlan(work=_decodes(size, rows - 1, 0, tables, kinds))
    null = np.zeros(1, np.int32)
    sources = [{}, {"source_slot": most - 1}]
    if pages is not None:
        sources.append({"checkpoint_pages": pages})
    yield StepPlan(restores=[Restore(0, 0, null, null, **source) for source in sources])


def _null_tables(context: DynamicInferenceContext) -> list[np.ndarray]:
    """Make block tables of the null page, as `Work.tables`, for the longest sequence."""
    spec, num_tokens = context.memory.spec, context.max_sequence_length
    groups = (spec.kv_pages_per_block, *(spec.pages_per_block[own] for own in spec.local_groups))
    return [np.zeros((spec.num_blocks(num_tokens), pages), np.int32) for pages in groups]


def measured_step_bytes(
    model: HybridModel,
    context: DynamicInferenceContext,
    num_captures: int,
    max_tokens: int,
    ranks: Ranks,
) -> int:
    """Measure the bytes that a step of `max_tokens` tokens takes on a CUDA device besides pool,
    slots and inputs: prompts at the end of the longest sequence, with the log-probabilities of all
    tokens. Call it on all ranks of the model.

    context: over a pool of any size. The step reads and writes the null page and the live slots.

    Raises:
        RuntimeError: the device lacks the memory for the step.
    """
    runner = ModelRunner(model, context, None, "raw_logprobs", ranks)  # the plan has no fetch
    plan = _largest_plan(context, num_captures, max_tokens)

    @torch.inference_mode()
    def run() -> None:
        logits_nV = runner.forward(plan)
        if logits_nV is not None:
            runner.score(plan, logits_nV)

    return peak_bytes(context.memory.device, run)


def peak_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Measure the most memory of a CUDA device that torch allocates at a time in `run`."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _largest_plan(context: DynamicInferenceContext, num_captures: int, max_tokens: int) -> StepPlan:
    plan, left, longest = StepPlan(), max_tokens, context.max_sequence_length
    params = SamplingParams(return_log_probs=True)
    tables = _null_tables(context)
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
