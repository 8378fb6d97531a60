"""RaggedLayout: the sequences of one call, concatenated in flat tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from megatron_hybrid.ops.tape import once
from megatron_hybrid.ops.to_device import to_device

ROW_ALIGNMENT = 8
"""Rows that batches of linear layers are padded to a multiple of: kernels for one row round
otherwise than those for several."""


def row_alignment(device: torch.device, splits_rows: bool = False) -> int:
    """Return what rows of batches on a device are padded to a multiple of. A CPU's products take
    any number of rows (`ops.linear`), two as they are. splits_rows: ranks share them equally."""
    return 2 if device.type == "cpu" and not splits_rows else ROW_ALIGNMENT


@dataclass(frozen=True)
class RaggedLayout:
    """Lengths, positions and captures of the sequences of one call.

    Row t of a flat tensor `[T, ...]` is a token; sequence r owns rows
    `cu_seqlens[r] .. cu_seqlens[r + 1]`; `num_padding` trailing rows belong to no sequence.
    A batch is laid out with its decodes first: the leading sequences of length 1, and those of
    `num_decodes`, take recurrent steps, all others the chunked scan. Any other order is correct,
    but slower. The layout is immutable; it caches index tensors per device.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    lengths: tuple[int, ...]
    """Tokens of each sequence in this call, each at least 1."""
    start_positions: tuple[int, ...]
    """Absolute position of each sequence's first token of this call."""
    captures: tuple[int, ...] = ()
    """States to capture, as strictly ascending counts c of flat tokens: the state right after flat
    token c - 1, of the sequence that owns it."""
    num_padding: int = 0
    """Trailing rows of the flat tensors that belong to no sequence; outputs are zero there."""
    starts: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """int32 `[R]`: start positions that only the device knows, in steps that are recorded once and
    replayed at other positions. `start_positions` are then the largest that they may be, and all
    sequences have as many tokens and are decodes."""
    num_decodes: int = 0
    """Leading sequences whose tokens have the bits of calls of one token each: decodes with drafts.
    Of others with more than one token, a recurrent layer may take chunks."""

    def __post_init__(self) -> None:
        for name in ("lengths", "start_positions", "captures"):
            object.__setattr__(self, name, tuple(int(value) for value in getattr(self, name)))
        if not self.lengths:
            raise ValueError("a RaggedLayout needs at least one sequence, lengths is empty")
        if len(self.start_positions) != len(self.lengths):
            raise ValueError(
                f"{len(self.start_positions)} start_positions for {len(self.lengths)} lengths: "
                "give one absolute position per sequence"
            )
        if min(self.lengths) < 1:
            raise ValueError(
                f"lengths holds {min(self.lengths)}; each sequence of a call needs at least 1 "
                "token, leave out the ones that have none"
            )
        if not 0 <= self.num_decodes <= len(self.lengths):
            raise ValueError(
                f"num_decodes is {self.num_decodes}, of {len(self.lengths)} sequences: give how "
                "many of the first ones are decodes"
            )
        for before, count in pairwise((0, *self.captures)):
            if count <= before or count > self.num_tokens:
                raise ValueError(
                    f"captures holds {count} after {before}; captures are strictly ascending "
                    f"counts of flat tokens in 1..{self.num_tokens}"
                )

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def uniform(num_sequences: int, length: int) -> RaggedLayout:
        """Lay out `num_sequences` sequences of `length` tokens from position 0, to train on."""
        return RaggedLayout((length,) * num_sequences, (0,) * num_sequences)

    @functools.cached_property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Flat row of each sequence's first token, and `num_tokens` at the end: R + 1 numbers."""
        return (0, *accumulate(self.lengths))

    @functools.cached_property
    def num_tokens(self) -> int:
        """Tokens of all sequences, padding rows not counted."""
        return sum(self.lengths)

    @property
    def num_rows(self) -> int:
        """Rows T of the flat tensors: `num_tokens + num_padding`."""
        return self.num_tokens + self.num_padding

    @property
    def num_sequences(self) -> int:
        """R."""
        return len(self.lengths)

    @functools.cached_property
    def end_positions(self) -> tuple[int, ...]:
        """Absolute position after each sequence's last token: R numbers."""
        return tuple(map(sum, zip(self.start_positions, self.lengths, strict=True)))

    @functools.cached_property
    def last_end(self) -> int:
        """The largest of `end_positions`."""
        return max(self.end_positions)

    @functools.cached_property
    def num_singles(self) -> int:
        """Leading sequences of length 1."""
        return next((r for r, n in enumerate(self.lengths) if n > 1), len(self.lengths))

    @functools.cached_property
    def num_steps(self) -> int:
        """Leading sequences that take recurrent steps: `num_decodes`, and those of length 1 that
        follow."""
        rest = range(self.num_decodes, len(self.lengths))
        return next((r for r in rest if self.lengths[r] > 1), len(self.lengths))

    @property
    def num_step_tokens(self) -> int:
        """Tokens of these."""
        return self.cu_seqlens[self.num_steps]

    @functools.cached_property
    def capture_sequences(self) -> tuple[int, ...]:
        """The sequence that owns each capture: n numbers."""
        owners, r = [], 0
        for count in self.captures:
            while self.cu_seqlens[r + 1] < count:
                r += 1
            owners.append(r)
        return tuple(owners)

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`, cached under `key`, so that index tensors are built once, not per layer.

        Tensors are made outside inference mode, so that autograd may save them.
        """
        if key not in self._memo:
            once(lambda: _remembered(self._memo, key, make))
        return self._memo[key]

    def derived(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Keep as `cached` does what follows from positions: where these are on the device, it is
        kept until `forget_derived`."""
        memo = self._memo if self.starts is None else self._derived
        return _remembered(memo, key, make)

    def forget_derived(self) -> None:
        """Begin a pass over other positions `starts`."""
        self._derived.clear()

    @functools.cached_property
    def _memo(self) -> dict:
        return {}

    @functools.cached_property
    def _derived(self) -> dict:
        return {}

    def token_positions(self, device: torch.device | str) -> torch.Tensor:
        """Return the absolute position of each row, int64 `[T]`; padding rows have position 0."""
        sequences = zip(self.start_positions, self.lengths, strict=True)
        return self.cached(
            ("token_positions", torch.device(device)),
            lambda: to_device(
                [p for start, length in sequences for p in range(start, start + length)]
                + [0] * self.num_padding,
                device,
            ),
        )

    def live_positions(self) -> torch.Tensor:
        """Return the absolute position of each token, if the device knows the `starts`, int32."""
        if self.num_tokens == self.num_sequences:
            return self.starts
        steps = torch.arange(self.lengths[0], dtype=torch.int32, device=self.starts.device)
        return (self.starts.unsqueeze(1) + steps).flatten()

    def sequence_ids(self, device: torch.device | str) -> torch.Tensor:
        """Return the sequence of each token, int64 `[num_tokens]` (padding rows have none)."""
        return self.cached(
            ("sequence_ids", torch.device(device)),
            lambda: to_device(np.repeat(range(self.num_sequences), self.lengths), device),
        )


def _remembered(memo: dict, key: Hashable, make: Callable[[], Any]) -> Any:
    if key not in memo:
        with torch.inference_mode(False):
            memo[key] = make()
    return memo[key]
