"""`megatron-hybrid quantize`: a folder with weights of 8 or 4 bits, from one in floating point.

Weights are rounded to nearest, tensor by tensor; nothing is calibrated. Folders of Hugging Face are
written in the formats of compressed-tensors, which transformers and vLLM read. These have a weight
for each expert, even if the folder in floating point has those of a layer in one tensor; of such
models transformers reads only Qwen3.5's.
"""

import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.checkpoints.folder import CONFIG_FILE, CheckpointFolder, adapter_of, check_free
from megatron_hybrid.checkpoints.found_tensors import HEAD, FoundTensors, find_tensors
from megatron_hybrid.checkpoints.huggingface.base import Adapter, TensorMap
from megatron_hybrid.checkpoints.huggingface.layouts import Layout
from megatron_hybrid.checkpoints.packed_files import in_words
from megatron_hybrid.checkpoints.packed_maps import PACKABLE
from megatron_hybrid.checkpoints.pretrained import checked_folder, load_pretrained
from megatron_hybrid.checkpoints.quantize import fp4_divisor, quantized
from megatron_hybrid.checkpoints.tensor_files import (
    CheckpointError,
    TensorFiles,
    TensorPlan,
    check_numbers,
    write_tensors,
)
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model
from megatron_hybrid.models.packed_weight import PackedWeight, Packing, replace_weight
from megatron_hybrid.models.sharding.parallel_setup import initialize_distributed
from megatron_hybrid.models.sharding.tensor_sharding import cut_of
from megatron_hybrid.ops import unpack
from megatron_hybrid.ops.packed import format_of
from megatron_hybrid.utils.files import write_json

_STEERING = "decays, steps and betas of recurrent layers"

_SENSITIVE = ("beta", "alpha", "dt")
"""Sections of our projections that steer recurrent states, which are the last ones of each."""
_COPIED = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".md")
"""Endings of the files that are copied: tokenizers, templates, cards."""
_GATES = re.compile(r"(^|\.)(in_proj_(ba|a|b)|b_proj|[fg]_[ab]_proj|dt_proj|x_proj)\.weight$")
"""Hugging Face's names of small projections to decays, betas and gates of recurrent layers."""


