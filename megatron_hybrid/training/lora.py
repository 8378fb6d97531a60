"""LoRA: low-rank adapters on the projections of a frozen model (Hu et al. 2021, arXiv:2106.09685).

An adapted projection computes `W x + alpha / rank * B A x`. Adapters are cut over tensor-parallel
ranks as their projection is: B of one that is cut by output row, A of one that is cut by input
column. They are parameters of the model, so megatron-core's data parallelism, optimizers and
distributed checkpoints treat them as such; frozen weights have neither gradients nor states.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megatron_hybrid.checkpoints.folder import FLOATS
from megatron_hybrid.checkpoints.model_tensors import of_all_stages, writes
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, check_numbers
from megatron_hybrid.distributed.ranks import ranks_of
from megatron_hybrid.inference.weights.fingerprint import sample_hash
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.packed_weight import require_unpacked
from megatron_hybrid.models.sharding.collectives import (
    gather_rows,
    sum_and_split_rows,
    sum_gradient_of_copies,
)
from megatron_hybrid.models.sharding.gathering import gather_whole, own_piece, whole_shape
from megatron_hybrid.models.sharding.tensor_sharding import (
    copy_marks,
    cut_of,
    full_shape,
    shard,
)
from megatron_hybrid.training.fields import Fields
from megatron_hybrid.utils.files import replace_file
from megatron_hybrid.utils.validation import Range

WEIGHTS_FILE, FIELDS_FILE = "adapters.safetensors", "adapters.json"
TARGETS = ("in_proj", "out_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class LoraFields(Fields):
    """Fields of the adapters: their projections and their size."""

    rank: Annotated[int, Range(ge=1)] = 16
    """Rank of an adapter: rows of A and columns of B."""

    alpha: Annotated[float, Range(gt=0)] = 32.0
    """Factor of an adapter: the product B A is multiplied by alpha / rank."""

    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that are dropped in training. Tensor-parallel ranks must draw
    equal numbers from torch's default generator, as they do with megatron-core's seeds."""

    targets: Annotated[Sequence[str], Range(ge=1)] = field(default_factory=lambda: list(TARGETS))
    """Ends of the names of projections, where `*` stands for any text: `in_proj`,
    `layers.3.*.linear_fc?`."""

    seed: int = 1234
    """Seed of the initial values of A; B is initially 0."""


class LowRankAdapter(nn.Module):
    """Computes what an adapter adds to the output of a projection.

    Args:
        projection: of core, cut by output row or by input column.
        name: its canonical name, which the first values depend on.
    """

    def __init__(self, projection: nn.Module, name: str, fields: LoraFields):
        super().__init__()
        self.by_column = isinstance(projection, RowParallelLinear)
        self.group, self.splits_rows = projection.tp_group, projection.sequence_parallel
        self.scale, self.dropout = fields.alpha / fields.rank, fields.dropout
        self.is_on = True  # else the projection computes as its base
        weight = projection.weight
        input_size = full_shape(weight)[1]
        drawn = torch.Generator().manual_seed(zlib.crc32(f"{fields.seed} {name}".encode()))
        whole = torch.rand(fields.rank, input_size, generator=drawn) * 2 - 1
        like = {"dtype": weight.dtype, "device": weight.device}
        self.a = nn.Parameter(torch.empty(fields.rank, weight.shape[1], **like))
        self.b = nn.Parameter(torch.zeros(weight.shape[0], fields.rank, **like))
        cut_part, other = (self.a, self.b) if self.by_column else (self.b, self.a)
        copy_marks(weight, cut_part)
        # core's `finalize_model_grads` sums what each rank's rows give to it.
        other.sequence_parallel = self.splits_rows
        if cut_of(self.b) is not None:
            sum_gradient_of_copies(self.b, self.group)
        with torch.no_grad():
            self.a.copy_(shard(whole / math.sqrt(input_size), self.a, self.group.rank()))

    def forward(self, x: Tensor) -> Tensor:
        """The projection's input [..., in] -> what to add to its output [..., out]."""
        low = F.linear(F.dropout(x, self.dropout, self.training), self.a)
        if self.group.size() > 1 and self.by_column:
            if self.splits_rows:
                low = sum_and_split_rows(low, self.group)
            else:
                low = reduce_from_tensor_model_parallel_region(low, self.group)
        elif self.group.size() > 1:
            if self.splits_rows:
                low = gather_rows(low, self.group)
            else:
                low = copy_to_tensor_model_parallel_region(low, self.group)
        return F.linear(low, self.b) * self.scale

    def product(self) -> Tensor:
        """B A as it counts, [out, in] of this rank's weight, fp32."""
        return self.b.float() @ self.a.float() * self.scale


