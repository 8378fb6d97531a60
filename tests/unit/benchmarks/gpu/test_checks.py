"""Checks of ops and configs tell what is wrong, with backends that are wrong on purpose."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import checks
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks import TOY_LAYOUTS, compared, sizes_of
from benchmarks.gpu.ops import FAMILIES
from megatron_hybrid.ops import dispatch
from megatron_hybrid.ops.dispatch import Backend

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
