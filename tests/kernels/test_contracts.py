"""Contracts at the door of an op stand before every backend: none reads past a tensor."""

import pytest
import torch
from host_syncs import no_host_syncs
from op_calls import assert_refused, calls, scans
from torch.autograd import forward_ad

from megatron_hybrid.ops import RaggedLayout, SlotStates, dispatch

BACKENDS = {
    name: [own.name for own in op.backends if own.missing is None and own.name != "flash"]
    for name, op in dispatch.OPS.items()
}
CALLS = {
    (call, backend): make
    for call, make in calls().items()
    for backend in BACKENDS[call.partition(" ")[0]]
}


def run(monkeypatch, op, backend, inputs):
    """The outputs of a backend."""
    monkeypatch.setattr(dispatch, "forced", backend)
    return outputs_of(op, *inputs)


def outputs_of(op, *inputs):
    outputs = dispatch.OPS[op](*inputs)
    return [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None]


@pytest.mark.parametrize(("call", "backend"), CALLS)
@torch.no_grad()
def test_a_size_that_differs_by_one_is_refused_and_changes_nothing(monkeypatch, call, backend):
    op, make = call.partition(" ")[0], CALLS[call, backend]
    if backend != "grouped_mm":  # whose sizes a CPU does not take
        found, wanted = (run(monkeypatch, op, each, make()) for each in (backend, "reference"))
        for left, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(dispatch, "forced", None if backend == "grouped_mm" else backend)
    assert assert_refused(op, make) > 3


KERNELS = [(call, backend) for call, backend in CALLS if backend in ("triton", "mcore", "fla")]


@pytest.mark.parametrize(
    ("call", "backend"),
    [each for each in KERNELS if each[0].partition(" ")[2] in ("", "mixed")],
)
@torch.no_grad()
def test_a_kernel_is_asked_before_the_reference_and_waits_for_no_device(monkeypatch, call, backend):
    op = dispatch.OPS[call.partition(" ")[0]]
    inputs = CALLS[call, backend]()
    assert next(name for name, reason in op.refusals(*inputs).items() if reason is None) == backend
    monkeypatch.setattr(op, "reference", None)
    outputs_of(op.name, *inputs)  # the first call lays the sequences out, on the host
    with no_host_syncs():
        assert outputs_of(op.name, *inputs)


@pytest.mark.usefixtures("loops_over_tensors")
@pytest.mark.parametrize(("op", "backend"), sorted({(c.partition(" ")[0], b) for c, b in KERNELS}))
def test_gradients_are_those_of_the_reference(monkeypatch, op, backend):
    layout = RaggedLayout((5, 3), (0, 0), num_padding=2)
    flat = calls().get(op)
    inputs = flat() if flat else scans(layout.num_rows)[op](layout)
    inputs = [None if isinstance(x, SlotStates) else x for x in inputs]
    if op in ("causal_conv1d", "ssd_scan"):  # whose forward takes them in any places
        inputs[:2] = (x.mT.contiguous().mT for x in inputs[:2])
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    for leaf in leaves:
        if not flat and len(leaf) == layout.num_rows:
            leaf[layout.num_tokens :] = torch.nan
        leaf.requires_grad_()
    refusal = dispatch.OPS[op].refusals(*inputs)[backend]
    assert refusal is None or op == "paged_attention" or "chunk_size" in refusal
    gradients = []
    for forced in (None, "reference"):
        monkeypatch.setattr(dispatch, "forced", forced)
        total = sum(y.square().sum() for y in outputs_of(op, *inputs) if y.requires_grad)
        gradients.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_each_kernel_backend_is_called():
    assert {backend for _, backend in CALLS} >= {"triton", "mcore", "fla"}


@pytest.mark.parametrize("op", ["activate", "rms_norm", "time_steps"])
def test_what_only_torch_can_read_is_left_to_the_reference(op):
    """Views that negate when they are read, and tensors with tangents."""
    first, *rest = calls()[op]()
    assert dispatch.OPS[op].refusals(first, *rest)["triton"] is None
    for view in (torch._neg_view(first), torch.complex(first, first).conj().imag):
        assert dispatch.OPS[op].refusals(view, *rest)["triton"] is not None
        for left, right in zip(outputs_of(op, view, *rest), outputs_of(op, view.clone(), *rest)):
            torch.testing.assert_close(left, right)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(first, torch.ones_like(first))
        assert "forward mode" in dispatch.OPS[op].refusals(dual, *rest)["triton"]
        assert forward_ad.unpack_dual(outputs_of(op, dual, *rest)[0]).tangent.any()
        assert dispatch.OPS[op].refusals(first, *rest)["triton"] is None
