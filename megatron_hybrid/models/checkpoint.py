"""Checkpoints: a folder with config.json and model.safetensors, whole and of any parallel layout.

On disk, tensors are unsharded and named as in `parameter_names`; each rank takes its pieces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_hybrid.config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.parameter_names import canonical_name, is_parameter, own_spelling
from megatron_hybrid.models.tensor_sharding import full_shape, shard, unshard

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is not one of this model. Nothing has been loaded."""


def save_checkpoint(model: HybridModel, folder: str | os.PathLike) -> None:
    """Write config.json and model.safetensors. Every rank of the model calls it, one writes.

    Files are replaced whole: a crash leaves the old ones.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    state = full_state_dict(model)
    data_parallel = getattr(model.pg_collection, "dp", None)
    if state is None or (data_parallel is not None and data_parallel.rank() != 0):
        return
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(model.config.to_dict(), indent=2) + "\n"
        _replace(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))
        _replace(folder / WEIGHTS_FILE, lambda path: save_file(state, path, {"format": "pt"}))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write a checkpoint to {folder}: {error}") from error


def full_state_dict(model: HybridModel) -> dict[str, Tensor] | None:
    """The whole model by canonical names, on the CPU of the first tensor- and pipeline-parallel
    rank; None on the others. Every rank calls it."""
    tp, pp = model.pg_collection.tp, model.pg_collection.pp
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        piece = parameter.detach().contiguous()
        pieces = [piece]
        if tp.size() > 1 and getattr(parameter, "tensor_model_parallel", False):
            pieces = [torch.empty_like(piece) for _ in range(tp.size())]
            dist.all_gather(pieces, piece, group=tp)
        if tp.rank() == 0:
            full = unshard(pieces, parameter).cpu().contiguous()
            state[canonical_name(name, model.layer_offset)] = full
    if tp.rank() != 0:
        return None
    if pp.size() == 1:
        return state
    stages = [None] * pp.size() if pp.rank() == 0 else None
    dist.gather_object(state, stages, dst=dist.get_global_rank(pp, 0), group=pp)
    if pp.rank() != 0:
        return None
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def load_checkpoint(model: HybridModel, folder: str | os.PathLike, cast: bool = False) -> None:
    """Load a folder's weights into a model, whatever its parallel layout and layer spec.

    Args:
        cast: convert floating-point dtypes that differ, rather than refuse them.

    Raises:
        CheckpointError: unreadable, or not of this model.
    """
    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; a checkpoint holds its weights there.")
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            pieces = _take_pieces(model, shapes, file.get_tensor, str(path), cast)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). It is truncated or no safetensors file; "
            "copy or save it again."
        ) from error
    _write_pieces(pieces)


def load_state(
    model: HybridModel, state: Mapping[str, Any], source: str = "state dict", cast: bool = False
) -> None:
    """Load a whole (unsharded) state dict, such as that of megatron-core's own hybrid model.

    Args:
        state: names of any layer spec and megatron-core release to tensors; extra states of
            Transformer Engine are passed over.
        source: what to call it in errors.
        cast: convert floating-point dtypes that differ, rather than refuse them.

    Raises:
        CheckpointError: not a state of this model.
    """
    shapes = {name: tuple(value.shape) for name, value in state.items() if is_parameter(name)}
    _write_pieces(_take_pieces(model, shapes, state.__getitem__, source, cast))


def read_config(folder: str | os.PathLike, **overrides: Any) -> HybridConfig:
    """The config of a checkpoint; `overrides` are fields of this run.

    Raises:
        CheckpointError: config.json is missing, unreadable or not a config.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; {folder} is no checkpoint.") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not a JSON object.")
    try:
        return HybridConfig.from_dict(values, **overrides)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is no usable config: {error}") from error


def _take_pieces(
    model: HybridModel,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    source: str,
    cast: bool,
) -> list[tuple[Tensor, Tensor]]:
    """This rank's (parameter, new value) pairs; names and shapes are checked before any is read."""
    tp = model.pg_collection.tp
    parameters = dict(model.named_parameters())
    own = own_spelling(parameters, model.layer_offset)
    given = {canonical_name(name): name for name in shapes if is_parameter(name)}
    missing = sorted(set(own) - set(given))
    if missing:
        raise CheckpointError(_listing(missing, f"not in {source}, but the model has"))
    # Other pipeline stages take the rest, so only the sole stage can tell what is too much.
    extra = sorted(set(given) - set(own)) if model.pg_collection.pp.size() == 1 else []
    if extra:
        raise CheckpointError(_listing(extra, f"in {source}, but the model does not have"))
    for name, spelling in own.items():
        expected = full_shape(parameters[spelling], tp.size())
        if shapes[given[name]] != expected:
            raise CheckpointError(
                f"{name} has shape {list(shapes[given[name]])} in {source}, but the model's config "
                f"gives it {list(expected)}. Config and weights do not belong together."
            )
    pairs = []
    for name, spelling in own.items():
        parameter, value = parameters[spelling], read(given[name])
        if value.dtype != parameter.dtype and not (cast and value.is_floating_point()):
            raise CheckpointError(
                f"{name} is {value.dtype} in {source}, but {parameter.dtype} in the model. "
                "Set params_dtype alike, or load with cast=True."
            )
        pairs.append((parameter, shard(value, parameter, tp.rank(), tp.size())))
    return pairs


def _write_pieces(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for parameter, value in pairs:
            parameter.copy_(value)


def _listing(names: list[str], relation: str) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{relation} {names[0]}{more}. The config does not describe these weights."


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what the umask allows; safetensors writes 0600
        write(temporary)
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
