"""WeightLoader: new weights for the model of an engine, tensor by tensor.

Tensors are whole and named as in a checkpoint, ours or Hugging Face's; each rank takes its pieces
of them by the maps that load checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from megatron_hybrid.checkpoints.checkpoint import (
    FLOATS,
    HEAD,
    TensorSource,
    adapter_of,
    check_map,
    checked_load,
    copy_piece,
    own_tensors,
    own_weights,
)
from megatron_hybrid.checkpoints.huggingface.base import TensorMap
from megatron_hybrid.checkpoints.huggingface.layouts import SAME, stacked
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.inference.weight_transfer import FolderPart, Part
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.layer_pattern import prediction_symbols
from megatron_hybrid.models.packed_weight import PackedWeight
from megatron_hybrid.models.parameter_names import (
    canonical_name,
    is_of_prediction,
    is_parameter,
    separate_expert,
)
from megatron_hybrid.models.sharding.gathering import num_experts_of, own_piece
from megatron_hybrid.models.sharding.stage_copies import EMBEDDING, OUTPUT_LAYER
from megatron_hybrid.ranks import Ranks

Pairs = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class WeightLoader:
    """Loads what one call of `DynamicInferenceEngine.load_weights` gives. Make it on all ranks.

    Raises:
        ValueError: the model's experts are separate, as Megatron built them.
    """

    def __init__(self, model: HybridModel, ranks: Ranks):
        self.model, self._ranks = model, ranks
        self.parts = own_tensors(model)
        self.own = own_weights(model)
        if any(separate_expert(name) for name in self.own):
            raise ValueError(
                "load_weights cannot fill the separate experts of a model of from_megatron: load "
                "them into Megatron's model, whose parameters it serves, and call update_weights()"
            )
        experts: dict[str, int | None] = {}
        for of_rank in ranks.gather({name: num_experts_of(t) for name, t in self.own.items()}):
            experts |= of_rank
        self._all, self.names = experts.keys(), _Names(model, experts)
        self.written: set[str] = set()
        """Names of this rank's tensors that were written."""
        self._parts = _Pass(self, writes=True)

    def load(self, pairs: Pairs, is_led: bool) -> None:
        """Write the tensors into the model. If all ranks have them in a mapping or a sequence, they
        are checked before the first write. After an error the others are still taken, and dropped:
        to make them may need collectives that other processes are in.

        Args:
            pairs: names and tensors; not looked at on other ranks than the first, if `is_led`.
            is_led: whether only the first rank has pairs.

        Raises:
            TypeError: not pairs of names and tensors.
            CheckpointError: see `DynamicInferenceEngine.load_weights`.
        """
        receives = is_led and not self._ranks.is_first
        pairs = () if receives else _listed(pairs)
        if all(self._ranks.gather(isinstance(pairs, Sequence))):
            with self._ranks.together("checking new weights"):
                heads = self._ranks.broadcast([_sent(p, "meta") for p in pairs]) if is_led else ()
                check = _Pass(self, writes=False)
                check.take(heads if receives else pairs)
                check.end()
        try:
            self._parts.take(self._of_first_rank(pairs) if is_led else pairs)
            self._parts.end()
        except CheckpointError as error:
            if not self.written:
                raise
            raise CheckpointError(
                f"{error} {len(self.written)} tensors of the model were written before: load all "
                "of them again."
            ) from error

    def write(self, name: str, whole: Tensor) -> None:
        """Write this rank's piece of a whole tensor of ours; where it is packed, to nearest."""
        if isinstance(self.own[name], PackedWeight):
            for part, value in self.model.packed_source.quantized(name, whole):
                copy_piece(value, self.parts[part], self.model)
        else:
            copy_piece(whole, self.own[name], self.model)
        self.written.add(name)

    def holds(self, name: str, whole: Tensor) -> bool:
        """Whether a packed weight of this rank is what `write` would make of it."""
        pieces = (
            (self.parts[part], own_piece(value, self.parts[part], self.model.pg_collection))
            for part, value in self.model.packed_source.quantized(name, whole)
        )
        return all(torch.equal(own.float(), value.to(own).float()) for own, value in pieces)

    def load_part(self, part: Part) -> None:
        """Write some of the tensors; `end` when all are there. Every rank has the same part. A
        folder with packed weights is taken whole, as it is.

        Raises:
            CheckpointError: as `load`; of this part nothing was written, unless a tensor was given
                twice, or the trainer failed.
        """
        if isinstance(part, FolderPart) and part.is_packed:
            self._load_packed(part.path)
            return
        try:
            with self._ranks.together("checking new weights"):
                check = _Pass(self, writes=False)
                check.take(part.heads)
                check.require_known()
        except Exception:
            part.drop()
            raise
        self._parts.take(part.tensors())

    def _load_packed(self, folder: Path) -> None:
        """Write the weights of a folder that is packed as the model is."""
        with ExitStack() as stack:
            with self._ranks.together("checking new weights"):
                checked = checked_load(self.model, folder, self._all, True, keeps_packing=True)
                write = stack.enter_context(checked)
            self.written |= self.own.keys()
            write()

    def end(self) -> None:
        """Raise CheckpointError if the parts lack something that belongs to what they had."""
        self._parts.end()

    def _of_first_rank(self, pairs: Iterable) -> Iterator:
        """The pairs of the first rank, on all ranks."""
        if self._ranks.is_first:
            for pair in pairs:
                self._ranks.broadcast(_sent(pair, "cpu"))
                yield pair
            self._ranks.broadcast(None)
        else:
            while (pair := self._ranks.broadcast(None)) is not None:
                yield pair


