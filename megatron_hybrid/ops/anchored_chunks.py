"""AnchoredChunks: a ragged batch in chunks for kernels that take chunks of any length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.ops.chunk_grid import ChunkGrid
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.to_device import all_to_device


@dataclass(frozen=True)
class AnchoredChunks:
    """Chunks of the sequences after the leading steps of a layout, as `ChunkGrid` has them, but
    without empty rows: the grid is anchored at absolute position 0, so a sequence that starts
    inside a chunk has a shorter first one. Rows count from the first of these sequences.
    """

    boundaries_S: Tensor
    """int32 `[S + 1]`: first row of each chunk, and the number of rows."""
    sequences_S: Tensor
    """int32 `[S]`: the sequence of each chunk, from 0."""
    whole_S2: Tensor
    """int32 `[S, 2]`: each chunk's number and a 0, as each is a sequence of one chunk."""
    first_chunks_R: Tensor
    """int32 `[R + 1]`: the first chunk of each sequence, and S."""
    last_chunks_R: Tensor
    """int32 `[R]`: the last chunk of each sequence."""
    places_S: Tensor
    """int32 `[S]`: numbers of the chunks that have captures, from 0; -1 for the others."""
    place_chunks: Tensor
    """int32: those chunks."""
    place_sequences: Tensor
    """int32: their sequences, where they are the first chunk; else -1."""
    capture_places_n: Tensor
    """int32 `[n]`: the number of the chunk of each capture."""
    capture_rows_n2: Tensor
    """int32 `[n, 2]`: first row of it, and the row after the capture."""

    @classmethod
    def of(cls, layout: RaggedLayout, chunk_size: int, device: torch.device) -> AnchoredChunks:
        """Return the chunks of a layout, made once per chunk size and device and cached in it."""
        return layout.cached(
            ("anchored_chunks", chunk_size, device), lambda: cls._make(layout, chunk_size, device)
        )

    @classmethod
    def _make(cls, layout: RaggedLayout, chunk_size: int, device: torch.device) -> AnchoredChunks:
        grid, before = ChunkGrid.of(layout, chunk_size, "cpu"), layout.num_step_tokens
        counts_R, first_rows_R = np.asarray(grid.counts), np.asarray(grid.first_rows)
        bounds_R = np.concatenate([[0], counts_R.cumsum()])
        owners_S = np.repeat(np.arange(len(counts_R)), counts_R)
        sizes_S = np.full(grid.num_chunks, chunk_size)
        sizes_S[bounds_R[:-1]] -= first_rows_R
        sizes_S[bounds_R[1:] - 1] -= counts_R * chunk_size - first_rows_R - grid.lengths
        boundaries_S = np.concatenate([[0], sizes_S.cumsum()])
        chunks_n = grid.capture_chunks.numpy()
        ends_n = [count - before for count in layout.captures if count > before]
        kept, places_n = np.unique(chunks_n, return_inverse=True)
        places_S = np.full(grid.num_chunks, -1)
        places_S[kept] = np.arange(len(kept))
        numbers = (
            boundaries_S,
            owners_S,
            np.stack([np.arange(grid.num_chunks), np.zeros_like(owners_S)], 1),
            bounds_R,
            bounds_R[1:] - 1,
            places_S,
            kept,
            np.where(np.isin(kept, bounds_R), owners_S[kept], -1),
            places_n,
            np.stack([boundaries_S[chunks_n], ends_n], 1),
        )
        tensors = all_to_device([each.ravel() for each in numbers], device)
        return cls(*(tensor.view(each.shape) for tensor, each in zip(tensors, numbers)))
