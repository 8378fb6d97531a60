"""CachePool: the bytes of the pages in one pool, and the live slots.

`cache/` assigns the pages; this file moves the bytes. A page holds, for one block of tokens, the K
and V of some layers of one attention group, or a piece of a checkpoint. A live slot is the
contiguous state of one request, which the kernels read and write; a checkpoint is a slot's bytes
cut into pages (exact: one indexed copy for all kinds of layers; else encoded), with references to
local blocks.

Shape letters: n pages, B tokens of a block, K heads, D head dim, S slots.
"""

import ctypes
import math
import mmap
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup, aligned, common_spec, group_keys
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.memory.state_layout import StateLayout
from megatron_hybrid.models.flops import attention_parity
from megatron_hybrid.models.mixers.base import KVShape, LayerCache
from megatron_hybrid.ops.to_device import to_device

_COPIED_ROWS = 256
"""Pages or live slots that one copy to or from host memory takes at most."""


def cache_spec_of(
    layers: list[LayerCache],
    hidden_size: int,
    dtype: torch.dtype,
    block_size_tokens: int,
    state_encoding: str = "exact",
    attention_parity: float = math.inf,
    hidden_dtype: torch.dtype | None = None,
) -> CacheSpec:
    """Return the cache spec of a model.

    Args:
        layers: cached tensors of each layer of this rank (`model.cache_requirements()`).
        hidden_size: width of the last hidden state, kept with each checkpoint.
        dtype: of K and V.
        block_size_tokens: tokens of a block.
        state_encoding: of the states in checkpoints, one of `STATE_ENCODINGS`.
        attention_parity: `models.flops.attention_parity` of the model; inf: values ignore the work
            of attention.
        hidden_dtype: of the last hidden state, that of the weights; default `dtype`.
    """
    shapes = _kv_shapes(layers)
    layout = StateLayout(layers, hidden_size, hidden_dtype or dtype, state_encoding)
    return CacheSpec(
        block_size_tokens=block_size_tokens,
        groups=_kv_groups(layers, shapes, dtype),
        state_bytes=layout.state_bytes,
        hidden_bytes=aligned(layout.hidden.num_bytes),
        encoded_state_bytes=layout.encoded_state_bytes,
        attention_parity=attention_parity,
    )


def full_bytes(
    layers: list[LayerCache], spec: CacheSpec, dtype: torch.dtype
) -> tuple[int, int, int]:
    """Count the bytes of these layers over all tensor-parallel ranks: of their states in a
    checkpoint, of the last hidden state, and of the full-attention KV of a token.

    spec: `cache_spec_of` them.
    """
    states = sum(aligned(state.full_bytes) for layer in layers for state in layer.states)
    if spec.state_bytes:
        states = states * aligned(spec.encoded_state_bytes) // spec.state_bytes
    shapes = [layer.kv for layer in layers if layer.kv is not None and not layer.kv.is_local]
    widths = sum(shape.full_heads * (shape.head_dim + shape.value_dim) for shape in shapes)
    return states, aligned(spec.hidden_bytes), widths * dtype.itemsize


def agree_on_spec(
    spec: CacheSpec,
    full: tuple[int, int, int],
    weights: float,
    pairs: float,
    ranks: Ranks,
    stage: int = 0,
) -> CacheSpec:
    """Return one spec for all ranks, so that they count, value and evict alike.

    Args:
        spec: of the layers of this rank; the block size is that of all.
        full: `full_bytes` of these layers.
        weights, pairs: `models.flops.token_flops` of these layers.
        stage: pipeline stage of this rank.
    """
    if ranks.size == 1:
        return replace(spec, attention_parity=attention_parity(weights, pairs))
    declared = ranks.gather((spec, weights, pairs))
    states, hidden, kv = zip(*dict(ranks.gather((stage, full))).values())
    specs = [each for each, _, _ in declared]
    # Summed in rank order: the same bits on all ranks.
    weights, pairs = (sum(numbers) for numbers in zip(*(work for _, *work in declared)))
    model_bytes = sum(states) + max(hidden), sum(kv)
    return common_spec(specs, attention_parity(weights, pairs), model_bytes)


