"""Checkpoints: folders with config.json and safetensors, for any parallel layout.

On disk, tensors are unsharded and named as in `parameter_names`; each rank takes its pieces. A
Hugging Face folder differs only in names and layouts, which an adapter maps to ours.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hybrid.checkpoints.huggingface import adapters
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.fields import check_general_keys
from megatron_hybrid.checkpoints.packed_files import PackedFiles
from megatron_hybrid.checkpoints.packed_maps import PackedSource, own_source
from megatron_hybrid.checkpoints.progress import progress
from megatron_hybrid.checkpoints.quantization_config import Quantization, modelopt_config
from megatron_hybrid.checkpoints.tensor_files import (
    CheckpointError,
    TensorFiles,
    TensorPlan,
    check_numbers,
    write_tensors,
)
from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.distributed.rendezvous import exchange, own_member
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.layer_pattern import (
    PREDICTION_BOUNDARY,
    prediction_symbols,
    split_predictions,
)
from megatron_hybrid.models.packed_weight import PackedWeight
from megatron_hybrid.models.parameter_names import (
    canonical_name,
    is_of_prediction,
    is_parameter,
    stack_experts,
)
from megatron_hybrid.models.sharding.gathering import gather_whole, own_piece, whole_shape
from megatron_hybrid.models.sharding.stage_copies import EMBEDDING
from megatron_hybrid.utils.files import replace_file

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"

HEAD = "lm_head.weight"  # theirs, in every architecture
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def save_checkpoint(model: HybridModel, folder: str | os.PathLike[str]) -> None:
    """Write config.json and the weights. Call it on every rank of the model; one writes.

    Raises:
        ValueError: the model has adapters (LoRA), for which there is no place in such a folder.
        CheckpointError: the folder cannot be written.
    """
    if getattr(model, "lora_fields", None) is not None:
        raise ValueError(
            "the model has adapters (LoRA), which a checkpoint of the model cannot hold. Call "
            "merge_adapters first; save_adapters writes them alone."
        )
    state = full_state_dict(model)
    if state is not None and writes(model):
        _write(folder, model.config.to_dict(), state)


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
    adapter = _adapter(hf, "huggingface_config")
    expected = _huggingface_config(hf, "huggingface_config")
    for name in model.config.differences(expected):
        raise CheckpointError(
            f"the model has {name}={getattr(model.config, name)!r}, but its config.json says "
            f"{getattr(expected, name)!r}. Load it without overriding {name}."
        )
    state = full_state_dict(model)
    if state is None or not writes(model):
        return
    theirs: dict[str, Tensor] = {}
    maps: Iterable[TensorMap] = adapter.tensors(model.config)
    packed = model.packed_source
    if packed is not None:
        maps = packed.maps(adapter.as_found(m, model.config, packed.shapes) for m in maps)
        theirs |= {adapter.text_name(name): tensor for name, tensor in packed.kept.items()}
    for tensor_map in maps:
        values = tensor_map.layout.to_theirs([state[name] for name in tensor_map.ours])
        for name, value in zip(tensor_map.theirs, values, strict=True):
            written = {name: value} if packed is None else packed.written(name, value)
            theirs |= {adapter.text_name(name): value for name, value in written.items()}
    for name, original in adapter.copies(model.config).items():
        if original in theirs:  # else packed, and among `kept`
            theirs[name] = theirs[original]
    if adapter.prediction_layers(hf, None) and not prediction_symbols(model.config.layer_pattern):
        logger.warning(
            "%s has no part for multi-token prediction, which its config.json announces. If the "
            "folder that it came from has one, load that with mtp=True, on one pipeline stage",
            folder,
        )
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    _write(folder, {**hf, "dtype": dtype}, theirs)


def writes(model: HybridModel) -> bool:
    """Whether this rank, of those with the model's first part, writes it."""
    data_parallel = getattr(model.pg_collection, "dp", None)
    return data_parallel is None or data_parallel.rank() == 0


def _write(
    folder: str | os.PathLike[str], config: Mapping[str, Any], state: dict[str, Tensor]
) -> None:
    folder = Path(folder)
    text = json.dumps(config, indent=2) + "\n"
    plan = [TensorPlan(name, tuple(value.shape), value.dtype) for name, value in state.items()]

    def replace_config() -> None:
        path = folder / CONFIG_FILE
        replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))

    write_tensors(folder, plan, state.__getitem__, ready=replace_config)


