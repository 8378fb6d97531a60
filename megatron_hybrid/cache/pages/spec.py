"""CacheSpec: bytes per token and per sequence, windows and chunks, and the page size.

A page holds whole "pairs": K and V of one layer for one block of tokens. Kernels need only a pair
to be contiguous.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from megatron_hybrid.utils.validation import Range, check_fields

BlockSize = Literal[16, 32, 64, 128, 256]
"""Tokens of a KV block: 16 shares most, 256 keeps tables short."""
STATE_ONLY_PAGE_BYTES = 64 << 10
"""Page size of a model without attention."""
ALIGNMENT = 16
"""Each part of a checkpoint starts at a multiple of this many bytes."""
MAX_PADDING = 0.05
"""Largest accepted share of padding in a group's KV bytes, in return for fewer, larger pages."""


@dataclass(frozen=True)
class KVGroup:
    """Attention layers with the same bytes per token and the same window or chunk.

    A group with a window or a chunk is local: no later token sees positions before `first_visible`.

    Raises:
        ValueError: a size is less than 1, or both window and chunk are given.
    """

    num_layers: Annotated[int, Range(ge=1)]
    bytes_per_token: Annotated[int, Range(ge=1)]
    """K and V of ONE layer, one token."""
    window: Annotated[int, Range(ge=1)] | None = None
    """Length of the window: the token at position t sees (t - window, t]."""
    chunk: Annotated[int, Range(ge=1)] | None = None
    """Length of the chunks: the token at position t sees [t // chunk * chunk, t]."""

    def __post_init__(self):
        check_fields(self, "KVGroup.")
        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"KVGroup.window is {self.window} and KVGroup.chunk is {self.chunk}; a layer has "
                f"one of them: leave the other None"
            )

    @property
    def reach(self) -> int | None:
        """Most tokens that a token sees, itself included, or None if it sees all."""
        return self.chunk if self.window is None else self.window

    def first_visible(self, position: int) -> int:
        """Return the first position that the token at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk


@dataclass(frozen=True)
class CacheSpec:
    """Sizes that determine all page arithmetic.

    Raises:
        ValueError: a size is negative, or not one of `BlockSize`.
    """

    block_size_tokens: BlockSize
    groups: tuple[KVGroup, ...]
    """Full-attention groups and local ones (window or chunk), in any order."""
    state_bytes: int
    """Recurrent states and convolution tails of one sequence; 0 for pure attention."""
    hidden_bytes: int
    """Last hidden state of one sequence; 0 if the end of a prompt needs no logits."""
    encoded_state_bytes: int | None = None
    """Bytes of these states in a checkpoint; by default `state_bytes`."""
    attention_parity: Annotated[float, Range(gt=0, le=math.inf)] = math.inf
    """Tokens of context at which full attention is half of a token's work."""
    model_bytes: tuple[int, int] | None = None
    """Bytes of a checkpoint of the whole model over all ranks, without local blocks, and of its
    full-attention KV per token. They give interval states the same positions as on one rank."""

    def __post_init__(self):
        check_fields(self, "CacheSpec.")

    @cached_property
    def full_groups(self) -> tuple[int, ...]:
        """Indices of the groups whose tokens see all tokens before them."""
        return tuple(i for i, group in enumerate(self.groups) if group.reach is None)

    @cached_property
    def local_groups(self) -> tuple[int, ...]:
        """Indices of the groups with a window or a chunk."""
        return tuple(i for i, group in enumerate(self.groups) if group.reach is not None)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of every page in the pool.

        With one group, a block is one page. With several, a page has a whole number of pairs of one
        group, and a block of every group fills whole pages. Of the sizes with at most MAX_PADDING
        in each group, it is the one with the fewest pages (long tables cost time), or if there is
        none, that with the least padding. The limit holds for each group, since requests decide how
        many blocks of each there are.
        """
        if not self.groups:
            return STATE_ONLY_PAGE_BYTES
        pairs = [self.pair_bytes(i) for i in range(len(self.groups))]
        layers = [group.num_layers for group in self.groups]

        def cost(page_bytes: int) -> tuple[float, int]:
            """Return the largest padding of any group, as a share of its bytes, and the pages of a
            block of all groups."""
            pages = [-(-n // (page_bytes // pair)) for n, pair in zip(layers, pairs)]
            padding = max(
                count * page_bytes / (n * pair) for count, n, pair in zip(pages, layers, pairs)
            )
            return padding - 1, sum(pages)

        sizes = {k * pair for n, pair in zip(layers, pairs) for k in range(1, n + 1)}
        sizes = [size for size in sizes if size >= max(pairs)]
        small = [size for size in sizes if cost(size)[0] <= MAX_PADDING]
        return min(small, key=lambda size: cost(size)[::-1]) if small else min(sizes, key=cost)

    def pair_bytes(self, group: int) -> int:
        """Return the bytes of K and V of one layer of the group, one block."""
        return self.groups[group].bytes_per_token * self.block_size_tokens

    def pairs_per_page(self, group: int) -> int:
        """Return the number of whole (layer, block) pairs of the group that fit into one page."""
        return self.page_bytes // self.pair_bytes(group)

    @cached_property
    def pages_per_block(self) -> tuple[int, ...]:
        """Pages of one block in all layers, by group."""
        return tuple(
            -(-group.num_layers // self.pairs_per_page(i)) for i, group in enumerate(self.groups)
        )

    @cached_property
    def kv_pages_per_block(self) -> int:
        """Number of pages of one block of all full-attention layers (0 if there are none)."""
        return sum(self.pages_per_block[i] for i in self.full_groups)

    @cached_property
    def columns(self) -> dict[int, slice]:
        """Columns of each full-attention group in a block table: [M, kv_pages_per_block]."""
        columns, start = {}, 0
        for i in self.full_groups:
            columns[i] = slice(start, start + self.pages_per_block[i])
            start += self.pages_per_block[i]
        return columns

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint without its local blocks: states, then the hidden state."""
        encoded = self.encoded_state_bytes
        state = self.state_bytes if encoded is None else encoded
        return aligned(state) + aligned(self.hidden_bytes)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a live slot, whole pages, so that an exact checkpoint is a copy of its bytes."""
        pages = -(-(self.state_bytes + self.hidden_bytes) // self.page_bytes)
        return max(1, pages) * self.page_bytes

    @cached_property
    def checkpoint_pages(self) -> int:
        """Pages of a checkpoint without its local blocks."""
        return -(-self.checkpoint_bytes // self.page_bytes)

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of a token in all full-attention layers."""
        groups = (self.groups[i] for i in self.full_groups)
        return sum(group.num_layers * group.bytes_per_token for group in groups)

    @cached_property
    def interval_bytes(self) -> tuple[int, int]:
        """Bytes of a checkpoint and of a token's KV; their ratio is the length of intervals."""
        return self.model_bytes or (self.checkpoint_bytes, self.kv_bytes_per_token)

    @cached_property
    def local_bytes(self) -> int:
        """Bytes of K and V of all tokens that one token sees in the local groups."""
        groups = (self.groups[i] for i in self.local_groups)
        return sum(group.num_layers * group.bytes_per_token * group.reach for group in groups)

    @cached_property
    def local_reach(self) -> int:
        """Most tokens that a token sees in any local group, or 0 without one."""
        return max((self.groups[i].reach for i in self.local_groups), default=0)

    @cached_property
    def needs_state(self) -> bool:
        """Whether prompts resume only at checkpoints, because of recurrent states or local KV."""
        return self.state_bytes > 0 or bool(self.local_groups)

    def work(self, start: int, end: int) -> float:
        """Return the work to compute the tokens [start, end), in units of a token without context.
        Attention adds position / attention_parity to each."""
        return (end - start) * self.mean_work(start, end)

    def mean_work(self, start: int, end: int) -> float:
        """Return the mean `work` of the tokens [start, end)."""
        return 1.0 + (start + end) / (2.0 * self.attention_parity)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of num_tokens tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def tokens_in(self, num_pages: int) -> int:
        """Count the tokens whose full-attention KV fits in so many pages, without any checkpoint.
        It is 0 without full attention."""
        if not self.kv_pages_per_block:
            return 0
        return num_pages // self.kv_pages_per_block * self.block_size_tokens

    def states_in(self, num_pages: int) -> int:
        """Count the checkpoints that fit in so many pages, each with local blocks of its own and
        without KV of full attention. It is 0 if nothing is to be saved."""
        if not self.needs_state:
            return 0
        local = (
            self.num_blocks(self.groups[group].reach) * self.pages_per_block[group]
            for group in self.local_groups
        )
        return num_pages // (self.checkpoint_pages + sum(local))

    def first_local_block(self, group: int, position: int) -> int:
        """Return the first block of a local group that the next token, at `position`, sees."""
        return self.groups[group].first_visible(position) // self.block_size_tokens

    def local_blocks(self, group: int, position: int) -> slice:
        """Return the blocks of a local group that a checkpoint at `position` needs: those that the
        token at `position` sees before itself, possibly none."""
        first = self.first_local_block(group, position)
        if self.groups[group].first_visible(position) == position:
            return slice(first, first)
        return slice(first, self.num_blocks(position))

    def max_local_blocks(self, group: int, chunk_tokens: int) -> int:
        """Return the most blocks of a local group that a request of any length holds if its
        forwards have at most chunk_tokens tokens. A forward writes all its tokens before it reads
        any, so it needs room for them in addition to the tokens that its first token sees."""
        reach = self.groups[group].reach
        return self.num_blocks(reach - 1) + self.num_blocks(chunk_tokens - 1) + 1

    def most_pages(self, capacity_tokens: int, chunk_tokens: int) -> int:
        """Return the most pages that a request of capacity_tokens tokens holds if its forwards have
        at most chunk_tokens tokens."""
        blocks = self.num_blocks(capacity_tokens)
        pages = blocks * self.kv_pages_per_block
        for group in self.local_groups:
            held = self.max_local_blocks(group, chunk_tokens)
            pages += min(blocks, held) * self.pages_per_block[group]
        return pages

    def pages_to_resume(self, position: int, num_tokens: int, chunk_tokens: int) -> int:
        """Return the pages that a prompt of num_tokens tokens takes for its first forward, of at
        most chunk_tokens tokens, together with the state at `position` that it resumes from."""
        is_partial = position % self.block_size_tokens > 0  # that block is copied
        blocks = self.num_blocks(max(num_tokens, position)) + is_partial
        pages = blocks * self.kv_pages_per_block
        end = self.num_blocks(max(position, min(num_tokens, position + chunk_tokens)))
        for group in self.local_groups:
            blocks = end - self.first_local_block(group, position) + is_partial
            pages += blocks * self.pages_per_block[group]
        return pages + (self.checkpoint_pages if self.needs_state else 0)


