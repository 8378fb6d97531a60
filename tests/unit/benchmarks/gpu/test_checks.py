"""Checks of ops and configs tell what is wrong, with backends that are wrong on purpose. What
benchmarks of ops count is what the tensors hold, and others compute the same."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from recurrences import assert_near

from benchmarks.gpu import checks
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks import TOY_LAYOUTS, compared, sizes_of
from benchmarks.gpu.ops import FAMILIES, decode_layout, expert_rows, prefill_layout, run
from megatron_hybrid.ops import RaggedLayout, SlotStates, dispatch
from megatron_hybrid.ops.dispatch import Backend
from megatron_hybrid.tools.roofline import Device, Work, num_bytes

CPU = Bench(torch.device("cpu"), True, None)
FAMILY = next(family for family in FAMILIES if family.op == "ssd_scan")
OP = dispatch.OPS["ssd_scan"]


def row_of(run, dtype=torch.float32, verify=lambda *inputs: None):
    given = CPU, FAMILY, Backend("mine", run, verify), FAMILY.toy, TOY_LAYOUTS["mixed"], dtype
    return compared("what", *given)


def wrong(place, value):
    """The reference with one wrong output: of a token, a padding row, a state or a capture."""

    def run(*inputs):
        y = OP.reference(*inputs)
        states = inputs[6]
        output = {"token": y[0], "padding": y[-1], "state": states.pool_S[1]}
        output["capture"] = states.captured_n[0]
        output[place][0, 0] += value
        return y

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_right(dtype):
    row = row_of(OP.reference, dtype)
    assert row.fault == "" and row.note == "mine" and row.numbers["error"] <= 1e-2


@pytest.mark.parametrize("place", ["token", "state", "capture"])
@pytest.mark.parametrize("value", [1e3, float("nan")])
def test_a_wrong_value_is_told(place, value):
    assert "at most 0.0001" in row_of(wrong(place, value)).fault


def test_padding_rows_have_to_be_zero():
    assert "padding rows are not zero" in row_of(wrong("padding", 1e-6)).fault


def test_the_bits_have_to_be_the_same_again():
    def run(*inputs):
        return OP.reference(*inputs) * (1 + 1e-6 * torch.rand(1))

    assert row_of(run).fault == "other bits in 3 runs"


def test_a_refusal_is_a_fault_but_for_products_of_float32():
    precisions = []

    def verify(*inputs):
        precisions.append(torch.get_float32_matmul_precision())
        return None if precisions[-1] == "high" else "it multiplies float32 as TF32"

    assert row_of(OP.reference, verify=verify).fault == ""
    assert precisions == ["highest", "high"]
    assert torch.get_float32_matmul_precision() == "highest"
    assert row_of(OP.reference, verify=lambda *inputs: "why not").fault == "mine refused: why not"


def test_a_wrong_config_is_told_and_is_no_fault_if_it_is_left_out(monkeypatch):
    configs = [
        SimpleNamespace(kwargs={"BLOCK": size}, num_warps=4, num_stages=3)
        for size in (32, 64, 128, 256)
    ]
    active = []

    @contextlib.contextmanager
    def chosen(compiles_all=False):
        active.append(SimpleNamespace(of={}, found={"scan_kernel": configs[:2]}, launched={}))
        yield active[-1]

    def run(*inputs):
        config = active[-1].of.get("scan_kernel", configs[0])
        is_right = config.kwargs["BLOCK"] in (32, 256)
        return OP.reference(*inputs) if is_right else wrong("token", float("nan"))(*inputs)

    backend = Backend("mine", run, lambda *inputs: None)
    monkeypatch.setattr(OP, "backends", [backend])
    monkeypatch.setattr(checks, "chosen", chosen)
    monkeypatch.setattr(checks, "left_out", {"scan_kernel": configs[2:]}.get)
    right, faulty, *unused = [check.make() for check in checks.configs(CPU, "ssd_scan")]
    assert right.what == "scan_kernel, BLOCK=32 warps=4 stages=3" and right.fault == ""
    assert faulty.what == "scan_kernel, BLOCK=64 warps=4 stages=3"
    assert faulty.fault.startswith("error nan")
    assert [row.note.split(" nan")[0] for row in unused] == [
        "left out; wrong: error",
        "left out; mine",
    ]
    assert not any(row.fault for row in unused)


def test_checks_of_an_op_name_what_was_launched(monkeypatch):
    @contextlib.contextmanager
    def chosen():
        yield SimpleNamespace(launched={"scan_kernel": "BLOCK=32 num_warps=4"})

    backend = Backend("mine", wrong("state", 9.0), lambda *inputs: None)
    monkeypatch.setattr(OP, "backends", [backend])
    monkeypatch.setattr(checks, "chosen", chosen)
    rows = [check.make() for check in checks.ops(CPU, "ssd_scan", "fp32")]
    assert len(rows) == 2 * len(TOY_LAYOUTS)
    assert {row.numbers["launched"] for row in rows} == {"scan_kernel BLOCK=32 num_warps=4"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_odd_sizes_fit_each_other(family):
    for layout in TOY_LAYOUTS.values():
        sizes = sizes_of(family, "odd")
        inputs = family.inputs(sizes, layout, CPU.device, torch.float32)
        assert dispatch.OPS[family.op](*inputs).isfinite().all()


SLOW = Device("slow", 1e9, 1e9, 0, "made up")
LAYOUTS = [prefill_layout(48), decode_layout(3, 32)]
each = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


@each
@pytest.mark.parametrize("layout", LAYOUTS, ids=["prefill", "decode"])
def test_bytes_are_those_of_the_tensors(family, layout):
    """Of rows and states; parameters of a layer are not counted."""
    inputs = family.inputs(family.toy, layout, CPU.device, torch.bfloat16)
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
        for each in family.inputs(family.toy, captured, CPU.device, torch.bfloat16)
        if isinstance(each, SlotStates)
    )
    added = [family.work(family.toy, layout).num_bytes for layout in (bare, captured)]
    assert added[1] - added[0] == num_bytes([states.captured_n])


@each
@pytest.mark.parametrize("layout", LAYOUTS, ids=["prefill", "decode"])
def test_other_ways_that_run_here_give_the_same(family, layout):
    """That of torch; fla's needs a GPU."""
    inputs = family.inputs(family.toy, layout, CPU.device, torch.float32)
    make = family.others(family.toy, layout, inputs).get("torch SDPA")
    if make is not None:
        found, expected = make()(), dispatch.OPS[family.op](*inputs)
        assert found.shape == expected.shape
        assert_near(found, expected)


def test_a_share_of_the_roofline_is_claimed_of_measured_devices_alone():
    for limits, has_bound in ((None, False), (SLOW, True)):
        rows = list(run(Bench(CPU.device, True, limits)))
        assert {row.what.split()[0] for row in rows} == {each.op for each in FAMILIES}
        for row in rows:
            assert row.seconds > 0
            assert (row.bound is not None) is has_bound
            assert (row.share is not None) is has_bound
    assert Bench(CPU.device, True, SLOW).bound([Work(1e9), Work(0, 2e9)]) == 3.0
