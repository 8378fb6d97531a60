"""Folders that Megatron-LM saves as `torch_dist`, read and written for any parallel layout.

    DIR/latest_checkpointed_iteration.txt           the iteration, or "release"
    DIR/iter_0000100/{.metadata, metadata.json}     where each tensor's pieces lie; the format
    DIR/iter_0000100/__RANK_N.distcp                pieces of tensors, each as torch.save writes it
    DIR/iter_0000100/common.pt                      Megatron's arguments

megatron-core from 0.18 on keeps what was common.pt among the tensors. Weights are read without
torch.distributed.checkpoint and CUDA, a tensor at a time.

A folder need not be trusted: all pickles in it, `.metadata` too, are read by `pickles`, which calls
nothing but constructors of plain data, and file names in it must not leave the folder. What a
hostile one can do is to make the read fail, or to hold other numbers.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_hybrid.checkpoints.folder import FLOATS, METADATA_FILE, TRACKER_FILE, config_of
from megatron_hybrid.checkpoints.huggingface.base import TensorMap
from megatron_hybrid.checkpoints.huggingface.layouts import Layout, joined
from megatron_hybrid.checkpoints.megatron.args import (
    args_of_config,
    fields_of_args,
    warn_of_positions,
)
from megatron_hybrid.checkpoints.megatron.names import gpt_to_hybrid_name, hybrid_to_gpt_name
from megatron_hybrid.checkpoints.megatron.pickles import load_pickle, load_saved, readable
from megatron_hybrid.checkpoints.model_tensors import (
    full_state_dict,
    of_all_stages,
    own_tensors,
    writes,
)
from megatron_hybrid.checkpoints.pretrained import checked_device
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.checkpoints.tensor_source import TensorSource, load_tensors
from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.distributed.rendezvous import own_member
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.packed_weight import named_weights
from megatron_hybrid.models.parameter_names import canonical_name, is_parameter
from megatron_hybrid.models.sharding.parallel_setup import initialize_distributed
from megatron_hybrid.models.sharding.sharded_state import EXPERTS, distributed_keys
from megatron_hybrid.models.sharding.stage_copies import EMBEDDING, OUTPUT_LAYER
from megatron_hybrid.models.sharding.tensor_sharding import cut_of
from megatron_hybrid.utils.files import read_json, replace_file
from megatron_hybrid.utils.other_names import names_arguments

logger = logging.getLogger(__name__)

FORMAT_FILE = "metadata.json"
COMMON_FILE = "common.pt"

_COMMON_KEY = "common_state/shard_0_1"
_NO_WEIGHTS = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state).*")
_PREDICTION = "mtp."
_IN_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d+\.)(.*)")
_SHIFTED_NORM = ".self_attention.out_norm.weight"
"""Norm of Gated DeltaNet: megatron-core has 1 + weight as the factor of all norms, or of none.
Qwen3-Next and Qwen3.5 have it of all but this one, so that Megatron's weight is less 1."""
_PROJECTION_OF_LATENT = "_down_proj.weight"  # parallel linears in core's local layers, plain here
_LATENT_NORM = re.compile(r"\.self_attention\.(q|kv)_layernorm\.")
_FUSED_LATENT_NORM = r".self_attention.linear_\1_up_proj.layer_norm_"
_BIASED = re.compile(r".*\.(self_attention\.linear_(qkv|proj)|mlp\.linear_fc[12])\.weight")
"""Weights to which core has biases with `add_bias_linear`."""
_VOCABULARY = (EMBEDDING, OUTPUT_LAYER)