def full_state_dict(model: HybridModel) -> dict[str, Tensor] | None:
    """Gather the unsharded tensors by canonical names, on the CPU of the first tensor- and
    pipeline-parallel rank; None on the others. Call it on every rank.

    Tensors that the model keeps in fp32 but that were loaded in its lower-precision dtype are
    converted back to this dtype, unless that would round a changed value."""
    tp, pp = model.pg_collection.tp, model.pg_collection.pp
    state: dict[str, Tensor] = {}
    for own_name, tensor in own_tensors(model).items():
        parts = gather_whole(own_name, tensor, model.pg_collection)
        for name, part in parts.items() if tp.rank() == 0 else ():
            whole = part.cpu().contiguous()
            dtype = model.config.params_dtype
            if whole.dtype != dtype == getattr(tensor, "loaded_dtype", None):
                narrow = whole.to(dtype)
                whole = narrow if torch.equal(narrow.to(whole.dtype), whole) else whole
            state[name] = whole
    if tp.rank() != 0:
        return None
    state = stack_experts(state)
    if pp.size() == 1:
        return state
    stages = [None] * pp.size() if pp.rank() == 0 else None
    # As bytes: torch does not read pickled floats of 8 bits.
    sent = {name: (t.dtype, t.view(_bytes_like(t))) for name, t in state.items()}
    dist.gather_object(sent, stages, dst=dist.get_global_rank(pp, 0), group=pp)
    if pp.rank() != 0:
        return None
    return {name: t.view(dtype) for stage in stages for name, (dtype, t) in stage.items()}


def _bytes_like(tensor: Tensor) -> torch.dtype:
    return torch.uint8 if tensor.element_size() == 1 else tensor.dtype


def load_checkpoint(model: HybridModel, folder: str | os.PathLike[str], cast: bool = False) -> None:
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
            write = stack.enter_context(checked_load(model, Path(folder), names, cast))
        with fail_together(CheckpointError, groups=model.pg_collection):
            write()


@contextmanager
def checked_load(
    model: HybridModel,
    folder: Path,
    names: Collection[str],
    cast: bool = False,
    keeps_packing: bool = False,
) -> Iterator[Callable[[], None]]:
    """`load_checkpoint` on this rank alone, in two steps: all is checked, and the context is the
    function that writes. An error inside puts back the parameters that were replaced.

    Args:
        names: `names_of_all_stages`.
        keeps_packing: refuse a folder that is not packed as the model is; no parameter is replaced.

    Raises:
        CheckpointError: unreadable, or not of this model.
    """
    values = read_values(folder / CONFIG_FILE)
    with TensorFiles.open(folder) as files:
        found = find_tensors(model, folder, files, values, names)
        rounded = FLOATS if cast else (torch.float32,) if found.is_mixed else ()
        with found.packed.pack(model, found.maps, str(folder), keeps_packing):
            maps = list(found.packed.maps(found.maps))
            source = _source_of(found.packed, str(folder), found.given, files)
            checked = _checked_maps(model, maps, source, rounded)
            _check_numbers(model, checked, found, files)

            yield partial(_copy_tensors, model, checked, source)


def pack_as_in(model: HybridModel, folder: str | os.PathLike[str]) -> None:
    """Pack the weights that are packed in a folder. They get no values; a model on the meta device
    has the sizes of the loaded one then.

    Raises:
        CheckpointError: unreadable, or not of this model.
    """
    folder = Path(folder)
    values = read_values(folder / CONFIG_FILE)
    with TensorFiles.open(folder) as files:
        found = find_tensors(model, folder, files, values)
        with found.packed.pack(model, found.maps, str(folder)):
            pass


@dataclass(frozen=True)
class FoundTensors:
    """What a folder has for a model."""

    maps: list[TensorMap]
    """Of weights, unpacked."""
    given: dict[str, str]
    """Names in the maps -> names in the files."""
    packed: PackedSource
    is_mixed: bool
    """Whether values in fp32 are rounded, as the word embedding is in the model's dtype."""


