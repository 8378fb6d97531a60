"""LoRA: low-rank adapters on the projections of a frozen model (`models/low_rank.py`).

They are parameters of the model, so megatron-core's data parallelism, optimizers and distributed
checkpoints treat them as such; frozen weights have neither gradients nor states.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_hybrid.checkpoints.adapter_files import (
    WEIGHTS_FILE,
    AdapterFields,
    WholeAdapter,
    read_adapters,
    splits,
    write_adapters,
)
from megatron_hybrid.checkpoints.model_tensors import merged_weight, of_all_stages, writes
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, check_numbers
from megatron_hybrid.distributed.ranks import ranks_of
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.layer_pattern import SHARED_BLOCKS
from megatron_hybrid.models.low_rank import LowRankAdapter, LowRankPart, adapters_of, projections_of
from megatron_hybrid.models.packed_weight import require_unpacked
from megatron_hybrid.models.sharding.gathering import gather_whole, own_piece, whole_shape
from megatron_hybrid.models.sharding.one_rank_group import PlannedGroup
from megatron_hybrid.training.fields import Fields
from megatron_hybrid.utils.files import digest_of_files
from megatron_hybrid.utils.validation import Range

ALL = "all-linear"


@dataclass
class LoraFields(Fields):
    """Fields of the adapters: their projections and their size."""

    rank: Annotated[int, Range(ge=1)] = 16
    """Rank of an adapter: rows of A and columns of B."""

    alpha: Annotated[float, Range(gt=0)] = 32.0
    """Factor of an adapter: the product B A is multiplied by alpha / rank."""

    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv:2312.03732)."""

    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that are dropped in training. Tensor-parallel ranks must draw
    equal numbers from torch's default generator, as they do with megatron-core's seeds."""

    targets: Annotated[Sequence[str], Range(ge=1)] = ("all-linear",)
    """Ends of the names of projections, Hugging Face's (`q_proj`) or ours (`linear_qkv`: all of its
    parts), where `*` is any text: `layers.3.*.linear_fc?`. `all-linear` names all projections."""

    seed: int = 1234
    """Seed of the initial values of A; B is initially 0."""

    def check(self) -> None:
        super().check()
        self.targets = tuple(self.targets)  # YAML has a list

    def file_fields(self) -> AdapterFields:
        """Return the fields of a folder of these adapters."""
        return AdapterFields(self.rank, self.alpha, self.dropout, self.rslora)


def add_adapters(model: HybridModel, fields: LoraFields) -> list[str]:
    """Add adapters to a model, and freeze all its other parameters. Do so before core's
    DistributedDataParallel and optimizer are made.

    Returns:
        Canonical names of the adapted projections of this pipeline stage.

    Raises:
        ValueError: a field is illegal, a target is no projection of the model, or the model cannot
            be adapted.
    """
    fields.check()
    projections = _adaptable(model)
    parts = _chosen_parts(model, fields, projections)
    _adapt(model, fields, projections, parts)
    return sorted(parts)


def _adapt(
    model: HybridModel,
    fields: LoraFields,
    projections: Mapping[str, nn.Module],
    parts: Mapping[str, list[LowRankPart]],
) -> None:
    """Add adapters of these parts, by the canonical names of their projections."""
    scale = fields.file_fields().scale()
    model.requires_grad_(False)
    for name, own in parts.items():
        projection = projections[name]
        adapter = LowRankAdapter(projection, own, scale, fields.dropout, fields.seed)
        projection.lora = adapter.train(model.training)
        projection.lora_hook = projection.register_forward_hook(_add_to_output)
    model.lora_fields = fields


def _adaptable(model: HybridModel) -> dict[str, nn.Module]:
    """Return the projections of a model, or raise ValueError if it cannot get adapters."""
    if model.pg_collection.pp.size() > 1 and set(SHARED_BLOCKS) & set(model.config.layer_pattern):
        raise ValueError("LoRA of shared blocks ('Z') is not supported on several pipeline stages.")
    if adapters_of(model):
        raise ValueError("the model has adapters already: merge them first.")
    return projections_of(model)


def merge_adapters(model: HybridModel) -> None:
    """Add the adapters to the weights and remove them. Except for rounding, the model computes the
    same, and is saved and exported as any other. Its parameters stay frozen. Call it on every
    rank.

    Raises:
        ValueError: weights are packed, or a sum is infinite in their dtype; or adapters differ
            between ranks; on all ranks, and nothing has changed.
        RankError: another rank does not call it, or the error is another rank's; likewise.
    """
    call = "merge_adapters()"
    with closing(ranks_of(model.pg_collection, what=call)) as ranks, ranks.raise_on_all(call):
        require_unpacked(model, "adapters cannot be merged")
        adapted = adapters_of(model)
        shapes = {name: whole_shape(each.lora.a) for name, each in adapted.items()}
        fields = repr(getattr(model, "lora_fields", None))
        ranks.require_equal({"the adapters' fields": fields, **shapes})
        for name, projection in adapted.items():  # before the first one is written
            merged_weight(name, projection)
    with torch.no_grad():
        for name, projection in adapted.items():
            projection.weight.copy_(merged_weight(name, projection))
            projection.lora_hook.remove()
            del projection.lora, projection.lora_hook
    model.lora_fields = None
    model.num_weight_changes += 1


def save_adapters(model: HybridModel, folder: str | os.PathLike, base: str | None = None) -> None:
    """Write the adapters alone, in PEFT's format, for any layout. Call it on every rank of the
    model; one writes.

    Args:
        base: the folder of the model, or its name, which is noted for users who load both.

    Raises:
        ValueError: the model has no adapters.
    """
    adapted, groups = adapters_of(model), model.pg_collection
    if getattr(model, "lora_fields", None) is None:
        raise ValueError("the model has no adapters to save: see add_adapters.")
    own: dict[str, WholeAdapter] = {}
    for name, projection in adapted.items():
        adapter = projection.lora
        a, b = (gather_whole(name, each, groups)[name].cpu() for each in (adapter.a, adapter.b))
        own[name] = WholeAdapter(a, b, adapter.parts)
    adapters = of_all_stages(model, own)
    names = of_all_stages(model, dict.fromkeys(projections_of(model)))
    if groups.tp.rank() == groups.pp.rank() == 0 and writes(model):
        fields = model.lora_fields.file_fields()
        write_adapters(folder, model.config, fields, adapters, names, base)


def load_adapters(model: HybridModel, folder: str | os.PathLike) -> None:
    """Add the adapters of a folder in PEFT's format to a model in any layout, and freeze all its
    other parameters. Call it on every rank.

    Raises:
        CheckpointError: they cannot be read, are of another model, or differ between the ranks; on
            all ranks, and nothing has changed.
        ValueError: as `add_adapters`; likewise.
        RankError: another rank does not call it, or the error is another rank's; likewise.
    """
    call = "load_adapters()"
    with closing(ranks_of(model.pg_collection, what=call)) as ranks, ranks.raise_on_all(call):
        had = repr(getattr(model, "lora_fields", None))
        projections = _adaptable(model)
        shapes = {name: whole_shape(each.weight) for name, each in projections.items()}
        read, whole = read_adapters(folder, model.config, of_all_stages(model, shapes))
        for name, adapter in whole.items():
            for tensor in (adapter.a, adapter.b):
                check_numbers(f"the adapter of {name}", tensor, folder, model.config.params_dtype)
        said = {"the adapters that the model has": had, "the adapters' fields": repr(read)}
        said["the adapters"] = digest_of_files([Path(folder) / WEIGHTS_FILE])
        try:
            ranks.require_equal(said)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
    names = read.targets or (ALL,)
    fields = LoraFields(read.rank, read.alpha, read.use_rslora, read.dropout, names)
    own = {name: whole[name].parts for name in projections if name in whole}
    _adapt(model, fields, projections, own)
    with torch.no_grad():
        for name in own:
            parameters = projections[name].lora.parameters()
            for to, tensor in zip(parameters, (whole[name].a, whole[name].b)):
                to.copy_(own_piece(tensor, to, model.pg_collection))


def _chosen_parts(
    model: HybridModel, fields: LoraFields, projections: Mapping[str, nn.Module]
) -> dict[str, list[LowRankPart]]:
    """Return the parts of projections of this stage that `fields` names. Each target must name a
    projection of some stage."""
    targets = list(fields.targets)
    found, chosen, ends = set(), {}, set()
    for name, split in splits(model.config, projections).items():
        rows = split.rows(whole_shape(projections[name].weight)[0])
        ends |= {each.rpartition(".")[2] for each in (name, *split.names)}
        for part, own_rows in zip(split.names, rows):
            matches = {target for target in targets if _is_meant(target, name, part)}
            found |= matches
            if matches:
                chosen.setdefault(name, []).append(LowRankPart(part, fields.rank, own_rows))
    stages = [(found, ends)]
    if (pp := model.pg_collection.pp).size() > 1:
        if isinstance(pp, PlannedGroup):  # the other stages are not there
            return chosen
        stages *= pp.size()
        dist.all_gather_object(stages, (found, ends), group=pp)
    if missing := set(targets).difference(*(each for each, _ in stages)):
        known = ", ".join(sorted(set().union(*(each for _, each in stages))))
        raise ValueError(
            f"targets {sorted(missing)} name no projection of the model, which has {known}."
        )
    return chosen


def _is_meant(target: str, *names: str) -> bool:
    return target == ALL or any(fnmatchcase(f".{name}", f"*.{target}") for name in names)


def _add_to_output(projection: nn.Module, inputs: tuple, output: Any) -> Any:
    if not projection.lora.is_on:
        return output
    added = projection.lora(inputs[0])
    return output + added if isinstance(output, Tensor) else (output[0] + added, output[1])