@names_arguments(HybridConfig)
def load_megatron(
    folder: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    **overrides: Any,
) -> HybridModel:
    """Load a `torch_dist` checkpoint of Megatron-LM, or of our own training, in eval mode, whatever
    layout saved it.

    Hybrid models and GPT models are read; optimizer and random states are left, and over several
    pipeline stages MTP heads. Such folders hold no tokenizer: give the engine that of the training.

    Args:
        folder: that of `--save`, of which the latest iteration is taken, or one iteration in it.
        device: of the weights, such as "cuda"; None means torch's default device.
        dtype: of the weights; None means as saved.
        overrides: HybridConfig fields to replace, such as tensor_model_parallel_size. The
            `vocab_size` of a checkpoint includes Megatron's padding, whose tokens could be sampled:
            set it to the tokenizer's size to leave them out.

    Raises:
        CheckpointError: not such a folder, a broken one, or a model that HybridModel does not
            implement; on all ranks, if one of them finds it so.
        ValueError: this machine has no such device, or an override is not possible.
    """
    initialize_distributed()
    with fail_together(CheckpointError):
        device = checked_device(device)
        files = DistributedTensors(folder)
        if dtype is not None:
            overrides["params_dtype"] = dtype
        # Random initialization would take longer than reading the files.
        config = files.config(perform_initialization=False, **overrides)
        if files._own_config is None and own_member().rank == 0:
            warn_of_positions(files.path, files.args, config.is_gpt_model)
    with device:
        model = build_hybrid_model(config)
    sections = {name: _sections(tensor) for name, tensor in own_tensors(model).items()}
    sections = of_all_stages(model, sections)
    with fail_together(CheckpointError, groups=model.pg_collection):
        given = {
            name: key
            for name, key in files.given().items()
            if name in sections or not name.endswith(".bias") or files.read(key).any()
        }
        of_parts = [name for name in given if name.startswith(_PREDICTION)]
        if of_parts and not hasattr(model, "mtp"):
            if own_member().rank == 0:
                logger.warning("%s: layers for multi-token prediction are left out", files.path)
            given = {name: key for name, key in given.items() if name not in of_parts}
        rounded = FLOATS if dtype is not None else ()
        source = TensorSource(str(files.path), given, files.shape, files.dtype, files.read, rounded)
        shift = int(_centers(files.config())) - int(_centers(config))
        maps = [
            replace(m, layout=_shifted(shift))
            if shift and m.ours[0].endswith(_SHIFTED_NORM)
            else _as_stored(m, files, given, config.vocab_size)
            for m in _tensor_maps(sections)
        ]
        load_tensors(model, maps, source)
    return model.eval()


def save_megatron(model: HybridModel, folder: str | os.PathLike[str]) -> None:
    """Write a `torch_dist` checkpoint, `release`, that Megatron-LM and megatron-core load in any
    layout. Call it on every rank of the model; one writes. Packed weights are written dequantized.

    Layers built of Transformer Engine also ask for its private states, which a model of plain torch
    does not have: load there with `--dist-ckpt-strictness log_all`.

    Raises:
        CheckpointError: megatron-core has no such model, or the folder cannot be written.
    """
    try:
        args = args_of_config(model.config)
    except ValueError as error:
        raise CheckpointError(f"this model cannot be written for Megatron: {error}") from error
    keys = _keys_of_all_stages(model)
    state = full_state_dict(model, unpacked=True)
    if state is None or not writes(model):
        return
    warn_of_positions(folder, args, not args.is_hybrid_model)
    layout = _shifted(int(args.apply_layernorm_1p) - int(_centers(model.config)))
    for name in filter(lambda name: name.endswith(_SHIFTED_NORM), state):
        (shifted,) = layout.to_theirs([state[name]])
        if not torch.equal(layout.to_ours([shifted])[0], state[name]):
            logger.warning("%s: %s is rounded in %s", folder, name, shifted.dtype)
        state[name] = shifted
    stored: dict[str, Any] = {}
    extra: list[str] = []  # what core's plain layers have as extra states: one of each layer
    for key, (name, sections, dim) in keys.items():
        if name is None:
            extra.append(f"{key}/shard_0_1")
            continue
        if sections is None:
            stored[key] = state[name]
        else:
            blocks = state[name].split(list(sections.values()), dim)
            stored |= {f"{key}.{section}": block for section, block in zip(sections, blocks)}
        if key.endswith(_PROJECTION_OF_LATENT):
            extra.append(f"{key.removesuffix('weight')}_extra_state/shard_0_1")
        if EXPERTS in key and key.endswith(".weight"):
            path, num_experts = key.removesuffix("weight"), len(state[name])
            extra += [f"{path}_extra_state/shard_{i}_{num_experts}" for i in range(num_experts)]
        bias = f"{key.removesuffix('weight')}bias"
        if args.add_bias_linear and _BIASED.fullmatch(key) and bias not in keys:
            stored[bias] = torch.zeros(len(state[name]), dtype=state[name].dtype)
    stored |= {key: [None] for key in extra}
    if not args.is_hybrid_model:
        stored = _as_gpt(stored, args)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    path = Path(folder) / "release"
    try:
        path.mkdir(parents=True)
        with warnings.catch_warnings():
            # It warns that only this process saves, which is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save(
                stored,
                storage_writer=dcp.FileSystemWriter(path),
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                no_dist=True,
            )
        torch.save(common, path / COMMON_FILE)
        text = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        text |= {"common_backend": "torch", "common_backend_version": 1}
        (path / FORMAT_FILE).write_text(json.dumps(text))
        replace_file(Path(folder) / TRACKER_FILE, lambda file: file.write_text("release"))
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint to {folder}: {error}") from error


