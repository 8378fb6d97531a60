"""Steps: what a kernel goes through token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.ops.anchored_chunks import AnchoredChunks
from megatron_hybrid.ops.kernels import SequenceTable
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotStates


@dataclass(frozen=True)
class Steps:
    """Sequences whose states a kernel carries from token to token, in place.

    It takes `tensors()` after those of its op, then `num_sequences` and `num_rows`.
    """

    pool_S: Tensor
    """States, `[S, *shape]`."""
    slot_ids_R: Tensor
    """Slots of the sequences' states."""
    rows: Tensor
    """int32: first row of each sequence and the row after its last one, `[R, 2]`; or `[R + 1]`,
    where each begins with the row after the one before."""
    num_sequences: int
    num_programs: int
    """One for each sequence, and one for rows of zeros where there are any."""
    num_rows: int = 0
    """Rows of outputs that are written."""
    y_T: Tensor | None = None
    """Outputs; None if only the states at the ends are wanted, which are not rounded before."""
    captured_n: Tensor | None = None
    """See `SlotStates`."""
    offsets: Tensor | None = None
    """Number of each sequence's first capture."""
    captures: Tensor | None = None
    """The layout's captures, int32."""

    @classmethod
    def of(cls, states: SlotStates, layout: RaggedLayout, chunk_size: int, y_T: Tensor) -> Steps:
        """Return the leading steps of a layout, or all sequences in chunks of one token. Where
        these are all, rows of padding become zeros."""
        table, R = SequenceTable.of(layout, y_T.device), layout.num_sequences
        count = R if chunk_size == 1 else layout.num_steps
        num_rows = layout.num_rows if count == R else layout.num_step_tokens
        num_programs = count + (num_rows > layout.num_tokens)
        # Without captures nothing is written there.
        captured_n = states.captured_n if layout.captures else states.pool_S
        kept = captured_n, table.capture_offsets, table.captures
        return cls(*states[:2], table.boundaries, count, num_programs, num_rows, y_T, *kept)

    @classmethod
    def inside(cls, chunks: AnchoredChunks, starts: Tensor) -> Steps:
        """Make steps from the starts of chunks with captures to these, which the pool has then.

        starts: states at these starts, `[places, *shape]`.
        """
        pool_n = starts.float().index_select(0, chunks.capture_places_n)
        count = len(pool_n)
        slots_n = torch.arange(count, device=pool_n.device)
        return cls(pool_n, slots_n, chunks.capture_rows_n2, count, count)

    def tensors(self) -> tuple[Tensor | None, ...]:
        own = self.pool_S, self.slot_ids_R, self.y_T, self.captured_n
        return *own, self.rows, self.offsets, self.captures
