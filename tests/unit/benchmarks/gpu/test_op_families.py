"""Benchmarks of ops: what they count is what the tensors hold, and others compute the same."""

import math

import pytest
import torch
from recurrences import assert_near

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ops import FAMILIES, decode_layout, expert_rows, prefill_layout, run
from megatron_hybrid.ops import RaggedLayout, SlotStates, dispatch
from megatron_hybrid.tools.roofline import Device, Work, num_bytes

CPU = torch.device("cpu")
SLOW = Device("slow", 1e9, 1e9, 0, "made up")
LAYOUTS = [prefill_layout(48), decode_layout(3, 32)]
each = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


@each
@pytest.mark.parametrize("layout", LAYOUTS, ids=["prefill", "decode"])
def test_bytes_are_those_of_the_tensors(family, layout):
    """Of rows and states; parameters of a layer are not counted."""
    inputs = family.inputs(family.toy, layout, CPU, torch.bfloat16)
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    length = len(inputs[0])  # experts have rows of their own
    rows = [each for each in tensors if len(each) == length and each.dim() > 1]
    rows.append(dispatch.OPS[family.op](*inputs))
    expected = num_bytes(rows)
    if family.op == "paged_attention":
        expected -= num_bytes(tensors[3:]) if layout.num_sequences > 1 else 0  # the block table
        of_token = num_bytes(pages[0, 0] for pages in tensors[1:3])
        reach = family.toy.get("window", math.inf)
        seen = [min(start, reach - 1) for start in layout.start_positions]
        expected += of_token * (sum(seen) + layout.num_tokens)
    elif family.op == "expert_mlps":
        used = [count > 0 for count in expert_rows(family.toy, layout)]
        expected += num_bytes(each[used] for each in (inputs[2], inputs[4]))
    elif family.op == "packed_linear":
        expected += num_bytes(inputs[1:3])
    elif family.is_recurrent:
        (states,) = (each for each in inputs if isinstance(each, SlotStates))
        expected += 2 * num_bytes([states.pool_S])
    assert family.work(family.toy, layout).num_bytes == expected


@each
def test_a_capture_is_written_once_more(family):
    bare, captured = RaggedLayout((20,), (0,)), RaggedLayout((20,), (0,), (3, 11))
    if not family.is_recurrent:
        return
    states = next(
        each
        for each in family.inputs(family.toy, captured, CPU, torch.bfloat16)
        if isinstance(each, SlotStates)
    )
    added = [family.work(family.toy, layout).num_bytes for layout in (bare, captured)]
    assert added[1] - added[0] == num_bytes([states.captured_n])


@each
@pytest.mark.parametrize("layout", LAYOUTS, ids=["prefill", "decode"])
def test_other_ways_that_run_here_give_the_same(family, layout):
    """That of torch; fla's needs a GPU."""
    inputs = family.inputs(family.toy, layout, CPU, torch.float32)
    make = family.others(family.toy, layout, inputs).get("torch SDPA")
    if make is not None:
        found, expected = make()(), dispatch.OPS[family.op](*inputs)
        assert found.shape == expected.shape
        assert_near(found, expected)


def test_a_share_of_the_roofline_is_claimed_of_measured_devices_alone():
    for limits, has_bound in ((None, False), (SLOW, True)):
        rows = list(run(Bench(CPU, True, limits)))
        assert {row.what.split()[0] for row in rows} == {each.op for each in FAMILIES}
        for row in rows:
            assert row.seconds > 0
            assert (row.bound is not None) is has_bound
            assert (row.share is not None) is has_bound
    assert Bench(CPU, True, SLOW).bound([Work(1e9), Work(0, 2e9)]) == 3.0
