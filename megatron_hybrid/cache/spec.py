"""CacheSpec: how many bytes a token, a window and a sequence cost, and the page size from that.

Everything here is arithmetic on sizes. A page holds whole "pairs": K and V of one layer for one
block of tokens, the only thing that a kernel needs contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

STATE_ONLY_PAGE_BYTES = 64 << 10
"""Page size of a model in which nothing attends."""
ALIGNMENT = 16
"""Each part of a checkpoint starts at a multiple of this many bytes."""
MAX_PADDING = 0.1
"""A page size may waste this part of the KV bytes for the sake of fewer, larger pages."""


@dataclass(frozen=True)
class KVGroup:
    """Attention layers of one kind: same bytes per token, same window."""

    num_layers: int
    bytes_per_token: int
    """K and V of ONE layer, one token."""
    window: int | None = None
    """Tokens that a query sees, its own included; None: all of them."""

    def __post_init__(self):
        for name in ("num_layers", "bytes_per_token", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"KVGroup.{name} is {value}; it must be at least 1")


@dataclass(frozen=True)
class CacheSpec:
    """Sizes from which all page arithmetic follows.

    Raises:
        ValueError: a size is negative, or the block size is not a power of two in 16..256.
    """

    block_size_tokens: int
    """Tokens per KV block: a power of two, 16 to 256."""
    groups: tuple[KVGroup, ...]
    """Full-attention groups (window None) and sliding-window groups, in any order."""
    state_bytes: int
    """Recurrent states and convolution tails of one sequence; 0 for pure attention."""
    hidden_bytes: int
    """Last hidden state of one sequence; 0 where a prompt's end needs no logits."""

    def __post_init__(self):
        b = self.block_size_tokens
        if not 16 <= b <= 256 or b & (b - 1):
            raise ValueError(
                f"block_size_tokens is {b}; it must be a power of two from 16 to 256 "
                f"(16 shares most, 256 keeps tables short)"
            )
        for name in ("state_bytes", "hidden_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")

    @cached_property
    def full_groups(self) -> tuple[int, ...]:
        """Indices of the groups without a window."""
        return tuple(i for i, group in enumerate(self.groups) if group.window is None)

    @cached_property
    def window_groups(self) -> tuple[int, ...]:
        """Indices of the sliding-window groups."""
        return tuple(i for i, group in enumerate(self.groups) if group.window is not None)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of every page in the pool."""
        return choose_page_bytes(self.groups, self.block_size_tokens)

    def pair_bytes(self, group: int) -> int:
        """Bytes of K and V of one layer of the group, one block."""
        return self.groups[group].bytes_per_token * self.block_size_tokens

    def pairs_per_page(self, group: int) -> int:
        """Whole (layer, block) pairs of the group that fit into one page."""
        return self.page_bytes // self.pair_bytes(group)

    @cached_property
    def pages_per_block(self) -> tuple[int, ...]:
        """Per group: pages of one block of all its layers."""
        return tuple(
            -(-group.num_layers // self.pairs_per_page(i)) for i, group in enumerate(self.groups)
        )

    @cached_property
    def kv_pages_per_block(self) -> int:
        """Pages of one block of all full-attention layers (0 where there are none)."""
        return sum(self.pages_per_block[i] for i in self.full_groups)

    @cached_property
    def columns(self) -> dict[int, slice]:
        """Per full-attention group: its columns of a block table [M, kv_pages_per_block]."""
        columns, start = {}, 0
        for i in self.full_groups:
            columns[i] = slice(start, start + self.pages_per_block[i])
            start += self.pages_per_block[i]
        return columns

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint without its window blocks: states, then the hidden state."""
        return aligned(self.state_bytes) + aligned(self.hidden_bytes)

    @cached_property
    def checkpoint_pages(self) -> int:
        """Pages of a checkpoint without its window blocks."""
        return -(-self.checkpoint_bytes // self.page_bytes)

    @cached_property
    def needs_state(self) -> bool:
        """True where a prompt resumes only at checkpoints: a recurrent state or a window."""
        return self.state_bytes > 0 or bool(self.window_groups)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def first_window_block(self, group: int, position: int) -> int:
        """First block that covers [position - window, position) of the group."""
        return max(0, position - self.groups[group].window) // self.block_size_tokens


def aligned(num_bytes: int) -> int:
    """num_bytes rounded up to the alignment of a checkpoint's parts."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def choose_page_bytes(groups: tuple[KVGroup, ...], block_size_tokens: int) -> int:
    """The page size for these groups.

    One group: its whole block is one page. Several: a whole number of pairs of one group, such
    that a block of every group fills whole pages. The largest size that wastes no more than
    MAX_PADDING of the bytes wins (long tables cost time), else the one that wastes least.
    """
    if not groups:
        return STATE_ONLY_PAGE_BYTES
    pairs = [group.bytes_per_token * block_size_tokens for group in groups]
    layers = [group.num_layers for group in groups]

    def held(page_bytes: int) -> int:
        """Bytes of the pages of one block of every group."""
        return page_bytes * sum(-(-n // (page_bytes // pair)) for n, pair in zip(layers, pairs))

    used = sum(n * pair for n, pair in zip(layers, pairs))
    sizes = {k * pair for n, pair in zip(layers, pairs) for k in range(1, n + 1)}
    sizes = [size for size in sizes if size >= max(pairs)]
    small = [size for size in sizes if held(size) <= used * (1 + MAX_PADDING)]
    return max(small) if small else min(sizes, key=lambda size: (held(size), -size))