class _Names:
    """Which tensors of a model a name belongs to.

    Args:
        experts: names of all tensors of all ranks, and the number of experts that one holds.
    """

    def __init__(self, model: HybridModel, experts: Mapping[str, int | None]):
        self._config, self._adapter = model.config, adapter_of(model.config)
        self.maps = [TensorMap((name,), (name,)) for name in experts]
        self.maps += [
            TensorMap((name,), tuple(f"{name}{i}" for i in range(number)), stacked())
            for name, number in experts.items()
            if number is not None
        ]
        layout, self._first_theirs = SAME, len(self.maps)
        self._written: list[TensorMap] = []  # for each of theirs, as the adapter writes it
        if self._adapter is not None:
            theirs = list(self._adapter.tensors(self._config))
            layout = next(m.layout for m in theirs if m.ours == (EMBEDDING,))
            others = [
                self._adapter.as_found(m, self._config, _AllBut.fromkeys(m.theirs)) for m in theirs
            ]
            separate = [self._adapter.one_by_one(m, self._config) for m in theirs]
            # Where there is no other spelling, the same again.
            self.maps += theirs + others + separate
            self._written = theirs * 3
        if self._config.share_embeddings_and_output_weights:
            self.maps += [
                TensorMap((EMBEDDING,), (OUTPUT_LAYER,)),
                TensorMap((EMBEDDING,), (HEAD,), layout),
            ]
        self._numbers: dict[str, int] = {}
        for number, tensor_map in enumerate(self.maps):
            for name in tensor_map.theirs:
                self._numbers.setdefault(name, number)

    def find(self, name: str) -> tuple[int, str] | None:
        """The number of the map that a given name is one of `theirs` of, and its spelling there;
        None: of no map."""
        ours = canonical_name(name)
        if (expert := separate_expert(ours)) is not None:
            ours = f"{expert[0]}{expert[1]}"
        for spelling in (ours, self._text_name(name)):
            if spelling in self._numbers:
                return self._numbers[spelling], spelling
        return None

    def as_found(self, number: int, parts: Mapping[str, Tensor]) -> TensorMap:
        """A map for tensors of these shapes."""
        index = number - self._first_theirs
        if not 0 <= index < len(self._written):
            return self.maps[number]
        shapes = {name: tuple(tensor.shape) for name, tensor in parts.items()}
        return self._adapter.as_found(self._written[index], self._config, shapes)

    def require_known(self, names: Iterable[str], unknown: Iterable[str]) -> None:
        """Raise CheckpointError if one of `unknown` holds something. names: all that were given."""
        ignored: set[str] = set()
        if not prediction_symbols(self._config.layer_pattern):
            ignored = set(filter(is_of_prediction, names))
        if self._adapter is not None:
            ignored |= self._adapter.ignored_names({*map(self._text_name, names)}, self._config)
        if left := sorted(name for name in unknown if self._text_name(name) not in ignored):
            more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            theirs = (
                "those of Hugging Face are known for models that were loaded from such a folder"
                if self._adapter is None
                else "or as in its Hugging Face folder"
            )
            raise CheckpointError(
                f"the model has no tensor {left[0]}{more}: name tensors as in a checkpoint of the "
                f"whole model; {theirs}."
            )

    def _text_name(self, name: str) -> str:
        return name if self._adapter is None else self._adapter.text_name(name)