def find_tensors(
    model: HybridModel,
    folder: Path,
    files: TensorFiles,
    values: Mapping[str, Any],
    names: Collection[str] | None = None,
) -> FoundTensors:
    """Find what the files of a folder hold for a model, which may be on the meta device.

    Args:
        values: of its config.json (`read_values`).
        names: `names_of_all_stages`; None: the model is whole.

    Raises:
        CheckpointError: unreadable, or not of this model.
    """
    config = model.config
    if not _is_huggingface(values):
        given = {canonical_name(name): name for name in files.names()}
        if not prediction_symbols(config.layer_pattern):
            given = {name: own for name, own in given.items() if not is_of_prediction(name)}
        packed, packed_maps = own_source(
            given, lambda name: files.shape(given[name]), lambda name: files.dtype(given[name])
        )
        of_packed = {name for m in packed_maps for name in m.ours}
        names = own_weights(model) if names is None else names
        maps = [*packed_maps, *_identity(name for name in names if name not in of_packed)]
        check_names(maps, given.keys() - packed.part_names() | packed.stored.keys(), str(folder))
        return FoundTensors(maps, given, packed, False)
    adapter = _adapter(values, str(folder / CONFIG_FILE))
    weights = PackedFiles(files, quantization(values))
    given = {adapter.text_name(name): name for name in weights.names()}
    copies = [
        (name, original, "multi-token prediction", given[name], given[original])
        for name, original in adapter.copies(config).items()
        if given.keys() >= {name, original}
    ]
    for name in adapter.ignored_names(given, config):
        del given[name]
    shapes = {name: weights.shape(file_name) for name, file_name in given.items()}
    maps = [adapter.as_found(m, config, shapes) for m in adapter.tensors(config)]
    embedding = next(m.theirs[0] for m in maps if m.ours == (EMBEDDING,))
    is_tied = config.share_embeddings_and_output_weights
    if is_tied and HEAD in given:
        head = given.pop(HEAD)  # the tied tensor may be stored under this name alone
        if head != given.setdefault(embedding, head):
            copies.append((HEAD, embedding, "tie_word_embeddings", head, given[embedding]))
    check_names(maps, given, str(folder))
    packed = _packed_source(weights, given, shapes, adapter, config)
    heads = [(name, file_name) for name, _, _, file_name, _ in copies if name == HEAD]
    for name, file_name in [(embedding, given[embedding]), *heads]:
        if file_name in weights.stored:
            raise CheckpointError(
                f"{name} is packed in {folder}, but the word embedding is looked up row by row"
                f"{', and both are one (tie_word_embeddings)' if name == HEAD else ''}. Dequantize "
                "it with the library that packed it."
            )
    for name, original, why, *file_names in copies:
        if not weights.stored.keys() & set(file_names) and not torch.equal(
            *map(files.read, file_names)
        ):
            raise CheckpointError(
                f"{name} differs from {original} in {folder}, but they are one in the model "
                f"({why}). Config and weights do not belong together."
            )
    is_mixed = files.dtype(given[embedding]) == config.params_dtype
    return FoundTensors(maps, given, packed, is_mixed)


def _packed_source(
    weights: PackedFiles,
    given: Mapping[str, str],
    shapes: dict[str, tuple[int, ...]],
    adapter: Adapter,
    config: HybridConfig,
) -> PackedSource:
    """The packed ones of the weights of a folder. given: their names in it, by those that they have
    in one of the text model alone; shapes: unpacked, by the same."""
    stored = {
        name: weights.stored[file_name]
        for name, file_name in given.items()
        if file_name in weights.stored
    }
    names = {adapter.text_name(name): name for name in weights.kept}
    for name in adapter.ignored_names(names, config):
        del names[name]
    kept = {file_name: weights.files.read(file_name).clone() for file_name in names.values()}
    return PackedSource(stored, shapes, kept)


def _source_of(
    packed: PackedSource, folder: str, given: dict[str, str], files: TensorFiles
) -> TensorSource:
    """The tensors of a folder, and parts of packed weights in place of these."""
    parts = {name: name for name in packed.parts()}
    others = given.keys() - packed.stored.keys() - packed.part_names()
    found = parts | {name: given[name] for name in others}

    def read(name: str) -> Tensor:
        return packed.read(name, files.read) if name in parts else files.read(name)

    return TensorSource(
        folder,
        found,
        lambda name: packed.shape(name) if name in parts else files.shape(name),
        lambda name: packed.dtype(name) if name in parts else files.dtype(name),
        read,
    )


def load_state(
    model: HybridModel, state: Mapping[str, Any], source: str = "state dict", cast: bool = False
) -> None:
    """Load an unsharded state dict, such as that of megatron-core's own hybrid model.

    Args:
        state: tensors by their names in any layer spec and megatron-core release; extra states of
            Transformer Engine are ignored.
        source: its name in errors.
        cast: round floating-point values to a lower-precision dtype; else refuse them.

    Raises:
        CheckpointError: not a state of this model.
    """
    state = stack_experts(state)
    given = {canonical_name(name): name for name in state if is_parameter(name)}
    tensors = TensorSource(
        source,
        given,
        lambda name: tuple(state[name].shape),
        lambda name: state[name].dtype,
        state.__getitem__,
    )
    rounded = FLOATS if cast else ()
    names = names_of_all_stages(model)
    with fail_together(CheckpointError):
        load_tensors(model, _identity(names), tensors, rounded)


