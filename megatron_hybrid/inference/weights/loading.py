"""WeightLoader: checks and writes new weights of the model of an engine, tensor by tensor.

Tensors are whole and named as in a checkpoint, ours or Hugging Face's; each rank takes its pieces
of them by the maps that load checkpoints.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from megatron_hybrid.checkpoints.folder import FLOATS, adapter_of
from megatron_hybrid.checkpoints.found_tensors import HEAD
from megatron_hybrid.checkpoints.huggingface.base import TensorMap
from megatron_hybrid.checkpoints.huggingface.layouts import SAME, stacked
from megatron_hybrid.checkpoints.model_tensors import own_tensors, own_weights
from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.checkpoints.tensor_source import TensorSource, check_map, copy_piece
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.packed_weight import PackedWeight
from megatron_hybrid.models.parameter_names import (
    canonical_name,
    is_of_prediction,
    is_parameter,
    separate_expert,
)
from megatron_hybrid.models.sharding.gathering import num_experts_of, own_piece
from megatron_hybrid.models.sharding.stage_copies import EMBEDDING, OUTPUT_LAYER


class WeightLoader:
    """Checks and writes the tensors of one update. Make it on all ranks, and give them the same
    names in the same order.

    Raises:
        ValueError: the model's experts are separate, as Megatron built them.
    """

    def __init__(self, model: HybridModel, ranks: Ranks):
        self.model = model
        self.parts = own_tensors(model)
        self.own = own_weights(model)
        if any(separate_expert(name) for name in self.own):
            raise ValueError(
                "load_weights cannot fill the separate experts of a model of from_megatron: load "
                "them into Megatron's model, whose parameters it serves, and call update_weights()"
            )
        self.of_all: dict[str, int | None] = {}
        for of_rank in ranks.gather({name: num_experts_of(t) for name, t in self.own.items()}):
            self.of_all |= of_rank
        self.names = _Names(model, self.of_all)
        self.begun: set[str] = set()
        """Names of the tensors of the model of which any rank may have written something."""
        self.checks = _Pass(self, writes=False)
        """Takes each tensor first; its bytes may be unknown (meta)."""
        self.writes = _Pass(self, writes=True)
        """Takes a tensor that was checked, and writes it as soon as all others that belong to it
        have come."""

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype that a given tensor has in this rank's part of the model, or None."""
        number, _ = self.names.find(name) or (None, name)
        ours = () if number is None else self.names.maps[number].ours
        return next((self.own[each].dtype for each in ours if each in self.own), None)

    def write_piece(self, name: str, whole: Tensor) -> None:
        """Write this rank's piece of a whole tensor of ours, rounded to nearest if it is packed."""
        if isinstance(self.own[name], PackedWeight):
            for part, value in self.model.packed_source.requantize(name, whole):
                copy_piece(value, self.parts[part], self.model)
        else:
            copy_piece(whole, self.own[name], self.model)

    def holds(self, name: str, whole: Tensor) -> bool:
        """Return whether a packed weight of this rank equals what `write_piece` would write."""
        pieces = (
            (self.parts[part], own_piece(value, self.parts[part], self.model.pg_collection))
            for part, value in self.model.packed_source.requantize(name, whole)
        )
        return all(torch.equal(own.float(), value.to(own).float()) for own, value in pieces)