def common_spec(
    specs: Sequence[CacheSpec],
    attention_parity: float,
    model_bytes: tuple[int, int] | None = None,
) -> CacheSpec:
    """Return one spec for several ranks, which decide alike only if they count the same pages. It
    has the attention groups of all ranks, each with the most layers of any rank, and the largest
    states. Ranks with fewer layers or smaller states leave a part of their pages unused.

    Args:
        specs: one per rank, in rank order, of one block size.
        attention_parity, model_bytes: of the whole model.
    """
    groups: dict[tuple, KVGroup] = {}
    for spec in specs:
        for key, group in zip(group_keys(spec.groups), spec.groups):
            known = groups.get(key, group)
            groups[key] = group if group.num_layers > known.num_layers else known
    encoded = [spec.encoded_state_bytes for spec in specs]
    return CacheSpec(
        block_size_tokens=specs[0].block_size_tokens,
        groups=tuple(groups.values()),
        state_bytes=max(spec.state_bytes for spec in specs),
        hidden_bytes=max(spec.hidden_bytes for spec in specs),
        encoded_state_bytes=None if None in encoded else max(encoded),
        attention_parity=attention_parity,
        model_bytes=model_bytes,
    )


def group_keys(groups: Sequence[KVGroup]) -> list[tuple]:
    """Return keys of the groups: bytes, window, chunk, and the number of earlier groups with the
    same three. Groups of several ranks with equal keys are one group."""
    seen: Counter[tuple] = Counter()
    keys = []
    for group in groups:
        kind = group.bytes_per_token, group.window, group.chunk
        keys.append((*kind, seen[kind]))
        seen[kind] += 1
    return keys


def aligned(num_bytes: int) -> int:
    """Return num_bytes rounded up to the alignment of a checkpoint's parts."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