def _centers(config: HybridConfig) -> bool:
    """Return whether the output norms of Gated DeltaNet have 1 + weight as their factor."""
    own = config.linear_norm_zero_centered_gamma
    return config.layernorm_zero_centered_gamma if own is None else own


def _shifted(offset: int) -> Layout:
    """Add a number to theirs in fp32, which gives ours."""

    def add(weight: Tensor, number: int) -> list[Tensor]:
        return [(weight.float() + number).to(weight.dtype)]

    return Layout(lambda theirs: add(theirs[0], offset), lambda ours: add(ours[0], -offset))


def _as_gpt(stored: Mapping[str, Any], args: Namespace) -> dict[str, Any]:
    """Return the keys of a GPTModel of Transformer Engine's layers, which stacks them unless
    `moe_layer_freq` or `linear_attention_freq` makes them differ."""
    extra = f"{OUTPUT_LAYER.removesuffix('weight')}_extra_state/"  # which core's GPTModel drops
    named = {
        hybrid_to_gpt_name(key): value for key, value in stored.items() if not key.startswith(extra)
    }
    if vars(args).get("multi_latent_attention"):
        named = {_LATENT_NORM.sub(_FUSED_LATENT_NORM, key): value for key, value in named.items()}
    if isinstance(vars(args).get("moe_layer_freq"), list) or hasattr(args, "linear_attention_freq"):
        return named
    result: dict[str, Any] = {}
    layers: dict[str, dict[int, Tensor]] = {}
    for key, value in named.items():
        match = _IN_LAYER.fullmatch(key)
        if match is None:
            result[key] = value
        elif isinstance(value, Tensor):
            layers.setdefault(match[1] + match[3], {})[int(match[2])] = value
        else:  # an extra state of a layer, or of an expert of a layer
            path, _, shard = match[3].partition("/shard_")
            place, shape = shard.split("_")
            of_expert = EXPERTS in key
            place = f"{match[2]}.{place}" if of_expert else match[2]
            shape = f"{args.num_layers}.{shape}" if of_expert else str(args.num_layers)
            result[f"{match[1]}{path}/shard_{place}_{shape}"] = value
    for key, tensors in layers.items():
        result[key] = torch.stack([tensors[number] for number in sorted(tensors)])
    return result


