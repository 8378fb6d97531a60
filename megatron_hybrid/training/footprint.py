"""The memory of a run on each of its devices, before there is a model.

Activations are counted by `count_saved_bytes`; weights, gradients and states of the optimizer by
the model's parameters. Buffers of collectives and the allocator's waste are left out.
"""

import copy
from collections import Counter
from dataclasses import dataclass

import torch

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.flops import recomputed_flops, training_flops
from megatron_hybrid.models.hybrid_model import LOSS_BYTES, HybridModel
from megatron_hybrid.models.layer_pattern import LAYER_KINDS
from megatron_hybrid.models.saved_bytes import SavedBytes, count_saved_bytes, planned_model
from megatron_hybrid.ops.dispatch import REFERENCE
from megatron_hybrid.training.data.batches import count_micro_batches
from megatron_hybrid.training.lora import add_adapters
from megatron_hybrid.training.optimizer import is_layer_matrix
from megatron_hybrid.training.recipe import Recipe
from megatron_hybrid.utils.tables import size, table


@dataclass(frozen=True)
class KindFootprint:
    """Bytes that each layer of one kind keeps of a token for the backward pass."""

    kind: str
    layers: int
    """Number of these layers in the stage."""
    saved: float
    """Bytes without recomputation."""
    kept: float
    """Bytes by the recipe; for layers that are recomputed together, without their common input."""
    backends: tuple[str, ...]
    """Backends that serve its ops with gradients."""