def read_config(folder: str | os.PathLike[str], mtp: bool = True, **overrides: Any) -> HybridConfig:
    """Read the config of a checkpoint, ours or Hugging Face's; `overrides` replace its fields.

    mtp: with the parts for multi-token prediction that the folder has.

    Raises:
        CheckpointError: config.json is missing, unreadable or not a config, or the weights are
            quantized in a format that is not read.
        ValueError, TypeError: an override is not possible.
    """
    path = Path(folder) / CONFIG_FILE
    values = read_values(path)
    if (found := quantization(values)) is not None:
        Quantization.read(found, str(path))
    values = with_dtype(values, path.parent)
    return config_of(values, str(path), tensor_names(path.parent), mtp, **overrides)


def tensor_names(folder: Path) -> list[str]:
    """Of all weights in a folder; none: it has none, or unreadable ones, which their loading
    reports."""
    try:
        with TensorFiles.open(folder) as files:
            return list(files.names())
    except CheckpointError:
        return []


def config_of(
    values: Mapping[str, Any],
    source: str,
    tensor_names: Collection[str] | None = (),
    mtp: bool = True,
    **overrides: Any,
) -> HybridConfig:
    """Convert the content of a config.json. A quantization is ignored: the config is that of the
    dequantized model.

    Args:
        tensor_names: of the weights of a Hugging Face folder, which say whether it has a part for
            multi-token prediction. None: what config.json says of that.
        mtp: with such parts; over several pipeline stages they are left out in any case.

    Raises:
        CheckpointError: not a usable config, or of an unknown architecture.
        ValueError, TypeError: an override is not possible.
    """
    # The stage behind the last layer has no embedding, which the parts need.
    mtp = mtp and (overrides.get("pipeline_model_parallel_size") or 1) == 1
    try:
        if _is_huggingface(values):
            return _huggingface_config(values, source, tensor_names if mtp else (), **overrides)
        if "layer_pattern" not in values:
            raise CheckpointError(
                f"{source} has neither a layer_pattern, as ours have, nor a model_type, as those "
                "of transformers have. Convert the model to one of these."
            )
        if not mtp:
            main = split_predictions(values["layer_pattern"])[0]
            values = {**values, "layer_pattern": main}
        return HybridConfig.from_dict(values, **overrides)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        if overrides:
            # This raises CheckpointError if the file is at fault.
            config_of(values, source, tensor_names, mtp)
            raise
        raise CheckpointError(f"{source} is no usable config: {error}") from error


