"""StateLayout: the tensors in a live slot, and their encoding in a checkpoint.

A live slot holds the states of all layers in their own dtypes, then the last hidden state. With the
encoding "exact" a checkpoint is the bytes of a slot. With another it holds first the exact parts,
in the same order, then the states that may be rounded (`StateTensor.decay`).
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron_hybrid.cache.pages.spec import aligned
from megatron_hybrid.models.mixers.base import LayerCache
from megatron_hybrid.ops import StatesCodec


@dataclass(frozen=True)
class Field:
    """A tensor in a row of bytes."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view(self, rows: Tensor) -> Tensor:
        """View the tensor in each row of uint8 `[S, bytes]` as `[S, *shape]`."""
        end = self.offset + self.num_bytes
        return rows[:, self.offset : end].view(self.dtype).unflatten(1, self.shape)


class CastCodec:
    """Encodes tensors one after the other, each in its own dtype."""

    def __init__(self, shapes: list[torch.Size], dtypes: list[torch.dtype]):
        sizes = [aligned(shape.numel() * dtype.itemsize) for shape, dtype in zip(shapes, dtypes)]
        *offsets, self.num_bytes = accumulate(sizes, initial=0)
        self._fields = [Field(*field) for field in zip(offsets, shapes, dtypes)]

    def encode(self, tensors: list[Tensor]) -> Tensor:
        """Return the bytes, uint8 `[num_bytes]`."""
        code = tensors[0].new_zeros(self.num_bytes, dtype=torch.uint8)
        for field, tensor in zip(self._fields, tensors):
            field.view(code[None])[0].copy_(tensor)
        return code

    def decode(self, code: Tensor) -> list[Tensor]:
        """Return the tensors in their dtypes, views of `code`."""
        return [field.view(code[None])[0] for field in self._fields]


class StateLayout:
    """The parts of a slot and of a checkpoint. If `is_exact`, they are the same bytes.

    Args:
        layers: cached tensors of each layer, in layer order.
        hidden_size: width of the last hidden state.
        dtype: of the last hidden state.
        encoding: one of `STATE_ENCODINGS`.
    """

    def __init__(
        self, layers: list[LayerCache], hidden_size: int, dtype: torch.dtype, encoding: str
    ):
        self.is_exact = encoding == "exact"
        self.fields: dict[tuple[int, str], Field] = {}
        rounded, decays = [], []
        self.state_bytes = 0
        for number, layer in enumerate(layers, start=1):
            for state in layer.states:
                field = Field(self.state_bytes, torch.Size(state.shape), state.dtype)
                self.fields[number, state.name] = field
                self.state_bytes += aligned(field.num_bytes)
                if state.decay is not None and not self.is_exact:
                    rounded.append(field)
                    decays.append(state.decay)
        self.hidden = Field(self.state_bytes, torch.Size((hidden_size,)), dtype)

        exact = [field for field in self.fields.values() if field not in rounded] + [self.hidden]
        self._groups = [(exact, CastCodec([f.shape for f in exact], [f.dtype for f in exact]))]
        if rounded:
            shapes = [field.shape for field in rounded]
            if encoding == "bf16":
                codec = CastCodec(shapes, [torch.bfloat16] * len(shapes))
            else:
                codec = StatesCodec(shapes, decays)
            self._groups.append((rounded, codec))
        sizes = [aligned(codec.num_bytes) for _, codec in self._groups]
        self._bounds = list(pairwise(accumulate(sizes, initial=0)))
        self.encoded_state_bytes = sum(sizes) - aligned(self.hidden.num_bytes)

    def encode(self, slot: Tensor, num_bytes: int) -> Tensor:
        """Encode a slot's bytes into a checkpoint, uint8 `[num_bytes]`, zeros after its parts."""
        checkpoint = slot.new_zeros(num_bytes)
        for (start, _), (fields, codec) in zip(self._bounds, self._groups):
            code = codec.encode([field.view(slot[None])[0] for field in fields])
            checkpoint[start : start + len(code)] = code
        return checkpoint

    def decode(self, checkpoint: Tensor, slot: Tensor) -> None:
        """Decode a checkpoint, uint8, into a slot's bytes."""
        for (start, _), (fields, codec) in zip(self._bounds, self._groups):
            tensors = codec.decode(checkpoint[start : start + codec.num_bytes])
            for field, tensor in zip(fields, tensors):
                field.view(slot[None])[0].copy_(tensor)