class _Names:
    """Finds the tensors of a model that a name belongs to.

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
            for tensor_map in theirs:
                forms = [tensor_map, *self._adapter.spellings(tensor_map, self._config)]
                self.maps += forms
                self._written += [tensor_map] * len(forms)
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
        """Return the number of the map that has a given name among `theirs`, and the name's
        spelling there, or None."""
        ours = canonical_name(name)
        if (expert := separate_expert(ours)) is not None:
            ours = f"{expert[0]}{expert[1]}"
        for spelling in (ours, self._text_name(name)):
            if spelling in self._numbers:
                return self._numbers[spelling], spelling
        return None

    def as_found(self, number: int, parts: Mapping[str, Tensor]) -> TensorMap:
        """Return the map with this number for tensors of these shapes."""
        index = number - self._first_theirs
        if not 0 <= index < len(self._written):
            return self.maps[number]
        shapes = {name: tuple(tensor.shape) for name, tensor in parts.items()}
        return self._adapter.as_found(self._written[index], self._config, shapes)

    def require_known(self, names: Iterable[str], unknown: Iterable[str]) -> None:
        """Raise CheckpointError if one of `unknown` may not be ignored. names: all given ones."""
        ignored: set[str] = set()
        if not self._config.pattern.predictions:
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


class _Pass:
    """Takes each pair of an update once.

    Args:
        writes: whether they are written; else they are only checked.
    """

    def __init__(self, loader: WeightLoader, writes: bool):
        self._loader, self._writes = loader, writes
        self._names, self._own = loader.names, loader.own
        self._parts: dict[int, dict[str, Tensor]] = {}  # of maps that lack others yet
        self._given: set[str] = set()
        self._unknown: list[str] = []
        self._taken: dict[str, Callable[[], Tensor]] = {}  # names of ours, and what they are now

    def require_complete(self) -> None:
        """Raise CheckpointError for unknown names, and for tensors that lack others which belong to
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
        """Raise CheckpointError if the model lacks a tensor that was given."""
        self._names.require_known(self._given, self._unknown)

    def take(self, name: str, tensor: object) -> None:
        """Take a pair.

        Raises:
            TypeError: it is not a whole tensor.
            CheckpointError: it does not fit, or was given before.
        """
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
            tensor = tensor.to("meta")  # it belongs to another stage
        elif waits and self._writes:
            tensor = tensor.clone()  # the caller may write the next one into the same memory
        parts[spelling] = tensor
        if not waits:
            del self._parts[number]
            self._complete(self._names.as_found(number, parts), parts)

    def _complete(self, tensor_map: TensorMap, parts: dict[str, Tensor]) -> None:
        if self._writes:  # on all ranks, before the first byte
            self._loader.begun |= set(tensor_map.ours)
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
            FLOATS,
        )
        check_map(tensor_map, self._own, source)

        def values() -> dict[str, Tensor]:
            theirs = [parts[name] for name in tensor_map.theirs]
            return dict(zip(tensor_map.ours, tensor_map.layout.to_ours(theirs), strict=True))

        made = values() if self._writes or self._taken.keys() & set(own) else {}
        for name in own:
            if name in self._taken:
                self._require_equal(name, made[name], next(iter(parts)))
            elif self._writes:
                self._loader.write_piece(name, made[name])
                self._taken[name] = lambda name=name: self._own[name]
            else:
                self._taken[name] = lambda name=name: self._piece(name, values()[name])

    def _piece(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's piece, as it is stored."""
        own = self._own[name]
        return own_piece(whole, own, self._loader.model.pg_collection).to(own.device, own.dtype)

    def _require_equal(self, name: str, whole: Tensor, given: str) -> None:
        """Check a tensor that was given before under another name, as tied ones are."""
        if whole.is_meta:  # the write of this tensor checks it
            return
        if isinstance(before := self._taken[name](), PackedWeight):
            is_equal = self._loader.holds(name, whole)
        else:
            is_equal = torch.equal(self._piece(name, whole), before)
        if not is_equal:
            raise CheckpointError(
                f"{given} differs from what was given before for the same tensor of the model, "
                f"{name}: give it once."
            )


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor) or hasattr(tensor, "full_tensor"):
        remedy = ": give its full_tensor()" if isinstance(tensor, Tensor) else ""
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a whole tensor{remedy}")


def require_values(name: str, tensor: object) -> None:
    """Raise CheckpointError for a tensor without plain values in memory, which cannot be copied."""
    if not isinstance(tensor, Tensor):
        return
    if is_lazy(tensor):
        kind = "has no shape yet"
    elif tensor.is_meta:
        kind = "is on the meta device"
    elif tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
        kind = "is nested" if tensor.is_nested else f"is {tensor.dtype} with {tensor.layout}"
    else:
        return
    raise CheckpointError(f"{name} {kind}: give a dense tensor with values, such as to_dense()")