def quantization(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config in a config.json (`read_values`); None: the weights are not
    quantized."""
    for part in _parts(values):
        if isinstance(found := part.get("quantization_config"), Mapping) and found:
            return found
    return None


def is_packed(folder: Path) -> bool:
    """Whether the weights in a folder are quantized, by its config or the headers of its files."""
    if quantization(read_values(folder / CONFIG_FILE)) is not None:
        return True
    with TensorFiles.open(folder) as files:
        return any(name.endswith(".weight.codes") for name in files.names())


def with_dtype(values: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Add a missing `dtype` to the content of a Hugging Face config.json: bfloat16 for quantized
    weights, else that of the folder's first floating-point tensor, as in transformers. Without
    weights none is added, which means float32."""
    named = any(part.get(key) for part in _parts(values) for key in ("dtype", "torch_dtype"))
    if named or not _is_huggingface(values):
        return values
    if quantization(values) is not None:
        return {**values, "dtype": "bfloat16"}
    try:
        with TensorFiles.open(folder) as files:
            dtypes = map(files.dtype, files.names())
            found = next((dtype for dtype in dtypes if dtype in FLOATS), None)
    except CheckpointError:  # no weights, or unreadable ones: their loading reports it
        found = None
    return values if found is None else {**values, "dtype": str(found).removeprefix("torch.")}


def _parts(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A config.json, and its text_config if it has one."""
    text = values.get("text_config")
    return [values, text] if isinstance(text, Mapping) else [values]


def read_values(path: Path) -> dict[str, Any]:
    """Read a config.json, with the quantization_config that ModelOpt may have put into a file
    beside it.

    Raises:
        CheckpointError: it is missing, unreadable or not a JSON object.
    """
    values = _read_json(path)
    if quantization(values) is None and (found := modelopt_config(path.parent)) is not None:
        values["quantization_config"] = found
    return values


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        exported = path.parent / "exported"  # in the folder of a training run
        such = f", such as {exported}" if (exported / path.name).is_file() else ""
        raise CheckpointError(
            f"{path} does not exist: name a folder with a checkpoint, or its config.json{such}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not a JSON object.")
    return values


def _is_huggingface(values: Mapping[str, Any]) -> bool:
    return "layer_pattern" not in values and ("model_type" in values or "architectures" in values)


def _adapter(hf: Mapping[str, Any], source: str) -> Adapter:
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in adapters():
        raise CheckpointError(
            f"{source} has the model_type {model_type!r}, which no adapter reads. Known: "
            f"{', '.join(sorted(adapters()))}. docs/guides/own_model.md says how to add one."
        )
    return adapters()[model_type]


def adapter_of(config: HybridConfig) -> Adapter | None:
    """The adapter of the Hugging Face folder that a config was read from; None: it was not."""
    hf = config.huggingface_config
    return None if hf is None else _adapter(hf, "huggingface_config")


def _huggingface_config(
    hf: Mapping[str, Any],
    source: str,
    tensor_names: Collection[str] | None = (),
    **overrides: Any,
) -> HybridConfig:
    adapter = _adapter(hf, source)
    hf = adapter.text_config(hf)
    check_general_keys(hf)
    fields = {**adapter.config(hf), "huggingface_config": hf}
    if tensor_names is not None:
        tensor_names = {adapter.text_name(name) for name in tensor_names}
    part = adapter.prediction_layers(hf, tensor_names)
    if part and ("E" not in part or "num_moe_experts" in fields):
        fields["layer_pattern"] += PREDICTION_BOUNDARY + part
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    fields["params_dtype"] = getattr(torch, str(dtype).removeprefix("torch."), dtype)
    return HybridConfig(**{**fields, **overrides})


def own_tensors(model: HybridModel) -> dict[str, Tensor]:
    """Every parameter and persistent buffer by canonical name."""
    tensors = model.state_dict(keep_vars=True)
    return {
        model.canonical_name(name): tensor for name, tensor in tensors.items() if is_parameter(name)
    }


def own_weights(model: HybridModel) -> dict[str, Tensor | PackedWeight]:
    """As `own_tensors`, where a packed weight counts as one."""
    packed = {
        model.canonical_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, PackedWeight)
    }
    others = own_tensors(model).items()
    return packed | {n: tensor for n, tensor in others if n.rpartition(".")[0] not in packed}


def names_of_all_stages(model: HybridModel) -> Collection[str]:
    """`own_weights` of all pipeline stages, names only. Call it on every rank of the model."""
    return of_all_stages(model, dict.fromkeys(own_weights(model))).keys()


def of_all_stages(model: HybridModel, own: dict[str, Any]) -> dict[str, Any]:
    """What all pipeline stages say by name, in their order. Call it on every rank of the model."""
    pp = model.pg_collection.pp
    if pp.size() == 1:
        return own
    stages = exchange("naming its tensors", own, dist.get_process_group_ranks(pp))
    return {name: value for _, of_stage in stages for name, value in of_stage.items()}


def _identity(names: Iterable[str]) -> list[TensorMap]:
    return [TensorMap((name,), (name,)) for name in names]


@dataclass(frozen=True)
class TensorSource:
    """Tensors to load from."""

    name: str
    given: dict[str, str]
    """Names of tensors in the maps -> names in the source."""
    shape: Callable[[str], tuple[int, ...]]
    dtype: Callable[[str], torch.dtype]
    read: Callable[[str], Tensor]

    def num_bytes(self, name: str) -> int:
        """Of a tensor in the maps."""
        given = self.given[name]
        return math.prod(self.shape(given)) * self.dtype(given).itemsize


def load_tensors(
    model: HybridModel,
    maps: list[TensorMap],
    source: TensorSource,
    rounded: tuple[torch.dtype, ...],
) -> None:
    """Copy this rank's pieces into the model, after checking all of them; their numbers only when
    they are read.

    maps: of all pipeline stages.
    """
    check_names(maps, source.given, source.name)
    checked = _checked_maps(model, maps, source, rounded)

    def read(name: str) -> Tensor:
        value = source.read(name)
        check_numbers(name, value, source.name)
        return value

    _copy_tensors(model, checked, replace(source, read=read))


def check_names(maps: Iterable[TensorMap], given: Collection[str], source: str) -> None:
    """Raise CheckpointError unless the names are those of a whole model.

    Args:
        maps: of all pipeline stages.
        given: names that a source has.
        source: its name in errors.
    """
    wanted, given = {name for m in maps for name in m.theirs}, set(given)
    for names, relation in (
        (wanted - given, f"not in {source}, but the model has"),
        (given - wanted, f"in {source}, but the model does not have"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(
                f"{relation} {min(names)}{more}. The config does not describe these weights."
            )


def _check_numbers(
    model: HybridModel, maps: list[TensorMap], found: FoundTensors, files: TensorFiles
) -> None:
    """Raise CheckpointError for NaN in tensors of this rank's stage, which its tensor-parallel
    ranks share out among them."""
    tp, packed = model.pg_collection.tp, found.packed
    names = sorted({name for tensor_map in maps for name in tensor_map.theirs})
    for name in names[tp.rank() :: tp.size()]:
        weight, _, part = name.rpartition(":")
        if weight in packed.stored:
            stored = packed.stored[weight].parts[part]
            value = files.read(stored.name)
            is_view = value.element_size() == stored.dtype.itemsize
            check_numbers(stored.name, value.view(stored.dtype) if is_view else value, files.folder)
        else:
            check_numbers(found.given[name], files.read(found.given[name]), files.folder)


def _checked_maps(
    model: HybridModel,
    maps: list[TensorMap],
    source: TensorSource,
    rounded: tuple[torch.dtype, ...],
) -> list[TensorMap]:
    """The maps of tensors that this rank has pieces of, after checking all of them."""
    own = own_tensors(model)
    maps = [tensor_map for tensor_map in maps if own.keys() & set(tensor_map.ours)]
    for tensor_map in maps:
        check_map(tensor_map, own, source, rounded)
    return maps


def _copy_tensors(model: HybridModel, maps: list[TensorMap], source: TensorSource) -> None:
    """Copy this rank's pieces into the model."""
    own = own_tensors(model)
    sizes = [sum(source.num_bytes(name) for name in tensor_map.theirs) for tensor_map in maps]
    drawn = sum(sizes) if own_member().rank == 0 else 0  # one bar for all ranks
    with progress(f"loading {source.name}", drawn) as advance:
        for tensor_map, num_bytes in zip(maps, sizes, strict=True):
            theirs = [source.read(source.given[name]) for name in tensor_map.theirs]
            for name, value in zip(tensor_map.ours, tensor_map.layout.to_ours(theirs), strict=True):
                if name in own:
                    copy_piece(value, own[name], model)
            advance(num_bytes)


@torch.no_grad()
def copy_piece(whole: Tensor, tensor: Tensor, model: HybridModel) -> None:
    """Copy the piece of `whole` that lies in a tensor of the model."""
    tensor.copy_(own_piece(whole, tensor, model.pg_collection))
    tensor.loaded_dtype = whole.dtype  # for `full_state_dict`


def check_map(
    tensor_map: TensorMap,
    own: Mapping[str, Tensor],
    source: TensorSource,
    rounded: tuple[torch.dtype, ...],
) -> None:
    """Check shapes and dtypes, from headers only."""
    ours = [
        torch.empty(whole_shape(own[name]), dtype=own[name].dtype, device="meta")
        for name in tensor_map.ours
    ]
    for name, expected in zip(tensor_map.theirs, tensor_map.layout.to_theirs(ours), strict=True):
        given = source.given[name]
        if source.shape(given) != tuple(expected.shape):
            raise CheckpointError(
                f"{given} has shape {list(source.shape(given))} in {source.name}, but the model's "
                f"config gives it {list(expected.shape)}. Config and weights do not belong "
                "together."
            )
        dtype = source.dtype(given)
        if dtype == expected.dtype or dtype in rounded:
            continue
        if dtype not in FLOATS:
            remedy = (
                "Quantized weights are read with the scales beside them, in the formats of "
                "docs/guides/quantized_weights.md; dequantize others first."
            )
        elif torch.promote_types(dtype, expected.dtype) == expected.dtype:
            continue
        else:
            remedy = (
                "Set params_dtype alike, or have it rounded: by dtype=... of load_pretrained, "
                "--dtype of megatron-hybrid convert, cast=True of load_checkpoint."
            )
        raise CheckpointError(
            f"{given} is {dtype} in {source.name}, but {expected.dtype} in the model. {remedy}"
        )