@dataclass(frozen=True)
class Footprint:
    """The memory of one rank, in bytes, of the pipeline stage that needs most."""

    tokens: int
    """Tokens of a micro-batch."""
    in_flight: int
    """Micro-batches between their forward and backward pass."""
    weights: int
    """Bytes of the model, of the reference of a loss that has one, and of the cache of rollouts."""
    gradients: int
    optimizer: int
    """The optimizer's states and fp32 copies of the weights."""
    activations: int
    freed: int
    """Bytes that recomputation saves, which are not in `activations`."""
    working: int
    """Bytes that a backward pass adds: the largest part that is recomputed, as if its ops had the
    gradients of plain torch, and as much again for gradients; or thrice the fp32 logits of the
    loss."""
    kinds: tuple[KindFootprint, ...]
    flops: float
    """Operations of a micro-batch: forward, backward, and recomputation."""
    passes: int
    """Micro-batches of a step, and the time in which a pipeline fills, in micro-batches."""
    tokens_per_step: int

    @property
    def total(self) -> int:
        """Sum of all these bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working

    def tokens_per_second(self, flops: float, bandwidth: float) -> float:
        """Return a bound of the job's speed: matrix products run at a device's FLOP/s, an update
        moves weights, gradients and states at its bytes/s, and collectives take no time."""
        moved = 2 * self.weights + self.gradients + 2 * self.optimizer
        return self.tokens_per_step / (self.passes * self.flops / flops + moved / bandwidth)

    def render(self, memory_bytes: int) -> str:
        """Format the footprint as tables. `memory_bytes` is the size of a device."""
        recomputed = f"{size(self.freed)} freed by recomputation" if self.freed else ""
        activations = f"activations of {self.in_flight} x {self.tokens:,} tokens"
        rows = [
            ("weights", size(self.weights), ""),
            ("gradients", size(self.gradients), ""),
            ("optimizer", size(self.optimizer), ""),
            (activations, size(self.activations), recomputed),
            ("a backward pass", size(self.working), ""),
            ("all", size(self.total), f"of {size(memory_bytes)}"),
        ]
        kinds = []
        for each in self.kinds:
            sizes = size(round(each.saved)), size(round(each.kept))
            by = ", ".join(each.backends)
            kinds.append((each.kind, str(each.layers), *sizes, by))
        heads = ("layers", "number", "a token keeps", "with recomputation", "by")
        return "\n".join([*table(("", "bytes", ""), rows), "", *table(heads, kinds)])


def footprint(recipe: Recipe, config: HybridConfig, num_ranks: int, device_type: str) -> Footprint:
    """Compute the memory that a rank of a run needs in the first or the last pipeline stage,
    whichever needs more.

    Args:
        config: that of the model.
        num_ranks: number of ranks of the job.
        device_type: type of its devices, "cuda" or "cpu".

    Raises:
        ValueError: ranks do not fit the layout or the batch, or adapters do not fit the model.
    """
    stages = {0, config.pipeline_model_parallel_size - 1}
    found = [_of_stage(recipe, config, num_ranks, stage, device_type) for stage in stages]
    return max(found, key=lambda each: each.total)


def check_fits(
    recipe: Recipe, config: HybridConfig, num_ranks: int, device_type: str, memory_bytes: int
) -> None:
    """Compute `footprint`, and raise ValueError with its table if a device has less memory."""
    found = footprint(recipe, config, num_ranks, device_type)
    if found.total > memory_bytes:
        raise ValueError(
            f"the run does not fit: a rank of {num_ranks} needs {size(found.total)}, and its device"
            f" has {size(memory_bytes)}.\n{found.render(memory_bytes)}\nUse more ranks, "
            "optimizer.distributed, a split model, model.recompute_granularity, or a smaller "
            "data.sequence_length or run.micro_batch_size."
        )


def _of_stage(
    recipe: Recipe, config: HybridConfig, num_ranks: int, stage: int, device_type: str
) -> Footprint:
    run, length = recipe.run, recipe.data.sequence_length
    rows, tokens = run.micro_batch_size, run.micro_batch_size * length
    plain, counts = copy.copy(config), []
    plain.recompute_granularity = None
    wanted = [(plain, "cpu"), (plain, device_type)]
    wanted += [(config, device_type)] * (config.recompute_granularity is not None)
    for own, kind in wanted:
        model = planned_model(own, num_ranks, stage)
        if recipe.lora is not None:
            with next(model.parameters()).fake_mode:
                add_adapters(model, recipe.lora)
        counts.append(count_saved_bytes(model, rows, length, kind))
    by_torch, saved, kept = counts[0], counts[1], counts[-1]
    groups, stages = model.pg_collection, config.pipeline_model_parallel_size
    micro_batches = count_micro_batches(run.global_batch_size, rows, groups.dp.size())
    in_flight = min(micro_batches, stages - stage)
    weights = sum(one.nbytes for one in model.parameters())
    compares = recipe.dpo is not None or (recipe.grpo is not None and recipe.grpo.beta > 0)
    if compares and recipe.lora is None:
        weights *= 2
    weights += 0 if recipe.grpo is None else recipe.grpo.cache_bytes
    names = [
        {"plain torch" if name == REFERENCE else name for _, name in own} for own in kept.served
    ]
    by = [tuple(sorted(own)) for own in names]
    layers = zip(model.decoder.layer_type_list, saved.layers, kept.layers, by)
    per_token, per_pair = training_flops(model)
    return Footprint(
        tokens,
        in_flight,
        weights,
        gradients=sum(4 * one.numel() for one in model.parameters() if one.requires_grad),
        optimizer=_optimizer_bytes(model, recipe),
        activations=kept.total * in_flight,
        freed=(saved.total - kept.total) * in_flight,
        working=_working(model, kept, saved, by_torch, tokens),
        kinds=tuple(
            KindFootprint(LAYER_KINDS[symbol].meaning, number, before / tokens, after / tokens, by)
            for (symbol, before, after, by), number in Counter(layers).items()
        ),
        flops=tokens * (per_token + recomputed_flops(model) + per_pair * length / 2),
        passes=micro_batches + stages - 1,
        tokens_per_step=run.global_batch_size * length,
    )


def _optimizer_bytes(model: HybridModel, recipe: Recipe) -> int:
    fields, groups, total = recipe.optimizer, model.pg_collection, 0.0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lean = is_layer_matrix(name, parameter) if fields.name == "muon" else fields.name == "sgd"
        group = groups.dp if getattr(parameter, "allreduce", True) else groups.expt_dp
        parts = group.size() if fields.distributed else 1
        total += 4 * (2 - lean + (parameter.dtype != torch.float32)) * parameter.numel() / parts
    return round(total)


def _working(
    model: HybridModel, kept: SavedBytes, saved: SavedBytes, by_torch: SavedBytes, tokens: int
) -> int:
    largest, first = 0, 0
    sizes = model.decoder.recomputed_layers
    for count in [*sizes, *[1] * (len(kept.layers) - sum(sizes))]:
        of_ops, again, held = (
            each.layers[first : first + count] for each in (by_torch, saved, kept)
        )
        of_one = max(op - layer for op, layer in zip(of_ops, again, strict=True))
        largest = max(largest, sum(again) - sum(held) + of_one)
        first += count
    width = -(-model.vocab_size // model.pg_collection.tp.size())
    logits = 3 * min(LOSS_BYTES, 4 * tokens * width) if model.post_process else 0
    return max(2 * largest, logits)