@dataclass(frozen=True)
class Format:
    """A format of quantized weights, by a name of `--to`."""

    codes: torch.dtype
    scale: torch.dtype
    method: str
    """`format` of compressed-tensors."""
    strategy: str
    """`strategy` of the `weights` there."""
    groups: tuple[int, ...] = ()
    """Numbers of columns that may share a scale. Without any, all of a row share one."""
    multiple: int = 1
    """Number whose multiple the columns of a weight must be, where all of a row share a scale."""

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the parts of a weight."""
        outer = {"outer": torch.float32} if self.scale == torch.float8_e4m3fn else {}
        return {"codes": self.codes, "scale": self.scale, **outer}


_FP8, _BF16, _FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
FORMATS = {
    "fp8": Format(_FP8, _FP32, "float-quantized", "channel"),
    "int8": Format(torch.int8, _FP32, "pack-quantized", "channel", multiple=4),
    "int4": Format(torch.uint8, _BF16, "pack-quantized", "group", (128, 64, 32)),
    "nvfp4": Format(torch.uint8, _FP8, "nvfp4-pack-quantized", "tensor_group", (16,)),
}


@dataclass
class Kind:
    """Figures of the weights of one place in the layers, such as `mixer.in_proj`."""

    numbers: int = 0
    squares: float = 0.0
    errors: float = 0.0
    """Sums of the squares of the numbers, and of the differences."""

    @property
    def error(self) -> float:
        """Root of the share of the squares that rounding changes."""
        return math.sqrt(self.errors / self.squares) if self.squares else 0.0


@dataclass
class Report:
    """The results of `quantize`."""

    bytes_before: int = 0
    bytes_after: int = 0
    quantized: dict[str, Kind] = field(default_factory=dict)
    """Quantized kinds by place in the layers."""
    kept: Counter[str] = field(default_factory=Counter)
    """Numbers that stay as they are, by reason."""
    text: dict[str, float] = field(default_factory=dict)
    """Figures of `compare`."""


def quantize(source: str | os.PathLike, target: str | os.PathLike, to: str) -> Report:
    """Write a folder with quantized weights. One tensor is held at a time.

    Args:
        source: a checkpoint of ours, or a model folder of Hugging Face, not quantized.
        target: a folder that does not exist, or is empty.
        to: one of `FORMATS`.

    Raises:
        CheckpointError: the source cannot be read or is quantized, or the target is not free.
    """
    folder, out, kind = checked_folder(source), Path(target), FORMATS[to]
    check_free(out)
    initialize_distributed()
    report = Report()
    opened = CheckpointFolder(folder)
    opened.check_quantization()
    config = opened.config(perform_initialization=False)
    files, values = opened.files, opened.values
    with torch.device("meta"):
        model = build_hybrid_model(config)
    found = find_tensors(model, opened)
    if found.packed.stored:
        raise CheckpointError(f"{folder} is quantized already. Name an unquantized folder.")
    is_theirs = opened.is_huggingface
    source = _Source(files, found, adapter_of(config) if is_theirs else None, config)
    places = dict(_places(model, source.maps, source.given))
    rest, shapes = {} if is_theirs else _rest_rows(model, source.given), {}
    for name in places:
        *lead, rows, columns = source.shape(name)
        shape = (*lead, rows - rest.get(name, 0), columns)
        if len(shape) > 2 and is_theirs:
            reason = f"experts of {values['model_type']}: no quantized form is published"
            report.kept[reason] += math.prod(shape)
        elif _GATES.search(name):
            report.kept[_STEERING] += math.prod(shape)
        else:
            shapes[name] = shape
            if name in rest:
                report.kept[_STEERING] += rest[name] * columns
    group = _group(kind, shapes.values())
    multiple = group or kind.multiple
    chosen = {n: s for n, s in shapes.items() if s[-1] % multiple == 0}
    for name in sorted(shapes.keys() - chosen.keys()):
        reason = f"rows that are no multiple of {multiple} numbers"
        report.kept[reason] += math.prod(shapes[name])
    writer = _Writer(source, kind, group, chosen, places, report, is_theirs)
    if is_theirs:
        values["quantization_config"] = _config(kind, group, source, chosen)
    for name in source.names:
        if name not in places:
            reason = "embeddings, output layer, norms, routers, convolutions, vectors"
            report.kept[reason] += math.prod(source.shape(name))
    plan = list(writer.plan())
    ready = partial(write_json, out / CONFIG_FILE, values)
    write_tensors(out, plan, writer.make, ready=ready)
    report.bytes_before = sum(
        math.prod(files.shape(n)) * files.dtype(n).itemsize for n in files.names()
    )
    report.bytes_after = sum(tensor.num_bytes for tensor in plan)
    for path in folder.iterdir():
        is_kept = path.suffix in _COPIED and not path.name.endswith(".index.json")
        if path.is_file() and path.name != CONFIG_FILE and is_kept:
            shutil.copy(path, out / path.name)
    return report


def pack_as(model: HybridModel, to: str) -> None:
    """Pack the weights of a model on the meta device as `quantize` would, so that it has the sizes
    of the loaded model. `to` is one of `FORMATS`."""
    kind, rest = FORMATS[to], _rest_rows(model, None)
    layers = {
        name: module
        for name, module in model.named_modules()
        if name.startswith("decoder.") and isinstance(module, PACKABLE)
    }
    group = _group(kind, [module.weight.shape for module in layers.values()])
    for name, module in layers.items():
        columns = module.weight.shape[-1]
        if columns % (group or kind.multiple) == 0:
            has_outer = "outer" in kind.dtypes
            rows = rest.get(model.canonical_name(f"{name}.weight"), 0)
            packing = Packing(kind.codes, kind.scale, group or columns, has_outer, num_rest=rows)
            replace_weight(module, PackedWeight(module.weight, packing))


def _places(model: HybridModel, maps: list, given: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield names of weights in the files that may be packed, and their places in the layers."""
    modules = {
        model.canonical_name(f"{name}.weight"): module for name, module in model.named_modules()
    }
    for tensor_map in maps:
        ours = tensor_map.ours[0]
        if isinstance(modules.get(ours), PACKABLE) and ours.startswith("decoder."):
            place = re.sub(r"^decoder\.layers\.\d+\.|\.weight$", "", ours)
            yield from ((given[name], place) for name in tensor_map.theirs)


def _rest_rows(model: HybridModel, given: dict[str, str] | None) -> dict[str, int]:
    """Count the rows of our projections that stay as they are, by given names or else by ours."""
    found = {}
    for name, parameter in model.named_parameters():
        cut = cut_of(parameter)
        if cut is not None and cut.names is not None and name.endswith("_proj.weight"):
            sizes = zip(cut.names, cut.sections)
            if rows := sum(size for section, size in sizes if section in _SENSITIVE):
                canonical = model.canonical_name(name)
                found[canonical if given is None else given[canonical]] = rows
    return found