def _kv_groups(
    layers: list[LayerCache], shapes: list[KVShape], dtype: torch.dtype
) -> tuple[KVGroup, ...]:
    """Make one attention group for each shape."""
    return tuple(
        KVGroup(
            num_layers=sum(layer.kv == shape for layer in layers),
            bytes_per_token=shape.num_heads * (shape.head_dim + shape.value_dim) * dtype.itemsize,
            window=shape.window,
            chunk=shape.chunk,
        )
        for shape in shapes
    )


def _kv_shapes(layers: list[LayerCache]) -> list[KVShape]:
    """List the distinct KV shapes, one for each attention group, full attention first."""
    shapes = dict.fromkeys(layer.kv for layer in layers if layer.kv is not None)
    return sorted(shapes, key=lambda shape: shape.is_local)


@torch.inference_mode(False)  # a tensor made inside could not be written outside
def _zeros(rows: int, row_bytes: int, device: torch.device, what: str) -> Tensor:
    """Allocate uint8 [rows, row_bytes]. what: name of the rows and the remedy, for the error."""
    try:
        tensor = torch.empty(rows, row_bytes, dtype=torch.uint8, device=device)
        _zero(tensor)
        return tensor
    except RuntimeError as error:
        if device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise MemoryError(
            f"{device} has no room for {rows * row_bytes} bytes of {what} ({error})"
        ) from error


def _zero(tensor: Tensor) -> None:
    """Fill a contiguous uint8 tensor with zeros. On a CPU the system takes back the memory pages
    inside of it, and gives zeros for each at its first use, so that unused parts of the pool take
    neither memory nor time."""
    if tensor.device.type != "cpu" or tensor.numel() < 2 * mmap.PAGESIZE:
        tensor.zero_()
        return
    bytes_n, address = tensor.view(-1), tensor.data_ptr()
    first = -address % mmap.PAGESIZE
    end = len(bytes_n) - (address + len(bytes_n)) % mmap.PAGESIZE
    bytes_n[first] = 1
    _madvise(address + first, end - first, mmap.MADV_DONTNEED)
    if bytes_n[first]:  # refused, or not for memory of this kind
        tensor.zero_()
        return
    bytes_n[:first] = 0
    bytes_n[end:] = 0


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def _to_host(tensor: Tensor, rows: Tensor) -> Tensor:
    """Copy rows (int64 [n]) to host memory, a few at a time, as the device may be full."""
    copied = torch.empty(len(rows), tensor.shape[1], dtype=tensor.dtype)
    for target, part in zip(copied.split(_COPIED_ROWS), rows.split(_COPIED_ROWS)):
        target.copy_(tensor[part])
    return copied


@dataclass(frozen=True)
class ParkedRequest:
    """A preempted request's bytes in host memory: its KV blocks and its live slot."""

    blocks: list[tuple[np.ndarray, Tensor]]
    """Numbers of the blocks of each block table, and uint8 [blocks, pages, page_bytes]."""
    slot: Tensor  # uint8 [slot_bytes]

    @property
    def num_bytes(self) -> int:
        return self.slot.numel() + sum(pages.numel() for _, pages in self.blocks)


