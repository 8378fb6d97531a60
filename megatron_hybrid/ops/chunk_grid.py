"""ChunkGrid: tokens of a ragged batch laid out in chunks, and states carried through these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from megatron_hybrid.ops.permutation import Waves
from megatron_hybrid.ops.ragged import RaggedLayout


class ChunkGrid:
    """Chunks of the sequences after the leading steps of a layout.

    The grid is anchored at absolute position 0, so the token at position t sits in row
    `t % chunk_size` of its chunk in every call. A sequence that starts inside a chunk leaves the
    rows before it empty; empty rows hold zeros, which change no state (decay 1, input 0). The S
    chunks are ordered by sequence.
    """

    @classmethod
    def of(cls, layout: RaggedLayout, chunk_size: int, device: torch.device | str) -> ChunkGrid:
        """Return the grid of a layout, made once per chunk size and device and cached in it."""
        return layout.cached(
            ("chunk_grid", chunk_size, torch.device(device)),
            lambda: cls(layout, chunk_size, device),
        )

    def __init__(self, layout: RaggedLayout, chunk_size: int, device: torch.device | str) -> None:
        self.chunk_size = chunk_size
        first_seq = layout.num_steps
        self.lengths = layout.lengths[first_seq:]
        self.first_rows = [p % chunk_size for p in layout.start_positions[first_seq:]]
        self.counts = [
            -(-(row + length) // chunk_size)
            for row, length in zip(self.first_rows, self.lengths, strict=True)
        ]
        self.num_chunks = sum(self.counts)
        self.is_full = self.num_chunks * chunk_size == sum(self.lengths)
        self._waves = Waves(self.counts, device)
        firsts = [0, *accumulate(self.counts)]
        chunks, rows = [], []
        for count, owner in zip(layout.captures, layout.capture_sequences, strict=True):
            if owner < first_seq:
                continue
            r = owner - first_seq
            row = self.first_rows[r] + count - 1 - layout.cu_seqlens[owner]
            chunks.append(firsts[r] + row // chunk_size)
            rows.append(row % chunk_size)
        self.capture_chunks = torch.tensor(chunks, dtype=torch.int64, device=device)
        self._capture_rows = torch.tensor(rows, dtype=torch.int64, device=device)

    def pad(self, x_T: torch.Tensor) -> torch.Tensor:
        """Lay tokens `[tokens, ...]` out on the grid, `[S, L, ...]`, with zeros in empty rows."""
        if not self.is_full:
            empty = x_T.new_zeros((self.chunk_size, *x_T.shape[1:]))
            pieces = []
            for x_seq, row, count in zip(
                x_T.split(self.lengths), self.first_rows, self.counts, strict=True
            ):
                after = count * self.chunk_size - row - len(x_seq)
                pieces += [empty[:row], x_seq, empty[:after]]
            x_T = torch.cat(pieces)
        return x_T.reshape(self.num_chunks, self.chunk_size, *x_T.shape[1:])

    def unpad(self, y_SL: torch.Tensor) -> torch.Tensor:
        """Return the tokens' rows of `[S, L, ...]` in flat order, `[tokens, ...]`."""
        y_T = y_SL.flatten(0, 1)
        if self.is_full:
            return y_T
        per_seq = y_T.split([count * self.chunk_size for count in self.counts])
        rows = zip(per_seq, self.first_rows, self.lengths, strict=True)
        return torch.cat([y_seq[row : row + length] for y_seq, row, length in rows])

    def recur(
        self,
        state_R: torch.Tensor,
        inputs_S: Sequence[torch.Tensor],
        step: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Carry the states through the chunks, one wave of all sequences at a time.

        `step(state, *inputs of these chunks) -> (state after them, output of them | None)`.
        Returns each chunk's start state `[S, ...]`, the outputs `[S, ...]` (None where step has
        none) and the final states `[R, ...]`.
        """
        state = self._waves.sequences.apply(state_R)
        waves = zip(
            *(self._waves.items.apply(x_S).split(self._waves.sizes) for x_S in inputs_S),
            strict=True,
        )
        starts, outputs, finals = [], [], []
        for size, inputs in zip(self._waves.sizes, waves, strict=True):
            if size < len(state):
                finals.append(state[size:])
                state = state[:size]
            starts.append(state)
            state, output = step(state, *inputs)
            outputs.append(output)
        finals.append(state)
        start_S = self._waves.items.invert(torch.cat(starts))
        output_S = None if outputs[0] is None else self._waves.items.invert(torch.cat(outputs))
        return start_S, output_S, self._waves.sequences.invert(torch.cat(finals[::-1]))

    def capture_decays(
        self, cum_SHL: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the decays up to each captured row: of the chunk's start state `[n, H, 1]`, and
        of the contributions of its rows `[n, H, L]`, 0 for the rows after the captured one.

        `cum_SHL` is the float64 running sum of log decays in each chunk. Dimensions after L are
        carried along.
        """
        rows_n = self._capture_rows
        cum_nHL = cum_SHL[self.capture_chunks]
        index = rows_n.view(-1, *[1] * (cum_SHL.dim() - 1))
        cum_nH1 = cum_nHL.take_along_dim(index, dim=2)
        row_L = torch.arange(self.chunk_size, device=rows_n.device)
        behind_n1L = row_L.view(-1, *[1] * (cum_SHL.dim() - 3)) > index
        weight_nHL = (cum_nH1 - cum_nHL).masked_fill(behind_n1L, -torch.inf).exp()
        return cum_nH1.exp().to(dtype), weight_nHL.to(dtype)
