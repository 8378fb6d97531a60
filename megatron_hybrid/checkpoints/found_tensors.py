"""What a folder holds for a model: the maps of its weights, and which of them are packed."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.checkpoints.folder import FLOATS, CheckpointFolder
from megatron_hybrid.checkpoints.huggingface.base import TensorMap, is_of_language_model
from megatron_hybrid.checkpoints.model_tensors import own_weights
from megatron_hybrid.checkpoints.packed_files import PackedFiles
from megatron_hybrid.checkpoints.packed_maps import PackedSource, own_source
from megatron_hybrid.checkpoints.tensor_files import CheckpointError, TensorFiles, check_numbers
from megatron_hybrid.checkpoints.tensor_source import TensorSource, check_names, dtypes_in_model
from megatron_hybrid.distributed.rendezvous import own_member
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.parameter_names import canonical_name, is_of_prediction
from megatron_hybrid.models.sharding.stage_copies import EMBEDDING
from megatron_hybrid.utils.progress import progress

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"  # theirs, in every architecture


@dataclass(frozen=True)
class FoundTensors:
    """What a folder holds for a model."""

    files: TensorFiles
    maps: list[TensorMap]
    """Maps of the unpacked weights."""
    given: dict[str, str]
    """Names in the maps -> names in the files."""
    packed: PackedSource
    is_mixed: bool = False
    """Whether values in fp32 are rounded, as the word embedding is in the model's dtype."""

    def source(self, cast: bool) -> TensorSource:
        """Return the tensors of the folder, with parts of packed weights in place of these. With
        `cast`, values of any dtype are rounded."""
        files, packed = self.files, self.packed
        parts = {name: name for name in packed.parts()}
        others = self.given.keys() - packed.stored.keys() - packed.part_names() - parts.keys()

        def read(name: str) -> Tensor:
            return packed.read(name, files.read) if name in parts else files.read(name)

        return TensorSource(
            str(files.folder),
            parts | {name: self.given[name] for name in others},
            lambda name: packed.shape(name) if name in parts else files.shape(name),
            lambda name: packed.dtype(name) if name in parts else files.dtype(name),
            read,
            FLOATS if cast else (torch.float32,) if self.is_mixed else (),
        )

    def check_numbers(
        self, model: HybridModel, maps: list[TensorMap], source: TensorSource
    ) -> None:
        """Raise CheckpointError for NaN, and numbers that the model's dtype lacks, in tensors of
        this rank's stage, which its tensor-parallel ranks share out among them, and for scales that
        make NaN of a code of 0. maps: of these tensors, and of parts of packed weights."""
        tp = model.pg_collection.tp
        dtypes = dtypes_in_model(model, maps)
        names = sorted(dtypes)[tp.rank() :: tp.size()]
        total, is_first = sum(map(source.num_bytes, names)), own_member().rank == 0
        with progress(f"checking {source.name}", total, is_shown=is_first) as advance:
            for name in names:
                self._check_numbers(name, source, dtypes[name])
                advance(source.num_bytes(name))

    def _check_numbers(self, name: str, source: TensorSource, dtype: torch.dtype) -> None:
        weight, _, part = name.rpartition(":")
        folder = self.files.folder
        if weight not in self.packed.stored:
            check_numbers(self.given[name], source.read(source.given[name]), folder, dtype)
            return
        stored = self.packed.stored[weight].parts[part]
        value = self.files.read(stored.name)
        check_numbers(stored.name, value, folder)
        if part in ("scale", "outer"):
            zeros = stored.decode(value).float() * 0
            check_numbers(f"{stored.name}, times a code of 0,", zeros, folder)