class CachePool:
    """The byte pool with per-layer KV views, and the live slots with per-layer state views.

    Args:
        spec: from `cache_spec_of` for the same layers.
        layers: cached tensors of each layer, in layer order.
        hidden_size: width of the last hidden state.
        dtype: of K and V.
        num_pages: pages of the pool, the null page 0 included.
        num_slots: live slots, one for each running request.
        device: of pool and slots.
        state_encoding, hidden_dtype: as for `cache_spec_of`.

    Raises:
        MemoryError: the device lacks the memory.
    """

    def __init__(
        self,
        spec: CacheSpec,
        layers: list[LayerCache],
        hidden_size: int,
        dtype: torch.dtype,
        num_pages: int,
        num_slots: int,
        device: torch.device,
        state_encoding: str = "exact",
        hidden_dtype: torch.dtype | None = None,
    ):
        self.spec = spec
        self.device = device
        self._kept: list[tuple[Tensor, Tensor]] | None = None  # rows, bytes: while suspended
        # Zeros, not empty: masked attention reads unwritten rows, which must not hold a NaN.
        self.pool = _zeros(num_pages, spec.page_bytes, device, "pages: lower cache_bytes")
        self._words = self.pool.view(torch.int64)  # copied in 8 bytes, as in PageMover
        self._state_encoding = state_encoding
        self._layout = StateLayout(layers, hidden_size, hidden_dtype or dtype, state_encoding)
        self.slots = _zeros(num_slots, spec.slot_bytes, device, "live slots: lower max_requests")

        self._live_states = {
            key: field.view(self.slots) for key, field in self._layout.fields.items()
        }
        self._kv_views: dict[int, tuple[Tensor, Tensor]] = {}
        self.table_of_layer: dict[int, tuple[int | None, int]] = {}  # local group, table column
        typed_pool = self.pool.view(dtype)
        shapes = _kv_shapes(layers)
        columns, local_groups = spec.columns, spec.local_groups
        keys = group_keys(_kv_groups(layers, shapes, dtype))
        group_of = {key: group for group, key in enumerate(group_keys(spec.groups))}
        for shape, key in zip(shapes, keys):
            group = group_of[key]  # `spec` also has groups of other ranks
            members = [n for n, layer in enumerate(layers, start=1) if layer.kv == shape]
            rows = spec.block_size_tokens, shape.num_heads
            sizes = [rows[0] * rows[1] * width for width in (shape.head_dim, shape.value_dim)]
            for index, number in enumerate(members):
                page, pair = divmod(index, spec.pairs_per_page(group))
                parts = typed_pool[:, pair * sum(sizes) : (pair + 1) * sum(sizes)].split(sizes, 1)
                self._kv_views[number] = tuple(
                    part.view(num_pages, *rows, width)
                    for part, width in zip(parts, (shape.head_dim, shape.value_dim))
                )
                if shape.is_local:
                    self.table_of_layer[number] = local_groups.index(group), page
                else:
                    self.table_of_layer[number] = None, columns[group].start + page

    # Views -------------------------------------------------------------------------------------

    def kv_pages(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Return K [n, B, K, D] and V [n, B, K, P] of one layer for every page, strided views of
        the pool. P is 0 if the layer keeps no values."""
        return self._kv_views[layer_number]

    def state(self, layer_number: int, name: str, slots: Tensor | None = None) -> Tensor:
        """Return one state of one layer in every live slot (or in `slots`), [S, *shape] view."""
        if slots is None:
            return self._live_states[layer_number, name]
        return self._layout.fields[layer_number, name].view(slots)

    def hidden(self, slots: Tensor | None = None) -> Tensor:
        """Return the last hidden state in live slots (all, or `slots`), [S, hidden_size] view."""
        return self._layout.hidden.view(self.slots if slots is None else slots)

    def staging(self, count: int) -> Tensor:
        """Allocate room for states captured inside a forward, uint8 [count, slot_bytes]."""
        return torch.empty(count, self.slots.shape[1], dtype=torch.uint8, device=self.device)

    def weights_changed(self, layers: list[LayerCache]) -> None:
        """Encode states by the decays of the new weights of these same layers from now on. It
        makes old checkpoints invalid."""
        hidden = self._layout.hidden
        self._layout = StateLayout(layers, hidden.shape[0], hidden.dtype, self._state_encoding)

    # Suspension --------------------------------------------------------------------------------

    @property
    def _tensors(self) -> tuple[Tensor, Tensor]:
        return self.pool, self.slots

    @property
    def held_bytes(self) -> int:
        """Bytes that pool, live slots and their copies in host memory take now."""
        tensors = (*self._tensors, *(kept for _, kept in self._kept or ()))
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def keep(self, rows: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Copy the bytes of pages and live slots, int [n] each, to host memory, for `refill`. With
        None drop what was kept.

        Raises:
            MemoryError: the host lacks the memory for the copies; nothing has changed.
        """
        kept = None
        if rows is not None:
            ids = [self._ids(each) for each in rows]
            try:
                kept = [(rows, _to_host(tensor, rows)) for tensor, rows in zip(self._tensors, ids)]
            except RuntimeError as error:
                size = sum(len(rows) * each.shape[1] for each, rows in zip(self._tensors, ids))
                raise MemoryError(f"the host has no room for {size} bytes ({error})") from error
        self._kept = kept

    def release(self) -> None:
        """Give back the device memory of pool and live slots, until `reacquire`. All views of them
        stay, without bytes."""
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    @property
    def is_released(self) -> bool:
        return any(not tensor.untyped_storage().nbytes() for tensor in self._tensors)

    def reacquire(self) -> None:
        """Allocate pool and live slots again; `refill` them before use.

        Raises:
            MemoryError: the device lacks the memory, and nothing is allocated; the call may be
                repeated.
        """
        try:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.numel())
        except RuntimeError as error:
            self.release()
            size = sum(tensor.numel() for tensor in self._tensors)
            raise MemoryError(
                f"{self.device} has no room for {size} bytes of the cache ({error})"
            ) from error

    def refill(self) -> None:
        """Fill pool and live slots with the bytes that were kept, and zeros elsewhere."""
        for tensor in self._tensors:
            _zero(tensor)
        for tensor, (rows, kept) in zip(self._tensors, self._kept or ()):
            for part, data in zip(rows.split(_COPIED_ROWS), kept.split(_COPIED_ROWS)):
                tensor.index_copy_(0, part, data.to(self.device))

    # Copies ------------------------------------------------------------------------------------

    def _ids(self, pages: np.ndarray) -> Tensor:
        return to_device(np.ascontiguousarray(pages, dtype=np.int64), self.device)

    def clear_slot(self, slot: int) -> None:
        self.slots[slot].zero_()

    def copy_slot(self, source: int, target: int) -> None:
        self.slots[target].copy_(self.slots[source])

    def save_checkpoint(self, state_bytes: Tensor, pages: np.ndarray) -> None:
        """Encode a slot's bytes, uint8 [slot_bytes], into checkpoint pages."""
        if not self._layout.is_exact:
            state_bytes = self._layout.encode(state_bytes, len(pages) * self.spec.page_bytes)
        rows = state_bytes.view(len(pages), -1)
        self._words.index_copy_(0, self._ids(pages), rows.view(torch.int64))

    def load_checkpoint(self, pages: np.ndarray, slot: int) -> None:
        """Decode checkpoint pages into a live slot."""
        if self._layout.is_exact:
            target = self.slots[slot].view(len(pages), -1).view(torch.int64)
            torch.index_select(self._words, 0, self._ids(pages), out=target)
        else:
            self._layout.decode(self.pool[self._ids(pages)].flatten(), self.slots[slot])

    def copy_pages(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy whole pages. Invalid rows are overwritten before they are read."""
        self._words.index_copy_(0, self._ids(targets), self._words[self._ids(sources)])

    # Preemption --------------------------------------------------------------------------------

    def park(self, tables: list[np.ndarray], num_tokens: int, slot: int) -> ParkedRequest:
        """Copy a request's KV of `num_tokens` tokens and its live slot to host memory."""
        num_blocks, blocks = -(-num_tokens // self.spec.block_size_tokens), []
        for table in tables:
            indices = np.flatnonzero(table[:num_blocks].any(axis=1))
            blocks.append((indices, self.pool[self._ids(table[indices])].cpu()))
        return ParkedRequest(blocks, self.slots[slot].cpu().clone())

    def unpark(
        self, parked: ParkedRequest, tables: list[np.ndarray], first_block: int, slot: int
    ) -> None:
        """Copy parked bytes back: the live slot, the blocks of full attention from `first_block`
        on (those before are shared), and the local blocks in the tables."""
        self.slots[slot].copy_(parked.slot)
        for number, (table, (indices, pages)) in enumerate(zip(tables, parked.blocks)):
            needed = table[indices].any(axis=1)
            if number == 0:
                needed &= indices >= first_block
            source = pages[torch.from_numpy(needed)].to(self.device)
            self.pool[self._ids(table[indices[needed]])] = source