def _group(kind: Format, shapes: Iterable[Sequence[int]]) -> int:
    """Return the columns that share a scale: the group for most numbers; 0 if all of a row do."""
    sizes = [(math.prod(shape), shape[-1]) for shape in shapes]

    def divided(group: int) -> tuple[int, int]:
        return sum(n for n, width in sizes if width % group == 0), group

    return max(kind.groups, key=divided, default=0)


@dataclass(frozen=True)
class _Piece:
    """A projection of one expert in a tensor of all."""

    name: str
    """Name of that tensor in the files."""
    expert: int
    index: int
    """Index among the expert's projections in the tensor."""
    found: Layout
    """Layout from the tensor to ours."""
    separate: Layout
    """Layout from projections of experts, one after the other, to ours."""

    def of(self, stack: Tensor) -> Tensor:
        """Return the projection's values in the tensor."""
        ours = self.found.to_ours([stack[self.expert : self.expert + 1]])
        return self.separate.to_theirs(ours)[self.index]


class _Source:
    """The tensors of a folder, with a name for each expert where quantized folders have that.

    Args:
        adapter: that of a folder of Hugging Face, None if the folder is ours.
    """

    def __init__(
        self, files: TensorFiles, found: FoundTensors, adapter: Adapter | None, config: HybridConfig
    ):
        self._files, self._pieces = files, dict[str, _Piece]()
        self.maps: list[TensorMap] = []
        """Maps of weights."""
        self.given = dict(found.given)
        """Names in the maps -> names here."""
        written = {} if adapter is None else {m.ours: m for m in adapter.tensors(config)}
        for tensor_map in found.maps:
            separate = tensor_map
            if tensor_map.ours in written and len(tensor_map.theirs) == 1:
                separate = adapter.one_by_one(written[tensor_map.ours], config)
            self.maps.append(separate)
            if separate.theirs != tensor_map.theirs:
                self._take_apart(tensor_map, separate)
        stacks = {piece.name for piece in self._pieces.values()}
        self.names = sorted({*files.names(), *self._pieces} - stacks)

    def _take_apart(self, tensor_map: TensorMap, separate: TensorMap) -> None:
        """Give a name to each expert in a tensor of all."""
        (theirs,) = tensor_map.theirs
        stack = self.given.pop(theirs)
        each = len(separate.theirs) // self._files.shape(stack)[0]
        prefix, own_prefix = (name.rpartition(".experts.")[0] for name in (theirs, stack))
        for i, name in enumerate(separate.theirs):
            own = own_prefix + name.removeprefix(prefix)
            piece = _Piece(stack, *divmod(i, each), tensor_map.layout, separate.layout)
            self.given[name], self._pieces[own] = own, piece

    def shape(self, name: str) -> tuple[int, ...]:
        if (piece := self._pieces.get(name)) is None:
            return self._files.shape(name)
        return tuple(piece.of(torch.empty(self._files.shape(piece.name), device="meta")).shape)

    def dtype(self, name: str) -> torch.dtype:
        piece = self._pieces.get(name)
        return self._files.dtype(name if piece is None else piece.name)

    def read(self, name: str) -> Tensor:
        """Read a tensor. Raise CheckpointError if it has NaN."""
        piece = self._pieces.get(name)
        value = self._files.read(name) if piece is None else piece.of(self._files.read(piece.name))
        check_numbers(name, value, self._files.folder)
        return value


