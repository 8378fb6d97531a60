"""AnchoredChunks: a ragged batch in chunks for kernels that take chunks of any length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.to_device import to_device


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
    """int32 `[S, 2]`: the number of each chunk, and 0: each as a sequence of one chunk."""
    first_chunks_R: Tensor
    """int32 `[R + 1]`: the first chunk of each sequence, and S."""
    last_chunks_R: Tensor
    """int64 `[R]`: the last chunk of each sequence."""
    places_S: Tensor
    """int32 `[S]`: numbers of the chunks that have captures, from 0; -1 for the others."""
    place_chunks: Tensor
    """int64: those chunks."""
    place_sequences: Tensor
    """int64: their sequences, where they are the first chunk; else -1."""
    capture_places_n: Tensor
    """int64 `[n]`: the number of the chunk of each capture."""
    capture_rows_n2: Tensor
    """int32 `[n, 2]`: first row of it, and the row after the capture."""

    @classmethod
    def of(cls, layout: RaggedLayout, chunk_size: int, device: torch.device) -> AnchoredChunks:
        """The chunks of a layout, made once per chunk size and device and cached in the layout."""
        return layout.cached(
            ("anchored_chunks", chunk_size, device), lambda: cls._make(layout, chunk_size, device)
        )

    @classmethod
    def _make(cls, layout: RaggedLayout, chunk_size: int, device: torch.device) -> AnchoredChunks:
        first_seq = layout.num_steps
        bounds, owners, lasts, row = [0], [], [], 0
        firsts = []  # chunk and row of each sequence's start
        for r, length in enumerate(layout.lengths[first_seq:]):
            start = layout.start_positions[first_seq + r]
            firsts.append((len(owners), row))
            ends = range(start - start % chunk_size + chunk_size, start + length, chunk_size)
            for end in (*ends, start + length):
                bounds.append(row + end - start)
                owners.append(r)
            lasts.append(len(owners) - 1)
            row += length
        chunks, rows = [], []
        for count, owner in zip(layout.captures, layout.capture_sequences, strict=True):
            if owner < first_seq:
                continue
            chunk, row = firsts[owner - first_seq]
            count -= layout.cu_seqlens[first_seq]
            start = layout.start_positions[owner]
            chunk += (start % chunk_size + count - row - 1) // chunk_size
            chunks.append(chunk)
            rows.append((bounds[chunk], count))
        places = {chunk: place for place, chunk in enumerate(dict.fromkeys(chunks))}
        first_chunks = {chunk: r for r, (chunk, _) in enumerate(firsts)}
        return cls(
            to_device(bounds, device, torch.int32),
            to_device(owners, device, torch.int32),
            to_device([(chunk, 0) for chunk in range(len(owners))], device, torch.int32),
            to_device([chunk for chunk, _ in firsts] + [len(owners)], device, torch.int32),
            to_device(lasts, device),
            to_device([places.get(chunk, -1) for chunk in range(len(owners))], device, torch.int32),
            to_device(list(places), device),
            to_device([first_chunks.get(chunk, -1) for chunk in places], device),
            to_device([places[chunk] for chunk in chunks], device),
            to_device(np.reshape(rows, (-1, 2)), device, torch.int32),
        )
