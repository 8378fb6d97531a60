"""Benchmarks of ops: what they count is what the tensors hold, and others compute the same."""

import math
from importlib.util import find_spec

import pytest
import torch
from recurrences import assert_near

from benchmarks.gpu.bench import Bench, Result, first_line, measured_limits
from benchmarks.gpu.ops import FAMILIES, decode_layout, prefill_layout, run
from megatron_hybrid.ops import RaggedLayout, SlotStates, dispatch
from megatron_hybrid.tools.roofline import Device, Work, num_bytes

CPU = torch.device("cpu")
SLOW = Device("slow", 1e9, 1e9, 0, "made up")
LAYOUTS = [prefill_layout(48), decode_layout(3, 32)]
each = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.op} of {f.model}")


@each
@pytest.mark.parametrize("layout", LAYOUTS, ids=["prefill", "decode"])
def test_bytes_are_those_of_the_tensors(family, layout):
    """Of rows and states; parameters of a layer are not counted."""
    inputs = family.inputs(family.toy, layout, CPU, torch.bfloat16)
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    rows = [each for each in tensors if len(each) == layout.num_rows and each.dim() > 1]
    rows.append(dispatch.OPS[family.op](*inputs))
    expected = num_bytes(rows)
    if family.op == "paged_attention":
        expected -= num_bytes(tensors[3:]) if layout.num_sequences > 1 else 0  # the block table
        of_token = num_bytes(pages[0, 0] for pages in tensors[1:3])
        reach = family.toy.get("window", math.inf)
        seen = [min(start, reach - 1) for start in layout.start_positions]
        expected += of_token * (sum(seen) + layout.num_tokens)
    else:
        (states,) = (each for each in inputs if isinstance(each, SlotStates))
        expected += 2 * num_bytes([states.pool_S])
    assert family.work(family.toy, layout).num_bytes == expected


@each
def test_a_capture_is_written_once_more(family):
    bare, captured = RaggedLayout((20,), (0,)), RaggedLayout((20,), (0,), (3, 11))
    if family.op == "paged_attention":
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
    """Those of torch; others need libraries and a GPU."""
    inputs = family.inputs(family.toy, layout, CPU, torch.float32)
    prefill = layout.num_sequences == 1
    others = (family.prefill_others if prefill else family.decode_others)(
        family.toy, layout, inputs
    )
    expected = dispatch.OPS[family.op](*inputs)
    for name, make in others.items():
        if name == "torch SDPA":
            found = make()()
            assert found.shape == expected.shape
            assert_near(found, expected)
        elif find_spec(name) is None:
            with pytest.raises(ImportError, match=f"needs {name}"):
                make()


def test_a_share_of_the_roofline_is_claimed_of_measured_devices_alone():
    for limits, has_bound in ((None, False), (SLOW, True)):
        results = list(run(Bench(CPU, True, limits)))
        assert {result.what.split()[0] for result in results} >= {each.op for each in FAMILIES}
        for result in results:
            assert result.seconds > 0
            if "captured" not in result.what:
                assert (result.bound is not None) is has_bound
                assert (result.share is not None) is has_bound
    assert Bench(CPU, True, SLOW).bound([Work(1e9), Work(0, 2e9)]) == 3.0


def test_cells_of_a_result():
    result = Result("x", 2e-3, 1e-3, {"a": 4e-3, "b": "needs b"}, "<= 1", "triton")
    assert result.cells() == ("x", "2.00 ms (triton)", "50%", "a 2.00x; b: needs b", "<= 1")
    assert Result("x", None, note="needs a GPU").cells()[1:3] == ("- (needs a GPU)", "")
    assert first_line(ValueError()) == "ValueError" and first_line(ValueError("a\nb")) == "a"


def test_on_a_gpu_what_fails_is_a_row(capsys):
    def results():
        yield Result("first", 1.0)
        raise ValueError("no room\nfor it")

    first, second = Bench(CPU, False, None).guarded("second", results())
    assert (first.what, second.what, second.note) == ("first", "second", "no room")
    assert "ValueError" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no room"):
        list(Bench(CPU, True, None).guarded("second", results()))


def test_limits_are_measured():
    limits = measured_limits(Bench(CPU, True, None))
    assert limits.bandwidth > 0 and limits.flops > 0
