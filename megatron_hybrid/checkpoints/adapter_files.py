"""Low-rank adapters in PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`.

They name modules of the Hugging Face architecture, where a model has one, and else ours. Several of
theirs may be one projection here (`q_proj`, `k_proj`, `v_proj`: `linear_qkv`); each is a part of
it, with a rank of its own.
"""

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hybrid.checkpoints.folder import FLOATS, adapter_of
from megatron_hybrid.checkpoints.huggingface.layouts import SAME, Layout
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.low_rank import LowRankPart
from megatron_hybrid.utils.files import read_json, replace_file, write_json
from megatron_hybrid.utils.validation import Range, check_field

logger = logging.getLogger(__name__)

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(re.escape(_PREFIX) + r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_NEUTRAL = {"bias": "none", "peft_type": "LORA"}
_REFUSED = (
    *("use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices"),
    *("layer_replication", "use_qalora", "alora_invocation_tokens", "use_bdlora", "arrow_config"),
    "fan_in_fan_out",
)
"""Fields of an adapter that computes something else when they are set."""
_KINDS = {
    "r": Annotated[int, Range(ge=1, le=1 << 16)],
    "lora_alpha": Annotated[float, Range(gt=0)],
    "lora_dropout": Annotated[float, Range(ge=0, lt=1)],
    "use_rslora": bool,
    "target_modules": str | list[str],
    "alpha_pattern": dict[str, Annotated[float, Range(gt=0)]],
}
"""Fields that are read; those of `_DEFAULTS` may be left out."""
_DEFAULTS = {"lora_dropout": 0.0, "use_rslora": False, "target_modules": [], "alpha_pattern": {}}
_MOST_REPEATS = 3
"""Repetitions in a regular expression over names of modules, each of which Python tries again for
every end of the others."""
_KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""First values of adapters for which peft 0.21 leaves the weights of the base as they are."""
_NOT_IN_PEFT = {
    "out_proj": "falcon_h1 falcon_mamba mamba mamba2 nemotron_h",
    "dt_proj": "falcon_mamba jamba mamba",
    ".*_adapter_list.*": "zamba2",
    "(gate|up|down)_proj": "deepseek_v3 ernie4_5_moe glm4_moe hunyuan_v1_moe qwen3_moe qwen3_next",
}
"""Modules -> the `model_type`s in which peft 0.21 refuses their adapters, or drops them."""


@dataclass(frozen=True)
class Split:
    """The parts of one of our projections, by the names of theirs."""

    names: tuple[str, ...]
    layout: Layout = SAME

    def rows(self, num_rows: int) -> list[Tensor | None]:
        """Mark for each part its rows of ours, bool [num_rows]; None means all."""
        if len(self.names) == 1:
            return [None]
        parts = self.layout.to_theirs([torch.empty(num_rows, 1, device="meta")])
        marked = [torch.full((len(part), 1), i) for i, part in enumerate(parts)]
        (ours,) = self.layout.to_ours(marked)
        return [ours[:, 0] == i for i in range(len(parts))]


@dataclass(frozen=True)
class WholeAdapter:
    """An adapter of a projection, on no rank in particular."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[out, rank], with our order of rows."""
    parts: list[LowRankPart]
    """Those of the projection that have an adapter."""


@dataclass(frozen=True)
class AdapterFields:
    """What `adapter_config.json` says."""

    rank: int
    alpha: float
    dropout: float = 0.0
    use_rslora: bool = False
    targets: tuple[str, ...] = ()

    def scale(self) -> float:
        """Return the factor of B A (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def splits(config: HybridConfig, names: Mapping[str, object]) -> dict[str, Split]:
    """Find the parts of projections, by our canonical names, which may have adapters."""
    found = {name: Split((name,)) for name in names}
    adapter = adapter_of(config)
    for tensor_map in adapter.tensors(config) if adapter is not None else ():
        ours, _, kind = tensor_map.ours[0].rpartition(".")
        # Theirs of a block that layers share is adapted in each of them for itself.
        if kind == "weight" and ours in found and ".mixer.block." not in ours:
            theirs = (name.removesuffix(".weight") for name in tensor_map.theirs)
            found[ours] = Split(tuple(map(adapter.module_name, theirs)), tensor_map.layout)
    return found


def read_adapters(
    folder: str | os.PathLike, config: HybridConfig, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[AdapterFields, dict[str, WholeAdapter]]:
    """Read the adapters of a folder, by the canonical names of the projections.

    shapes: [out, in] of all projections that may have some.

    Raises:
        CheckpointError: it cannot be read, computes something else, or is of another model.
    """
    folder = Path(folder)
    values, fields = read_adapter_fields(folder)
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} has no adapters to read: {error}") from error
    found: dict[str, dict[str, Tensor]] = {}
    adapter = adapter_of(config)
    for name, tensor in tensors.items():
        if (match := _TENSOR.fullmatch(name)) is None:
            raise CheckpointError(
                f"{folder} holds {name}, and only matrices lora_A and lora_B of linear layers are "
                "read: merge the adapter into its base with peft's merge_and_unload()"
            )
        is_matrix = tensor.dim() == 2 and tensor.dtype in FLOATS
        if not is_matrix or not bool(tensor.float().isfinite().all()):
            raise CheckpointError(
                f"{folder}: {name} is {tensor.dtype} {list(tensor.shape)}, or has NaN or infinite "
                "values: an adapter is of matrices of finite floating-point values"
            )
        module = match["module"]
        if adapter is not None:
            module = adapter.module_name(adapter.text_name(module))
        found.setdefault(module, {})[match["which"]] = tensor.float()
    adapters = dict(_placed(folder, values, fields, found, splits(config, shapes), shapes))
    if found:
        raise CheckpointError(
            f"{folder} holds an adapter of {min(found)}, which is no projection of the model that "
            "can have one: these adapters are of another model, or of experts; those of experts "
            "are merged into their base with peft's merge_and_unload()"
        )
    if not adapters:
        raise CheckpointError(f"{folder} has no adapters to read: {WEIGHTS_FILE} is empty")
    return fields, adapters


def read_adapter_fields(folder: Path) -> tuple[dict[str, Any], AdapterFields]:
    """Read what `adapter_config.json` says. Raises CheckpointError as `read_adapters`."""
    path = folder / CONFIG_FILE
    for file in (path, folder / WEIGHTS_FILE):
        if not os.path.isfile(file):  # also where the system refuses to look
            raise CheckpointError(
                f"{folder} has no adapters to read: {file.name} is no file there. Adapters in a "
                ".bin are written anew by peft's save_pretrained."
            )
    try:
        values = read_json(path)
        _check_supported(path, values)
        for name, kind in _KINDS.items():
            if (value := values.get(name)) is None:
                value = _DEFAULTS.get(name)
            check_field(name, value, kind)
        for key in values.get("alpha_pattern") or {}:
            re.compile(key)
            if re.search(r"\)[*+{]", key) or len(re.findall("[*+{]", key)) > _MOST_REPEATS:
                raise ValueError(
                    f"alpha_pattern has {key!r:.80}, whose matching may not end: repeat no group, "
                    f"and use {_MOST_REPEATS} of *, + and {{}} at most"
                )
    except (OSError, ValueError, re.error) as error:
        raise CheckpointError(f"{folder} has no adapters to read: {error}") from error
    targets = values.get("target_modules") or ()
    fields = AdapterFields(
        values["r"],
        float(values["lora_alpha"]),
        float(values.get("lora_dropout") or 0),
        bool(values.get("use_rslora")),
        (targets,) if isinstance(targets, str) else tuple(targets),
    )
    return values, fields


def _check_supported(path: Path, values: Mapping[str, Any]) -> None:
    refused = [name for name, value in _NEUTRAL.items() if values.get(name, value) != value]
    refused += [name for name in _REFUSED if values.get(name)]
    first = values.get("init_lora_weights")
    if (first.lower() if isinstance(first, str) else first) not in _KEEP_BASE:
        refused.append("init_lora_weights")
    if refused:
        raise CheckpointError(
            f"{path} has {refused[0]}={values[refused[0]]!r}, which is not supported: merge the "
            "adapter into its base with peft's merge_and_unload()"
        )


def _placed(
    folder: Path,
    values: Mapping[str, Any],
    fields: AdapterFields,
    found: dict[str, dict[str, Tensor]],
    known: Mapping[str, Split],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, WholeAdapter]]:
    """Put the adapters of their modules together to those of ours. found: each is taken out."""
    for ours, split in known.items():
        if ours in found:
            split = Split((ours,))
        if not found.keys() & set(split.names):
            continue
        out, width = shapes[ours]
        sizes = [len(t) for t in split.layout.to_theirs([torch.empty(out, 1, device="meta")])]
        rows, a, columns, parts = split.rows(out), [], [], []
        for i, name in enumerate(split.names):
            if (pair := found.pop(name, None)) is None:
                continue
            rank = len(pair["A"]) if "A" in pair else 0
            shape = {which: tuple(tensor.shape) for which, tensor in sorted(pair.items())}
            if not rank or shape != {"A": (rank, width), "B": (sizes[i], rank)}:
                raise CheckpointError(
                    f"{folder}: the adapter of {name} has the shapes {shape}, the model's are A "
                    f"[rank, {width}] and B [{sizes[i]}, rank]: these adapters are of another model"
                )
            alpha = _of_pattern(values.get("alpha_pattern"), name, fields.alpha)
            own = AdapterFields(rank, alpha, use_rslora=fields.use_rslora).scale()
            whole = [torch.zeros(size, rank) for size in sizes]
            whole[i] = pair["B"] * (own / fields.scale())
            columns += split.layout.to_ours(whole)
            a.append(pair["A"])
            parts.append(LowRankPart(name, rank, rows[i]))
        yield ours, WholeAdapter(torch.cat(a), torch.cat(columns, 1), parts)


def _of_pattern(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """Return the value for a module, as PEFT finds it: of the first key that its name ends with."""
    for key, value in (pattern or {}).items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default


def write_adapters(
    folder: str | os.PathLike,
    config: HybridConfig,
    fields: AdapterFields,
    adapters: Mapping[str, WholeAdapter],
    names: Mapping[str, object],
    base: str | None = None,
) -> None:
    """Write adapters as PEFT does.

    Args:
        adapters: by the canonical names of the projections.
        names: of all projections that may have some.
        base: the folder of the model, or its name; for whoever loads both.
    """
    known, tensors, ranks = splits(config, names), {}, {}
    modules = _modules(config, known)
    for ours, whole in adapters.items():
        first = 0
        for part in whole.parts:
            own = slice(first, first + part.rank)
            first, b = own.stop, whole.b[:, own]
            if part.name in known[ours].names:
                parts = known[ours].layout.to_theirs([b])
                b = parts[known[ours].names.index(part.name)]
            for which, value in (("A", whole.a[own]), ("B", b)):
                tensors[f"{_PREFIX}{part.name}.lora_{which}.weight"] = value.contiguous()
            ranks[part.name] = part.rank
    other = {name: rank for name, rank in ranks.items() if rank != fields.rank}
    # Ends of names that stand for the adapted modules alone, and the other names.
    targets = set(map(_end, ranks)) - set(map(_end, modules - ranks.keys()))
    names_alone = (name for name in ranks if _end(name) not in targets)
    scale = fields.scale()
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "r": fields.rank,
        "lora_alpha": fields.alpha,
        "lora_dropout": fields.dropout,
        "use_rslora": fields.use_rslora,
        "target_modules": sorted(targets) + sorted(names_alone),
        "rank_pattern": other,
        "alpha_pattern": {
            name: scale * (math.sqrt(rank) if fields.use_rslora else rank)
            for name, rank in other.items()
        },
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / WEIGHTS_FILE, lambda path: save_file(tensors, path))
    write_json(folder / CONFIG_FILE, values)
    kind = (config.huggingface_config or {}).get("model_type")
    ends = "|".join(each for each, kinds in _NOT_IN_PEFT.items() if kind in kinds.split())
    if unread := {n for n in ranks if n not in modules or re.fullmatch(ends, _end(n))}:
        no, yes = (sorted(set(map(_end, each))) for each in (unread, ranks.keys() - unread))
        logger.warning(
            "%s: peft does not read the adapters of %.300s in a %s. It reads those of a run with "
            "lora.targets=[%s]; transformers reads the merged model",
            *(folder, ", ".join(no), kind, ", ".join(yes) or "others"),
        )


def _end(name: str) -> str:
    """Return the end of a name, from its last word on that is no number."""
    return re.sub(r".*\.(?=[^.]*[^.\d])", "", name)


def _modules(config: HybridConfig, known: Mapping[str, Split]) -> set[str]:
    """Name all modules that have a weight, adapted or not, or have such modules."""
    adapter = adapter_of(config)
    if adapter is None:
        return {name for split in known.values() for name in split.names}
    tensors = (name for each in adapter.tensors(config) for name in each.theirs)
    parts = [adapter.module_name(name.rpartition(".")[0]).split(".") for name in tensors]
    return {".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)}