@dataclass
class _Writer:
    """Makes the tensors of the new folder. Those of one weight must follow each other."""

    files: _Source
    kind: Format
    group: int
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the quantized part by names of weights: all rows of each, or the first ones."""
    places: dict[str, str]
    report: Report
    is_theirs: bool

    def __post_init__(self) -> None:
        self._of: dict[str, str] = {}
        self._last: tuple[str, dict[str, Tensor]] = "", {}

    def plan(self) -> Iterator[TensorPlan]:
        """Yield the plans of all tensors."""
        for weight in self.files.names:
            shape, dtype = self.files.shape(weight), self.files.dtype(weight)
            made = self._tensors(weight, torch.empty(shape, dtype=dtype, device="meta"))
            for name, tensor in made.items():
                self._of[name] = weight
                yield TensorPlan(name, tuple(tensor.shape), tensor.dtype)

    def make(self, name: str) -> Tensor:
        """Make a tensor of the plan."""
        weight = self._of[name]
        if self._last[0] != weight:
            self._last = weight, self._tensors(weight, self.files.read(weight))
        return self._last[1][name]

    def _tensors(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a weight in the new folder, by their names there."""
        if (shape := self.shapes.get(name)) is None:
            return {name: weight}
        packed, rest = weight.split([shape[-2], weight.shape[-2] - shape[-2]], -2)
        if not self.is_theirs:
            experts = packed if weight.dim() > 2 else packed[None]
            each = [self._quantized(name, expert) for expert in experts]
            stacks = {part: torch.stack([expert[part] for expert in each]) for part in each[0]}
            found = {f"{name}.{part}": t.view(*shape[:-1], -1) for part, t in stacks.items()}
            return found | ({f"{name}.rest": rest} if rest.numel() else {})
        parts = self._quantized(name, packed)
        codes, found = parts["codes"], {f"{name}_scale": parts["scale"]}
        if self.kind.method == "float-quantized":
            return {name: codes, **found}
        if "outer" in parts:  # stored as a divisor
            found[f"{name}_global_scale"] = fp4_divisor(packed).flatten()
            return {f"{name}_packed": codes, **found}
        return {f"{name}_packed": in_words(codes), **found, f"{name}_shape": torch.tensor(shape)}

    def _quantized(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Return the parts of a matrix, quantized by row, and add its rounding to the report."""
        weight = weight.float()
        parts = quantized(weight, self.kind.dtypes, (1, self.group))
        if "outer" in parts:
            parts["outer"] = parts["outer"].expand(len(weight), 1)
        if weight.is_meta:
            return parts
        difference = unpack(**parts, dtype=torch.float32).sub_(weight)
        kind = self.report.quantized.setdefault(self.places[name], Kind())
        kind.numbers += weight.numel()
        kind.squares += weight.norm().item() ** 2
        kind.errors += difference.norm().item() ** 2
        return parts


def _config(kind: Format, group: int, files: _Source, quantized: Collection[str]) -> dict[str, Any]:
    """Return the quantization_config, in the terms of compressed-tensors."""
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False, "observer": "minmax"}
    codes = format_of(kind.codes, kind.scale)
    number = "float" if "fp" in codes.name else "int"
    weights |= {"num_bits": codes.bits, "type": number, "strategy": kind.strategy}
    if group:
        weights["group_size"] = group
    # The head has no tensor of its own where it is tied.
    others = [HEAD.removesuffix(".weight")] + [
        name.removesuffix(".weight")
        for name in files.names
        if name.endswith(".weight")
        and len(files.shape(name)) == 2
        and name not in (*quantized, HEAD)
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": kind.method,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": others,
        "kv_cache_scheme": None,
    }


@torch.no_grad()
def compare(
    source: str | os.PathLike, target: str | os.PathLike, ids: list[int], device: str | None = None
) -> dict[str, float]:
    """Compare two models on a text: `kl` (nats a token, of the second from the first),
    `perplexity_before`, `perplexity_after`, and `same_top_1`, a share.

    Args:
        ids: token ids of the text, in one sequence; at least two.
        device: see `load_pretrained`.
    """
    log_probs = []
    for folder in (source, target):
        model, _ = load_pretrained(folder, device=device)
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
        positions = torch.arange(len(ids), device=tokens.device)[None]
        log_probs.append(model(tokens, positions, None)[0].float().log_softmax(-1))
        del model
    before, after = log_probs
    following = tokens[0, 1:, None]
    loss = [-each[:-1].gather(1, following).mean().item() for each in log_probs]
    return {
        "tokens": len(ids),
        "kl": (before.exp() * (before - after)).sum(-1).mean().item(),
        "perplexity_before": math.exp(loss[0]),
        "perplexity_after": math.exp(loss[1]),
        "same_top_1": (before.argmax(-1) == after.argmax(-1)).float().mean().item(),
    }


def render(report: Report) -> str:
    lines = [f"{'quantized':<44} {'numbers':>15} {'rounding':>10}"]
    for place, kind in sorted(report.quantized.items()):
        lines.append(f"{place:<44} {kind.numbers:>15,} {kind.error:>10.2%}")
    lines += ["", f"{'kept as it is':<64} {'numbers':>15}"]
    lines += [f"{reason:<64} {count:>15,}" for reason, count in report.kept.items()]
    ratio = report.bytes_after / report.bytes_before
    lines += ["", f"{report.bytes_before:,} bytes before, {report.bytes_after:,} now ({ratio:.0%})"]
    if found := report.text:
        lines.append(
            f"over {found['tokens']:,} tokens: KL {found['kl']:.2e}, perplexity "
            f"{found['perplexity_before']:.4g} -> {found['perplexity_after']:.4g}, "
            f"same likeliest token {found['same_top_1']:.1%}"
        )
    return "\n".join(lines)
