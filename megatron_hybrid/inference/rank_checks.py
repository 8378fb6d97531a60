"""Comparisons between the ranks of an engine, which name the first difference."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import zip_longest
from zlib import crc32

import torch
from torch import Tensor, nn

from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.compat import MEGATRON_CORE_VERSION
from megatron_hybrid.distributed.ranks import RankError, Ranks
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.scheduling.scheduler import Scheduler
from megatron_hybrid.inference.scheduling.step_plan import StepPlan
from megatron_hybrid.inference.weights.fingerprint import hash_of
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.sharding.gathering import num_experts_of
from megatron_hybrid.models.sharding.parallel_setup import ExpertGroups
from megatron_hybrid.models.sharding.tensor_sharding import cut_of
from megatron_hybrid.version import __version__

_OF_EACH_RANK = ("cache_bytes", "cache_dir", "rank_timeout")
"""Fields of InferenceConfig that may differ: all ranks use the smallest pool, and the first rank
that waits too long ends all."""
_COMPARED = 1 << 20
"""Elements of each piece of the weights that are compared."""
_FSDP = ("FSDPModule", "FullyShardedDataParallel", "MegatronFSDP")
"""Classes of torch and of megatron-core, or their bases."""
_OF_ALL_STAGES = ("hidden_size", "vocab_size", "params_dtype")


def what_must_be_equal(
    config: InferenceConfig, model: HybridModel, stage: int
) -> dict[str, object]:
    """Return versions and settings on which decisions depend, by name. All stages of a pipeline
    share some settings of the architecture, and the ranks of one stage share all of them."""
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
    named[f"the LoRA adapters of stage {stage}"] = repr(getattr(model, "lora_fields", None))
    if (seed := model.untouched_seed) is not None:  # pieces of one draw
        named["the seed of the random weights"] = seed
    for name, value in model.config.to_dict().items():
        if name in _OF_ALL_STAGES:
            named[f"HybridConfig.{name}"] = value
        else:  # a stage that megatron-core built lacks the sizes of layers that it does not have
            named[f"HybridConfig.{name} of stage {stage}"] = str(value)
    return named


def check_equal_weights(ranks: Ranks, model: HybridModel) -> None:
    """Compare the pieces of weights that several ranks hold, at most a million elements of each.

    Raises:
        ValueError: a piece differs. It names the first one, and all ranks raise it.
    """
    if ranks.size == 1:
        return
    pieces = dict(_pieces(model))
    holders = Counter(name for held in ranks.gather(list(pieces)) for name in held)
    ranks.require_equal(
        {
            f"the hash of {name}": f"{hash_of(piece.flatten()[:_COMPARED]):016x}"
            for name, piece in pieces.items()
            if holders[name] > 1
        }
    )


def _pieces(model: HybridModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the pieces of whole tensors that this rank holds, with names that identify them."""
    tp = model.pg_collection.tp.rank()
    experts = ExpertGroups.of(model.pg_collection)
    for name, tensor in own_tensors(model).items():
        rank = tp
        if num_experts_of(tensor) is not None:
            name, rank = f"{name} of experts {experts.part}", experts.tp.rank()
        if (cut := cut_of(tensor)) is None:
            yield name, tensor.detach()
            continue
        parts = tensor.detach().split(cut.local_sections, cut.dim)
        for (start, stop), part in zip(cut.ranges(rank), parts, strict=True):
            yield f"{name}, rows {start} to {stop} of dimension {cut.dim}", part


def refuse_fsdp(given: nn.Module | Sequence[nn.Module], model: HybridModel) -> None:
    """Raise ValueError for a model whose parameters are spread over data-parallel ranks: every
    step would gather them, from ranks that serve other requests. given: the model as wrapped."""
    outer = given[0] if isinstance(given, Sequence) else given
    classes = {kind.__name__ for module in outer.modules() for kind in type(module).__mro__}
    is_spread = any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
    if is_spread or not classes.isdisjoint(_FSDP):
        raise ValueError(
            "the model is wrapped by FSDP, which spreads its parameters over data-parallel ranks: "
            "build a second model of the same config for the engine, and send it the whole tensors "
            "after each update, with engine.load_weights((name, parameter.full_tensor()) for name, "
            "parameter in model.named_parameters()) on all ranks (docs/guides/rollouts.md)"
        )


def check_equal_decisions(ranks: Ranks, step: int, scheduler: Scheduler, plan: StepPlan) -> None:
    """Compare the queues, the plan and the cache of all ranks.

    Raises:
        RankError: the ranks differ. It names the first difference, and all ranks raise it.
    """
    everyone = ranks.gather(_parts(scheduler, plan))
    for name, lines in everyone[0].items():
        for other, theirs in enumerate(everyone):
            for own, their in zip_longest(lines, theirs[name], fillvalue="no more"):
                if own != their:
                    raise RankError(
                        f"step {step}: the ranks decided differently or compute different tokens, "
                        f"first in {name}: {ranks.members[0]} has {own}; {ranks.members[other]} "
                        f"has {their}. They must be given the same requests in the same order."
                    )


def _parts(scheduler: Scheduler, plan: StepPlan) -> dict[str, list[str]]:
    """Describe the state of a rank in lines, by the names of its parts, causes first."""
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