def add_adapters(model: HybridModel, fields: LoraFields) -> list[str]:
    """Add adapters to a model, and freeze all its other parameters. Do so before core's
    DistributedDataParallel and optimizer are made.

    Returns:
        Canonical names of the adapted projections of this pipeline stage.

    Raises:
        ValueError: a field, a target that is no projection of the model, or a model that cannot be
            adapted.
    """
    fields.check()
    if any(type(each).__name__.startswith("TELayerNorm") for each in model.modules()):
        raise ValueError(
            "LoRA needs layer_spec='local': projections of Transformer Engine include a norm, of "
            "which adapters would need the output."
        )
    if model.pg_collection.pp.size() > 1 and "Z" in model.config.layer_pattern:
        raise ValueError("LoRA of shared blocks ('Z') is not supported on several pipeline stages.")
    if adapters_of(model):
        raise ValueError("the model has adapters already: merge them first.")
    projections = {
        model.canonical_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
        and name != "output_layer"
        and not name.endswith("linear_kv_up_proj")  # its weight serves without it, absorbed
    }
    chosen = {
        target: [name for name in projections if fnmatchcase(f".{name}", f"*.{target}")]
        for target in fields.targets
    }
    _check_targets(model, chosen, projections)
    model.requires_grad_(False)
    names = sorted({name for matches in chosen.values() for name in matches})
    for name in names:
        projection = projections[name]
        projection.lora = LowRankAdapter(projection, name, fields).train(model.training)
        projection.lora_hook = projection.register_forward_hook(_add_to_output)
    model.lora_fields = fields
    return names


def adapters_of(model: HybridModel) -> dict[str, nn.Module]:
    """The adapted projections of this pipeline stage, by canonical name."""
    return {
        model.canonical_name(name): module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "lora", None), LowRankAdapter)
    }


def merge_adapters(model: HybridModel) -> None:
    """Add the adapters to the weights and remove them: the model computes the same but for
    rounding, and is saved and exported as any other. Its parameters stay frozen. Call it on every
    rank.

    Raises:
        ValueError: weights are packed, or a sum is infinite in their dtype; or adapters differ
            between ranks; on all ranks, and nothing has changed.
        RankError: another rank does not call it, or the error is another rank's; likewise.
    """
    with _agreeing(model, "merge_adapters()") as require_equal:
        require_unpacked(model, "adapters cannot be merged")
        shapes = {n: whole_shape(p) for n, p in _parameters(adapters_of(model)).items()}
        require_equal({"the adapters' fields": _fields_of(model), **shapes})
        for name, projection in adapters_of(model).items():
            dtype = projection.weight.dtype
            if not bool(_merged(projection).to(dtype).isfinite().all()):
                raise ValueError(
                    f"{name}.weight with its adapter has NaN or infinite numbers in {dtype}, which "
                    f"ends at {torch.finfo(dtype).max:g}: load the model in torch.bfloat16 or "
                    "torch.float32, whose numbers are larger."
                )
    with torch.no_grad():
        for projection in adapters_of(model).values():
            projection.weight.copy_(_merged(projection))
    _remove_adapters(model)
    model.num_weight_changes += 1


@torch.no_grad()
def _merged(projection: nn.Module) -> Tensor:
    """Return the weight with its adapter, fp32. It is made twice: all are checked before the first
    one is written."""
    return projection.weight.float() + projection.lora.product()


def _remove_adapters(model: HybridModel) -> None:
    for projection in adapters_of(model).values():
        projection.lora_hook.remove()
        del projection.lora, projection.lora_hook
    model.lora_fields = None


