"""The recurrent ops on live slots do what their references do from initial to final states."""

import pytest
import torch
from recurrences import CONV, GATED_DELTA_RULE, KIMI_DELTA_ATTENTION, SELECTIVE_SCAN, SSD

from megatron_hybrid import ops
from megatron_hybrid.ops import RaggedLayout, SlotStates

SLOTS = [4, 0, 3]
NUM_SLOTS = 6
every_op = pytest.mark.parametrize(
    "op",
    [SSD, SELECTIVE_SCAN, GATED_DELTA_RULE, KIMI_DELTA_ATTENTION, CONV],
    ids=lambda op: op.name,
)


def on_slots(op, inputs, parameters, states, layout):
    """The public op, by the name of the reference's."""
    function = getattr(ops, op.name)
    if op is SSD or op is SELECTIVE_SCAN:
        (x, dt, B, C), (A, D) = inputs, parameters
        return function(x, dt, A, B, C, D, states, layout, 8)
    if op is CONV:
        return function(*inputs, *parameters, states, layout)
    return function(*inputs, states, layout, 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("captures", [(), (1, 5, 10)])
@every_op
def test_slots_are_updated_in_place(op, captures, dtype):
    layout = RaggedLayout((1, 9, 12), (3, 0, 40), captures, num_padding=2)
    generator = torch.Generator().manual_seed(0)
    inputs = op.inputs(layout.num_rows, generator)
    parameters = op.parameters(generator)
    # Slots lie apart in rows of bytes, as those of CacheMemory do.
    rows = torch.randn(NUM_SLOTS, 3, *op.state_shape, generator=generator).to(dtype)
    pool = rows[:, 1]
    expected_y, final, captured = op.call(inputs, parameters, pool[SLOTS], layout, 8)
    expected = rows.clone()
    expected[SLOTS, 1] = final.to(dtype)

    room = pool.new_empty(len(captures), *op.state_shape) if captures else None
    states = SlotStates(pool, torch.tensor(SLOTS), room)
    y = on_slots(op, inputs, parameters, states, layout)
    assert torch.equal(y, expected_y)
    assert torch.equal(rows, expected)
    if captures:
        assert torch.equal(room, captured.to(dtype))


@every_op
def test_without_slots_sequences_start_from_zeros(op):
    layout = RaggedLayout((1, 9), (0, 0))
    generator = torch.Generator().manual_seed(1)
    inputs, parameters = op.inputs(10, generator), op.parameters(generator)
    zeros = torch.zeros(2, *op.state_shape, dtype=torch.float64)
    expected, *_ = op.call(inputs, parameters, zeros, layout, 8)
    assert torch.equal(on_slots(op, inputs, parameters, None, layout), expected)