def find_tensors(
    model: HybridModel, folder: CheckpointFolder, names: Collection[str] | None = None
) -> FoundTensors:
    """Find what the files of a folder hold for a model, which may be on the meta device.

    Args:
        names: `names_of_all_stages`; None means that the model is whole.

    Raises:
        CheckpointError: unreadable, or not of this model.
    """
    if folder.is_huggingface:
        return _find_theirs(model.config, folder)
    files = folder.files
    given = {canonical_name(name): name for name in files.names()}
    if not model.config.pattern.predictions:
        given = {name: own for name, own in given.items() if not is_of_prediction(name)}
    packed, maps = own_source(
        given, lambda name: files.shape(given[name]), lambda name: files.dtype(given[name])
    )
    of_packed = {name for m in maps for name in m.ours}
    names = own_weights(model) if names is None else names
    maps += [TensorMap((name,), (name,)) for name in names if name not in of_packed]
    there = given.keys() - packed.part_names() | packed.stored.keys()
    check_names(maps, there, str(folder.path))
    return FoundTensors(files, maps, given, packed)


def _find_theirs(config: HybridConfig, folder: CheckpointFolder) -> FoundTensors:
    """Do `find_tensors` in a folder of Hugging Face."""
    adapter, files = folder.adapter, folder.files
    weights = PackedFiles(files, folder.quantization)
    given: dict[str, str] = {}
    is_read = is_of_language_model if folder.is_unknown_around else bool
    if left_out := set(itertools.filterfalse(is_read, weights.names())):
        _warn_left_out(folder, left_out)
    for file_name in filter(is_read, weights.names()):
        if (name := adapter.text_name(file_name)) in given:
            raise CheckpointError(
                f"{name} is in {folder.path} twice, plain and packed or under two names. Copy the "
                "folder again, with one of them."
            )
        given[name] = file_name
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
    if config.share_embeddings_and_output_weights and HEAD in given:
        head = given.pop(HEAD)  # the tied tensor may be stored under this name alone
        if head != given.setdefault(embedding, head):
            copies.append((HEAD, embedding, "tie_word_embeddings", head, given[embedding]))
    check_names(maps, given, str(folder.path))
    heads = [(name, file_name) for name, _, _, file_name, _ in copies if name == HEAD]
    for name, file_name in [(embedding, given[embedding]), *heads]:
        if file_name in weights.stored:
            raise CheckpointError(
                f"{name} is packed in {folder.path}, but the word embedding is looked up row by row"
                f"{', and both are one (tie_word_embeddings)' if name == HEAD else ''}. Dequantize "
                "it with the library that packed it."
            )
    for name, original, why, *file_names in copies:
        is_packed = not weights.stored.keys().isdisjoint(file_names)
        if not is_packed and not torch.equal(*map(files.read, file_names)):
            raise CheckpointError(
                f"{name} differs from {original} in {folder.path}, but they are one in the model "
                f"({why}). Config and weights do not belong together."
            )
    stored = {
        name: weights.stored[file_name]
        for name, file_name in given.items()
        if file_name in weights.stored
    }
    kept_names = {adapter.text_name(name): name for name in filter(is_read, weights.kept)}
    for name in adapter.ignored_names(kept_names, config):
        del kept_names[name]
    kept = {file_name: files.read(file_name).clone() for file_name in kept_names.values()}
    packed = PackedSource(stored, shapes, kept, dtype_unpacked=config.params_dtype)
    packed.unpack_mixed(maps, files.read)
    is_mixed = files.dtype(given[embedding]) == config.params_dtype
    return FoundTensors(files, maps, given, packed, is_mixed)


def _warn_left_out(folder: CheckpointFolder, names: set[str]) -> None:
    parts = {name.removeprefix("model.").partition(".")[0] for name in names}
    logger.warning(
        "%s holds a model of the model_type %r: its language model is read, and %d tensors of "
        "other parts are left out (%s)",
        folder.path,
        folder.values["model_type"],
        len(names),
        ", ".join(sorted(parts)),
    )


def pack_as_in(model: HybridModel, folder: str | os.PathLike[str]) -> None:
    """Pack the weights that are packed in a folder. They get no values; a model on the meta device
    has the sizes of the loaded one then.

    Raises:
        CheckpointError: unreadable, or not of this model.
    """
    found = find_tensors(model, CheckpointFolder(folder))
    with found.packed.install(model, found.maps, str(folder)):
        pass