def save_adapters(model: HybridModel, folder: str | os.PathLike) -> None:
    """Write the adapters alone, whole, for any layout. Call it on every rank of the model; one
    writes.

    Raises:
        ValueError: the model has none.
    """
    adapted, groups = adapters_of(model), model.pg_collection
    if getattr(model, "lora_fields", None) is None:
        raise ValueError("the model has no adapters to save: see add_adapters.")
    own: dict[str, Tensor] = {}
    for name, parameter in _parameters(adapted).items():
        own.update(gather_whole(name, parameter, groups))
    stages = [own]
    if groups.pp.size() > 1:
        stages = [{}] * groups.pp.size()
        dist.all_gather_object(stages, {n: t.cpu() for n, t in own.items()}, group=groups.pp)
    if groups.tp.rank() or groups.pp.rank() or not writes(model):
        return
    state = {name: value.cpu().contiguous() for each in stages for name, value in each.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = json.dumps({**asdict(model.lora_fields), "targets": list(model.lora_fields.targets)})
    replace_file(folder / WEIGHTS_FILE, lambda path: save_file(state, path))
    replace_file(folder / FIELDS_FILE, lambda path: path.write_text(fields + "\n", "utf-8"))


def load_adapters(model: HybridModel, folder: str | os.PathLike) -> None:
    """Add the adapters of `save_adapters` to a model in any layout. Call it on every rank.

    Raises:
        CheckpointError: they cannot be read, are of another model, or differ between the ranks; on
            all ranks, and nothing has changed.
        ValueError: as `add_adapters`; likewise.
        RankError: another rank does not call it, or the error is another rank's; likewise.
    """
    folder = Path(folder)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    had = _fields_of(model)
    try:
        with _agreeing(model, "load_adapters()") as require_equal:
            fields, state = _read(folder)
            said = {"the adapters that the model has": had, "the adapters' fields": repr(fields)}
            for name, tensor in sorted(state.items()):
                values = f"{sample_hash(tensor):016x}"
                said[f"tensor {len(said) - 1} of the adapters"] = name, str(tensor.dtype), values
            require_equal({**said, "the number of adapters' tensors": len(state)})
            add_adapters(model, fields)
            parameters = _parameters(adapters_of(model))
            known = of_all_stages(model, parameters.fromkeys(parameters))
            _check_tensors(folder, state, parameters, known)
    except BaseException:
        if not had and getattr(model, "lora_fields", None) is not None:
            _remove_adapters(model)
            for parameter in trained:
                parameter.requires_grad_(True)
        raise
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(own_piece(state[name], parameter, model.pg_collection))


@contextmanager
def _agreeing(model: HybridModel, call: str) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """Context of a call that all ranks of a model make, before it changes anything: it raises on
    all of them if it raises on one.

    Yields a function that raises CheckpointError if a value differs between ranks, by name.

    Raises:
        RankError: a rank does not make this call, or it raised there.
    """
    with closing(ranks_of(model.pg_collection, what=call)) as ranks, ranks.raise_on_all(call):

        def require_equal(named: Mapping[str, object]) -> None:
            try:
                ranks.require_equal(dict(named))
            except ValueError as error:
                raise CheckpointError(str(error)) from error

        yield require_equal


def _fields_of(model: HybridModel) -> str:
    """Describe the adapters that a model has; empty: it has none."""
    fields = getattr(model, "lora_fields", None)
    return "" if fields is None else repr(fields)


def _read(folder: Path) -> tuple[LoraFields, dict[str, Tensor]]:
    try:
        text = (folder / FIELDS_FILE).read_text(encoding="utf-8")
        return LoraFields(**json.loads(text)), load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} has no adapters to read: {error}") from error


def _check_tensors(
    folder: Path,
    state: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    known: Mapping[str, object],
) -> None:
    """Raise CheckpointError if these are no values of the adapters. parameters: of this rank.
    known: names of all."""
    if extra := sorted(state.keys() - known.keys()):
        raise CheckpointError(
            f"{folder} holds {extra[0]}, which the model lacks: these adapters are of another "
            "model."
        )
    for name, tensor in state.items():
        if tensor.dtype not in FLOATS or not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype}, or has NaN or infinite values: an adapter "
                "has finite floating-point values."
            )
    for name, parameter in parameters.items():
        expected = whole_shape(parameter)
        if name not in state or tuple(state[name].shape) != expected:
            found = f"has {list(state[name].shape)}" if name in state else "is missing"
            raise CheckpointError(
                f"{folder}: {name} {found}, the model's is {list(expected)}: these adapters are "
                "of another model."
            )
        check_numbers(name, state[name], folder, parameter.dtype)


def _parameters(adapted: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.lora.{which}": parameter
        for name, projection in adapted.items()
        for which, parameter in projection.lora.named_parameters()
    }


def _check_targets(
    model: HybridModel, chosen: dict[str, list[str]], projections: dict[str, nn.Module]
) -> None:
    """All pipeline stages together must have something for each target."""
    own = {target for target, names in chosen.items() if names}
    ends = {name.rpartition(".")[2] for name in projections}
    stages = [(own, ends)]
    if model.pg_collection.pp.size() > 1:
        stages *= model.pg_collection.pp.size()
        dist.all_gather_object(stages, (own, ends), group=model.pg_collection.pp)
    found = set().union(*(each for each, _ in stages))
    # The defaults are for all layer kinds.
    missing = [target for target in chosen if target not in (*found, *(TARGETS if found else ()))]
    if missing:
        known = ", ".join(sorted(set().union(*(each for _, each in stages))))
        raise ValueError(f"targets {missing} name no projection of the model, which has {known}.")


def _add_to_output(projection: nn.Module, inputs: tuple, output: tuple) -> tuple:
    if not projection.lora.is_on:
        return output
    result, bias = output
    return result + projection.lora(inputs[0]), bias
