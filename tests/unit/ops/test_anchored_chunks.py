"""Chunks for kernels are those of the reference's grid, without its empty rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import layouts

from megatron_hybrid.ops.anchored_chunks import AnchoredChunks
from megatron_hybrid.ops.chunk_grid import ChunkGrid

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), chunk_size=st.sampled_from((1, 4, 16, 64)))
def test_chunks_are_those_of_the_grid(layout, chunk_size):
    if layout.num_steps == layout.num_sequences:
        return
    chunks = AnchoredChunks.of(layout, chunk_size, CPU)
    grid = ChunkGrid.of(layout, chunk_size, CPU)
    lengths = chunks.boundaries_S.diff()
    owners = [r for r, count in enumerate(grid.counts) for _ in range(count)]
    assert chunks.sequences_S.tolist() == owners
    assert [owners.index(r) + n - 1 for r, n in enumerate(grid.counts)] == (
        chunks.last_chunks_R.tolist()
    )
    assert chunks.first_chunks_R.tolist() == [
        *(owners.index(r) for r in range(len(grid.counts))),
        len(owners),
    ]
    assert chunks.whole_S2.tolist() == [[chunk, 0] for chunk in range(len(owners))]
    # The grid's rows of a chunk that hold tokens, counted.
    rows = torch.ones(layout.num_tokens - layout.num_step_tokens)
    assert lengths.tolist() == grid.pad(rows).sum(1).tolist()


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), chunk_size=st.sampled_from((1, 4, 16, 64)))
def test_a_capture_is_so_many_rows_of_a_chunk(layout, chunk_size):
    if layout.num_steps == layout.num_sequences:
        return
    chunks = AnchoredChunks.of(layout, chunk_size, CPU)
    counts = [count for count in layout.captures if count > layout.num_step_tokens]
    tokens = layout.num_step_tokens
    rows, places = chunks.capture_rows_n2, chunks.place_chunks[chunks.capture_places_n]
    assert (tokens + rows[:, 1]).tolist() == counts
    assert torch.equal(rows[:, 0], chunks.boundaries_S[places])
    sizes = chunks.boundaries_S.diff()[places]
    assert ((rows[:, 1] > rows[:, 0]) & (rows[:, 1] <= rows[:, 0] + sizes)).all()
    # The chunks with captures have numbers from 0, the others have none.
    numbers = dict(zip(chunks.place_chunks.tolist(), range(len(chunks.place_chunks))))
    assert chunks.places_S.tolist() == [
        numbers.get(chunk, -1) for chunk in range(len(chunks.sequences_S))
    ]
    firsts = chunks.first_chunks_R.tolist()[:-1]
    owners = [firsts.index(chunk) if chunk in firsts else -1 for chunk in numbers]
    assert chunks.place_sequences.tolist() == owners
