"""RaggedLayout: what it derives, what it refuses; the chunk grid it makes."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from recurrences import chunk_sizes, layouts

from megatron_hybrid.ops import RaggedLayout
from megatron_hybrid.ops.chunk_grid import ChunkGrid


def test_derived_numbers():
    layout = RaggedLayout((1, 1, 5, 1), (7, 0, 30, 2), (2, 4, 7, 8), num_padding=3)
    assert layout.cu_seqlens == (0, 1, 2, 7, 8)
    assert (layout.num_tokens, layout.num_padding, layout.num_rows) == (8, 3, 11)
    assert (layout.num_sequences, layout.num_steps) == (4, 2)
    assert layout.capture_sequences == (1, 2, 2, 3)
    assert layout.token_positions("cpu").tolist() == [7, 0, 30, 31, 32, 33, 34, 2, 0, 0, 0]
    assert layout.sequence_ids("cpu").tolist() == [0, 1, 2, 2, 2, 2, 2, 3]


def test_only_decodes_and_leading_single_tokens_are_steps():
    assert RaggedLayout((1, 1, 1), (0, 0, 0)).num_steps == 3
    assert RaggedLayout((2, 1, 1), (0, 0, 0)).num_steps == 0
    layout = RaggedLayout((1, 3, 1, 2), (0, 0, 0, 0), num_decodes=2)
    assert (layout.num_singles, layout.num_steps, layout.num_step_tokens) == (1, 3, 5)


def test_lists_become_tuples_and_equal_layouts_are_equal():
    layout = RaggedLayout([2, 1], [0, 3], [1])
    assert layout == RaggedLayout((2, 1), (0, 3), (1,))
    assert hash(layout) == hash(RaggedLayout((2, 1), (0, 3), (1,)))
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), ()), "at least one sequence"),
        (((2, 3), (0,)), "1 start_positions for 2 lengths"),
        (((2, 0), (0, 0)), "lengths holds 0"),
        (((2,), (0,), (0,)), "captures holds 0 after 0"),
        (((4,), (0,), (2, 2)), "captures holds 2 after 2"),
        (((4,), (0,), (3, 1)), "captures holds 1 after 3"),
        (((1, 2), (0, 1), (), 0, None, 3), "num_decodes is 3, of 2 sequences"),
        (((4,), (0,), (5,)), r"captures holds 5 .* in 1\.\.4"),
    ],
)
def test_bad_values_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        RaggedLayout(*arguments)


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), chunk_size=chunk_sizes)
def test_every_token_sits_in_the_chunk_row_of_its_absolute_position(layout, chunk_size):
    """Invariant of the grid: whatever the cut, position t fills row t % chunk_size."""
    positions = layout.token_positions("cpu")[layout.num_steps : layout.num_tokens]
    if not len(positions):
        return
    grid = ChunkGrid.of(layout, chunk_size, "cpu")
    assert grid is ChunkGrid.of(layout, chunk_size, torch.device("cpu"))
    owners = layout.sequence_ids("cpu")[layout.num_steps :]
    position_SL, owner_SL = grid.pad(positions + 1), grid.pad(owners + 1)
    rows = torch.arange(chunk_size).expand_as(position_SL)
    filled = position_SL > 0
    assert torch.equal((position_SL - 1)[filled] % chunk_size, rows[filled])
    assert torch.equal(grid.unpad(position_SL), positions + 1)
    for chunk_positions, chunk_owners in zip(position_SL, owner_SL):
        inside = chunk_positions > 0
        assert len(set(chunk_owners[inside].tolist())) == 1
        assert len({(p - 1) // chunk_size for p in chunk_positions[inside].tolist()}) == 1