class _AllBut(dict):
    """Names of all tensors but its keys, for `Adapter.as_found`."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


class _Pass:
    """Takes all pairs once.

    Args:
        writes: False: they are only checked.
    """

    def __init__(self, loader: WeightLoader, writes: bool):
        self._loader, self._writes = loader, writes
        self._names, self._own = loader.names, loader.own
        self._parts: dict[int, dict[str, Tensor]] = {}  # of maps that lack others yet
        self._given: set[str] = set()
        self._unknown: list[str] = []
        self._taken: dict[str, Callable[[], Tensor]] = {}  # names of ours, and what they are now

    def take(self, pairs: Iterable) -> None:
        """Take pairs until their end, also after an error, which is then raised."""
        failure: Exception | None = None
        for pair in pairs:
            if failure is None:
                try:
                    self._take(_name_of(pair), pair[1])
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Raise CheckpointError for unknown names, and for tensors without others that belong to
        them."""
        for number, parts in self._parts.items():
            tensor_map = self._names.maps[number]
            missing = [name for name in tensor_map.theirs if name not in parts]
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise CheckpointError(
                f"{next(iter(parts))} was given without {missing[0]}{more}: they are one tensor of "
                f"the model, {tensor_map.ours[0]}, so give all of them in one update."
            )
        self.require_known()

    def require_known(self) -> None:
        """Raise CheckpointError if the model has no such tensor as one that was given."""
        self._names.require_known(self._given, self._unknown)

    def _take(self, name: str, tensor: Tensor) -> None:
        if not is_parameter(name):  # Transformer Engine's bookkeeping
            return
        _check_tensor(name, tensor)
        self._given.add(name)
        if (found := self._names.find(name)) is None:
            self._unknown.append(name)
            return
        number, spelling = found
        tensor_map = self._names.maps[number]
        parts = self._parts.setdefault(number, {})
        if spelling in parts:
            raise CheckpointError(f"{name} was given twice: give each tensor once.")
        tensor = tensor.detach()
        waits = len(parts) + 1 < len(tensor_map.theirs)
        if not self._own.keys() & set(tensor_map.ours):
            tensor = tensor.to("meta")  # another stage's
        elif waits and self._writes:
            tensor = tensor.clone()  # the caller may write the next one into the same memory
        parts[spelling] = tensor
        if not waits:
            del self._parts[number]
            self._complete(self._names.as_found(number, parts), parts)

    def _complete(self, tensor_map: TensorMap, parts: dict[str, Tensor]) -> None:
        """Take tensors that are all there."""
        own = [name for name in tensor_map.ours if name in self._own]
        packed = self._loader.model.packed_source
        if self._writes and packed is not None:
            for name in tensor_map.ours:
                packed.note_change(name)
        if not own:
            return
        source = TensorSource(
            "what load_weights was given",
            {name: name for name in parts},
            lambda name: tuple(parts[name].shape),
            lambda name: parts[name].dtype,
            parts.__getitem__,
        )
        check_map(tensor_map, self._own, source, FLOATS)

        def values() -> dict[str, Tensor]:
            theirs = [parts[name] for name in tensor_map.theirs]
            return dict(zip(tensor_map.ours, tensor_map.layout.to_ours(theirs), strict=True))

        made = values() if self._writes or self._taken.keys() & set(own) else {}
        for name in own:
            if name in self._taken:
                self._require_equal(name, made[name], next(iter(parts)))
            elif self._writes:
                self._loader.write(name, made[name])
                self._taken[name] = lambda name=name: self._own[name]
            else:
                self._taken[name] = lambda name=name: self._piece(name, values()[name])

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece, as it is stored."""
        own = self._own[name]
        return own_piece(whole, own, self._loader.model.pg_collection).to(own.device, own.dtype)

    def _require_equal(self, name: str, whole: Tensor, given: str) -> None:
        """Check one that was given before, under another name, as tied ones are."""
        before = self._taken[name]()
        if isinstance(before, PackedWeight):
            is_equal = self._loader.holds(name, whole)
        elif whole.is_meta or before.is_meta:  # the write of this tensor checks it
            return
        else:
            is_equal = torch.equal(self._piece(name, whole), before)
        if not is_equal:
            raise CheckpointError(
                f"{given} differs from what was given before for the same tensor of the model, "
                f"{name}: give it once."
            )


def _listed(pairs: Pairs) -> Iterable:
    """A list of pairs that are in memory, or an iterator over others."""
    if isinstance(pairs, Mapping):
        return list(pairs.items())
    if isinstance(pairs, Sequence):
        return list(pairs)
    if isinstance(pairs, Iterable):
        return iter(pairs)
    raise TypeError(
        "load_weights takes a mapping of names to tensors, or an iterable of pairs of them, got "
        f"{type(pairs).__name__}"
    )


def _name_of(pair: object) -> str:
    if isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str):
        return pair[0]
    raise TypeError(f"load_weights takes pairs of a name and a tensor, got a {type(pair).__name__}")


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor) or hasattr(tensor, "full_tensor"):
        remedy = ": give its full_tensor()" if isinstance(tensor, Tensor) else ""
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a whole tensor{remedy}")


def _sent(pair: object, device: str) -> object:
    """A pair to be sent to other ranks; of a view only its own elements."""
    name, tensor = _name_of(pair), pair[1]
    if isinstance(tensor, Tensor):
        tensor = tensor.detach().to(device, copy=True).contiguous()
    return name, tensor
