"""Checkpoints: folders with config.json and safetensors, for any parallel layout.

On disk, tensors are unsharded and named as in `parameter_names`; each rank takes its pieces. A
Hugging Face folder differs only in names and layouts, which an adapter maps to ours.
"""

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_hybrid.checkpoints.folder import (
    CONFIG_FILE,
    CheckpointFolder,
    adapter_of,
    huggingface_config,
)
from megatron_hybrid.checkpoints.found_tensors import find_tensors
from megatron_hybrid.checkpoints.model_tensors import full_state_dict, names_of_all_stages, writes
from megatron_hybrid.checkpoints.packed_maps import PackedSource
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, TensorPlan, write_tensors
from megatron_hybrid.checkpoints.tensor_source import checked_maps, copy_tensors
from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import NO_MEMORY, HybridModel
from megatron_hybrid.utils.files import write_json
from megatron_hybrid.utils.other_names import names_arguments

logger = logging.getLogger(__name__)


@names_arguments()
def save_checkpoint(model: HybridModel, folder: str | os.PathLike[str]) -> None:
    """Write config.json and the weights, adapters (LoRA) added to them; `save_adapters` writes
    these alone. Call it on every rank of the model; one writes.

    Raises:
        ValueError: adapters cannot be merged into these weights.
        CheckpointError: the folder cannot be written.
    """
    state = full_state_dict(model)
    if state is not None and writes(model):
        _write(folder, model.config.to_dict(), state)


@names_arguments()
def save_huggingface(model: HybridModel, folder: str | os.PathLike[str]) -> None:
    """Write a folder for transformers: the model's original config.json, and the weights under
    Hugging Face's names. Call it on every rank of the model; one writes.

    Raises:
        CheckpointError: the model was not loaded from such a folder, differs from its config.json,
            or the folder cannot be written.
    """
    hf = model.config.huggingface_config
    if hf is None:
        raise CheckpointError(
            "the model has no huggingface_config, which a Hugging Face folder is written from: it "
            "was not loaded from one. Use save_checkpoint."
        )
    if model.packed_source is not None and model.packed_source.is_ours:
        raise CheckpointError(
            "the model has packed weights and was loaded from a checkpoint of ours, which does not "
            "hold how its Hugging Face folder lays them out. Load it from that folder."
        )
    adapter = adapter_of(model.config)
    expected = huggingface_config(hf, "huggingface_config")
    for name in model.config.differences(expected):
        raise CheckpointError(
            f"the model has {name}={getattr(model.config, name)!r}, but its config.json says "
            f"{getattr(expected, name)!r}. Load it without overriding {name}."
        )
    state = full_state_dict(model)
    if state is None or not writes(model):
        return
    packed = model.packed_source or PackedSource({}, {})
    config = model.config
    found = (adapter.as_found(m, config, packed.shapes) for m in adapter.tensors(config))
    theirs = {adapter.text_name(name): tensor for name, tensor in packed.kept.items()}
    for tensor_map in packed.expand_maps(found):
        values = tensor_map.layout.to_theirs([state[name] for name in tensor_map.ours])
        for name, value in zip(tensor_map.theirs, values, strict=True):
            written = packed.to_file_tensors(name, value)
            theirs |= {adapter.text_name(name): value for name, value in written.items()}
    for name, original in adapter.copies(model.config).items():
        if original in theirs:  # else packed, and among `kept`
            theirs[name] = theirs[original]
    if adapter.prediction_layers(hf, None) and not model.config.pattern.predictions:
        logger.warning(
            "%s has no MTP head, which its config.json announces. If the "
            "folder that it came from has one, load that with mtp=True, on one pipeline stage",
            folder,
        )
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    _write(folder, {**hf, "dtype": dtype}, theirs)


def _write(
    folder: str | os.PathLike[str], config: Mapping[str, Any], state: dict[str, Tensor]
) -> None:
    folder = Path(folder)
    plan = [TensorPlan(name, tuple(value.shape), value.dtype) for name, value in state.items()]
    ready = partial(write_json, folder / CONFIG_FILE, config)
    write_tensors(folder, plan, state.__getitem__, ready=ready)


def read_config(folder: str | os.PathLike[str], mtp: bool = True, **overrides: Any) -> HybridConfig:
    """Read the config of a checkpoint: `CheckpointFolder.config`.

    Raises:
        CheckpointError: config.json is missing, unreadable or not a config, or the weights are
            quantized in a format that is not read.
        ValueError, TypeError: an override is not possible.
    """
    found = CheckpointFolder(folder)
    found.check_quantization()
    return found.config(mtp, **overrides)


def load_checkpoint(
    model: HybridModel, folder: str | os.PathLike[str] | CheckpointFolder, cast: bool = False
) -> None:
    """Load a folder's weights into a model of any parallel layout and layer spec.

    Args:
        folder: one of ours, or the Hugging Face folder of `model.config`.
        cast: round floating-point values to a lower-precision dtype; else refuse them. Even without
            it, fp32 tensors of a Hugging Face folder whose word embedding is in the model's dtype
            are rounded, as in transformers, except those that the model keeps in fp32.

    Raises:
        CheckpointError: unreadable, or not of this model; on all ranks, if one of them finds it so,
            before the first of them writes.
    """
    names = names_of_all_stages(model)
    with ExitStack() as stack:
        with fail_together(CheckpointError, groups=model.pg_collection):
            if not model.has_memory:
                raise CheckpointError(NO_MEMORY)
            if not isinstance(folder, CheckpointFolder):
                folder = CheckpointFolder(folder)
            write = stack.enter_context(checked_load(model, folder, names, cast))
        with fail_together(CheckpointError, groups=model.pg_collection):
            write()


@contextmanager
def checked_load(
    model: HybridModel,
    folder: CheckpointFolder,
    names: Collection[str],
    cast: bool = False,
    keeps_packing: bool = False,
) -> Iterator[Callable[[], None]]:
    """Run `load_checkpoint` on this rank alone, in two steps: all is checked, and the context is
    the function that writes. An error inside puts back the parameters that were replaced. A model
    without memory can be checked, and not written.

    Args:
        names: `names_of_all_stages`.
        keeps_packing: refuse a folder that is not packed as the model is; no parameter is replaced.

    Raises:
        CheckpointError: unreadable, or not of this model.
    """
    found = find_tensors(model, folder, names)
    with found.packed.install(model, found.maps, str(folder.path), keeps_packing):
        source = found.source(cast)
        maps = checked_maps(model, found.packed.expand_maps(found.maps), source)
        found.check_numbers(model, maps, source)

        yield partial(copy_tensors, model, maps, source)