class DistributedTensors:
    """The tensors of a `torch_dist` folder by name, a layer in each. Reading starts no processes.

    Raises:
        CheckpointError: no such folder, or its metadata cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.path = _iteration(Path(folder))
        metadata = self._metadata()
        num_left = sum(file.stat().st_size for file in self.path.iterdir())
        self._tensors: dict[str, tuple] = {}  # shape, dtype, chunks
        self._where: dict[tuple, tuple] = {}  # file, offset, bytes, how they were transformed
        with readable(str(self.path / METADATA_FILE)):  # what is damaged may lack any field
            for key, value in metadata.state_dict_metadata.items():
                if isinstance(value, TensorStorageMetadata) and not _NO_WEIGHTS.fullmatch(key):
                    shape, dtype = tuple(value.size), value.properties.dtype
                    num_left -= math.prod(max(n, 1) for n in shape)
                    if num_left < 0:  # before there is memory for it, or a name of each layer
                        raise CheckpointError(
                            f"its tensors up to {key} of shape {list(shape)} have more numbers "
                            "than the files next to it have bytes. Copy or save all of them again."
                        )
                    chunks = [(tuple(each.offsets), tuple(each.sizes)) for each in value.chunks]
                    self._tensors[key] = tuple(map(int, shape)), dtype, chunks
            for index, at in metadata.storage_data.items():
                place = at.relative_path, at.offset, at.length
                transforms = getattr(at, "transform_descriptors", None)
                self._where[index.fqn, index.offset and tuple(index.offset)] = *place, transforms
            self._layers = dict(self._per_layer())

    def given(self) -> dict[str, str]:
        """Map our names of tensors, or of blocks that core keeps apart, to the names there."""
        gpt = self._own_config is None and self.config().is_gpt_model
        return {
            canonical_name(gpt_to_hybrid_name(name) if gpt else name).replace(
                EXPERTS, ".mlp.experts."
            ): name
            for name in self._layers
        }

    def shape(self, name: str) -> tuple[int, ...]:
        key, layer = self._layers[name]
        return self._tensors[key][0][layer is not None :]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[self._layers[name][0]][1]

    def read(self, name: str) -> Tensor:
        """Read a tensor into the CPU's memory.

        Raises:
            CheckpointError: a piece is missing or cannot be read.
        """
        key, layer = self._layers[name]
        _, dtype, chunks = self._tensors[key]
        whole = torch.empty(self.shape(name), dtype=dtype, device="cpu")
        is_missing = torch.ones(self.shape(name), dtype=torch.bool, device="cpu")
        for start, size in chunks:
            if layer is not None and not start[0] <= layer < start[0] + size[0]:
                continue
            piece = self._piece(key, start, size)
            if layer is not None:
                piece, start, size = piece[layer - start[0]], start[1:], size[1:]
            place = tuple(slice(at, at + n) for at, n in zip(start, size))
            if whole[place].shape == piece.shape:  # else it reaches over the end
                whole[place] = piece
                is_missing[place] = False
        if missing := int(is_missing.sum()):
            raise CheckpointError(
                f"{name} lacks {missing} of its {whole.numel()} numbers in {self.path}: it was "
                "copied or saved in part. Copy or save it again."
            )
        return whole

    @cached_property
    def args(self) -> Namespace:
        """Megatron's arguments.

        Raises:
            CheckpointError: there are none, or they cannot be read.
        """
        args = self._common.get("args")
        if not isinstance(args, Namespace):
            raise CheckpointError(
                f"{self.path} has no arguments of Megatron-LM, which say what model it is. Save it "
                "by Megatron-LM's own script, or load the weights into a model that you build."
            )
        return args

    @cached_property
    def _common(self) -> Mapping[str, Any]:
        """All that is saved in addition to the tensors."""
        path = self.path / COMMON_FILE
        if path.is_file():
            with readable(str(path)):
                content = io.BytesIO(path.read_bytes())
            common = load_saved(content, str(path))
        elif (_COMMON_KEY, None) in self._where:
            (common,) = load_saved(self._open((_COMMON_KEY, None)), f"{_COMMON_KEY} in {self.path}")
        else:
            raise CheckpointError(f"{path} does not exist. Megatron's arguments are there.")
        return common if isinstance(common, Mapping) else {}

    @property
    def _own_config(self) -> Mapping[str, Any] | None:
        """Our config of the model, which our own training saves; None if Megatron saved."""
        config = self._common.get("config")
        return config if isinstance(config, Mapping) else None

    def config(self, **overrides: Any) -> HybridConfig:
        """Return the config of the model; `overrides` replace its fields.

        Raises:
            CheckpointError: arguments are missing, or say what HybridModel does not implement.
            ValueError, TypeError: an override is not possible.
        """
        if self._own_config is not None:
            if any(".lora." in key for key in self._tensors):
                raise CheckpointError(
                    f"{self.path} has the adapters (LoRA) of a run, without their model. The run "
                    f"merges them at its end: use {self.path.parent / 'exported'}, or finish it."
                )
            return config_of(self._own_config, str(self.path), **overrides)
        num_stages = overrides.get("pipeline_model_parallel_size", 1)
        try:
            if (num_layers := vars(self.args).get("num_layers") or 0) > len(self._layers):
                raise ValueError(f"num_layers is {num_layers}, of {len(self._layers)} tensors.")
            fields = fields_of_args(self.args, self._layers, num_stages)
            return HybridConfig(**{**fields, **overrides})
        except CheckpointError:
            raise
        except KeyError as error:
            raise CheckpointError(f"the arguments in {self.path} lack {error}.") from error
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            if overrides:
                self.config()  # raises CheckpointError if the folder is at fault
                raise
            raise CheckpointError(f"the model in {self.path} is not supported: {error}") from error

    def _metadata(self) -> Metadata:
        path, backend = self.path / METADATA_FILE, "torch_dist"
        if (file := self.path / FORMAT_FILE).exists():  # not in torch's own folders
            backend = read_json(file, CheckpointError).get("sharded_backend")
        if backend != "torch_dist":
            raise CheckpointError(
                f"{self.path} is saved as {backend!r}; only torch_dist is read. Save it again by "
                "Megatron with --ckpt-format torch_dist."
            )
        with readable(str(path)):
            metadata = load_pickle(io.BytesIO(path.read_bytes()))
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds no metadata of torch.distributed.checkpoint.")
        return metadata

    def _per_layer(self) -> Iterator[tuple[str, tuple[str, int | None]]]:
        """Yield (name, (key, layer in it)) of the tensors; core stacks those of equal layers."""
        for key, (shape, _, _) in self._tensors.items():
            if not is_parameter(key):
                continue
            match = _STACKED.fullmatch(key)
            if match is None:
                yield key, (key, None)
            else:
                for layer in range(shape[0]):
                    yield f"{match[1]}{layer}.{match[2]}", (key, layer)

    def _piece(self, key: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        piece = load_saved(self._open((key, start)), f"{key} in {self.path}")
        is_tensor, dtype = isinstance(piece, Tensor), self._tensors[key][1]
        if not is_tensor or piece.numel() != math.prod(size) or piece.dtype != dtype:
            raise CheckpointError(
                f"{key} in {self.path} is not the {dtype} of shape {list(size)} that "
                f"{METADATA_FILE} names: copy or save it again."
            )
        return piece.detach().reshape(size)

    def _open(self, index: tuple) -> io.BytesIO:
        """Read the bytes that were saved for one piece."""
        if index not in self._where:
            raise CheckpointError(f"{self.path / METADATA_FILE} does not say where {index} lies.")
        name, offset, length, transforms = self._where[index]
        # The metadata are untrusted: they must not name files outside their folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{self.path / METADATA_FILE} puts {index[0]} into {name!r}.")
        if transforms:
            raise CheckpointError(f"{index[0]} in {self.path} is compressed, which is not read.")
        path = self.path / name
        with readable(f"{index[0]} in {path}"), path.open("rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(length))


def _iteration(folder: Path) -> Path:
    """Find the folder of the iteration to read."""
    if (folder / METADATA_FILE).is_file():
        return folder
    tracker = folder / TRACKER_FILE
    if not tracker.is_file():
        raise CheckpointError(
            f"{folder} has neither {TRACKER_FILE} nor {METADATA_FILE}"
            f"{'' if folder.is_dir() else ', and is no folder'}: give the folder that Megatron "
            "saved to, or one iteration in it."
        )
    with readable(str(tracker)):
        latest = tracker.read_text(encoding="utf-8").strip()
        if latest != "release" and not latest.isdecimal():
            raise CheckpointError(f"it says {latest[:40]!r}, neither a number nor 'release'.")
        path = folder / ("release" if latest == "release" else f"iter_{int(latest):07d}")
    if not (path / METADATA_FILE).is_file():
        raise CheckpointError(
            f"{path / METADATA_FILE} does not exist, but {tracker} says {latest}. Only torch_dist "
            "is read: save it again by Megatron with --ckpt-format torch_dist, or copy it again."
        )
    return path


def _tensor_maps(tensors: Mapping[str, tuple]) -> Iterator[TensorMap]:
    """Map tensors by our names, or in the blocks that core keeps apart (`_sections`)."""
    for name, (sections, dim) in tensors.items():
        if sections is None:
            yield TensorMap((name,), (name,))
        else:
            theirs = tuple(f"{name}.{section}" for section in sections)
            yield TensorMap((name,), theirs, joined(list(sections.values()), dim))


def _sections(tensor: Tensor) -> tuple[dict[str, int] | None, int]:
    """Return the full sizes of the blocks that core keeps apart, by name (None if it does not), and
    their dimension."""
    cut = cut_of(tensor)
    if cut is None or cut.names is None:
        return None, 0
    return dict(zip(cut.names, cut.sections)), cut.dim


def _as_stored(
    tensor_map: TensorMap, files: DistributedTensors, given: Mapping[str, str], vocab_size: int
) -> TensorMap:
    """Return a map that drops the rows that Megatron pads a vocabulary with."""
    (name, *_) = tensor_map.theirs
    if name not in _VOCABULARY or name not in given:
        return tensor_map
    rows = files.shape(given[name])[:1]
    if rows <= (vocab_size,):
        return tensor_map
    padding = rows[0] - vocab_size
    drop = Layout(
        lambda theirs: [theirs[0][:vocab_size]], lambda ours: [F.pad(ours[0], (0, 0, 0, padding))]
    )
    return TensorMap(tensor_map.ours, tensor_map.theirs, drop)


def _keys_of_all_stages(model: HybridModel) -> dict[str, tuple]:
    """Map core's key to (our name, blocks, dimension of these), of all pipeline stages; the name is
    None for extra states."""
    tensors, own = {**model.state_dict(keep_vars=True), **dict(named_weights(model))}, {}
    for spelling, key in distributed_keys(model).items():
        name = model.canonical_name(spelling) if is_parameter(spelling) else None
        own[key] = (name, *_sections(tensors[spelling]))
    return of_all_stages(model, own)
