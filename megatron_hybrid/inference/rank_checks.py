"""Comparisons between the ranks of an engine, which name the first difference."""

from __future__ import annotations

from dataclasses import fields
from zlib import crc32

import torch

from megatron_hybrid.compat import MEGATRON_CORE_VERSION
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.scheduler import Scheduler
from megatron_hybrid.inference.step_plan import StepPlan
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.ranks import RankError, Ranks
from megatron_hybrid.version import __version__

_OF_EACH_RANK = ("cache_bytes", "cache_dir")
"""Fields of InferenceConfig that may differ: ranks use what the smallest one has."""
_OF_ALL_STAGES = ("hidden_size", "vocab_size", "params_dtype")


def what_must_be_equal(
    config: InferenceConfig, model: HybridConfig, stage: int
) -> dict[str, object]:
    """Versions and settings on which decisions depend, by name. Of the architecture all stages of a
    pipeline have some in common; the ranks of one stage all of it."""
    named: dict[str, object] = {
        "the version of megatron_hybrid": __version__,
        "the version of torch": torch.__version__,
        "the version of megatron-core": MEGATRON_CORE_VERSION,
    }
    for field in fields(config):
        if field.name not in _OF_EACH_RANK:
            named[f"InferenceConfig.{field.name}"] = str(getattr(config, field.name))
    named["whether InferenceConfig.cache_bytes is None"] = config.cache_bytes is None
    named["the use of InferenceConfig.cache_dir"] = config.cache_dir is not None
    for name, value in model.to_dict().items():
        if name in _OF_ALL_STAGES:
            named[f"HybridConfig.{name}"] = value
        else:  # a stage that megatron-core built does not tell the sizes of layers that it lacks
            named[f"HybridConfig.{name} of stage {stage}"] = str(value)
    return named


def check_equal_decisions(ranks: Ranks, step: int, scheduler: Scheduler, plan: StepPlan) -> None:
    """Compare the queues, the plan and the cache of all ranks.

    Raises:
        RankError: on all ranks; it names the first difference.
    """
    parts = _parts(scheduler, plan)
    sums = ranks.gather([crc32("\n".join(lines).encode()) for lines in parts.values()])
    for index, name in enumerate(parts):
        if len({of_rank[index] for of_rank in sums}) == 1:
            continue
        lines = ranks.gather(parts[name])
        for other, theirs in enumerate(lines):
            for own, their in zip((*lines[0], "no more"), (*theirs, "no more")):
                if own != their:
                    raise RankError(
                        f"step {step}: the ranks decided differently or compute different tokens, "
                        f"first in {name}: rank 0 has {own}; rank {other} has {their}. They must "
                        "be given the same requests in the same order."
                    )


def _parts(scheduler: Scheduler, plan: StepPlan) -> dict[str, list[str]]:
    """Lines that describe the state of a rank, by the name of its parts, causes first."""
    queues = {"running requests": scheduler.running, "waiting requests": scheduler.waiting}
    parts = {
        name: [f"request {r.request_id} of {r.num_tokens} tokens" for r in requests]
        for name, requests in queues.items()
    }
    parts["tokens to compute"] = [
        f"request {work.request_id}, tokens [{work.start}, {work.end}) with checksum "
        f"{crc32(work.tokens):08x}"
        for work in plan.work
    ]
    moves = (plan.drops, plan.parks, sorted(plan.loads.items()), plan.restores, plan.saves)
    for name, entries in zip(("drops", "parks", "loads", "restores", "last saves"), moves):
        parts[name] = [str(entry) for entry in entries]
    parts["saves"] = [f"request {number} at {position}" for number, position in plan.save_keys()]
    parts["the cache"] = [f"digest {scheduler.cache.digest():x}"]
    return parts
