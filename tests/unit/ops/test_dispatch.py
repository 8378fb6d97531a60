"""Which backend serves an op: the first that does not refuse, or one by force."""

import runpy

import pytest
import torch

from megatron_hybrid.cli import main
from megatron_hybrid.ops import AttentionPattern, RaggedLayout, dispatch, varlen_attention
from megatron_hybrid.ops.dispatch import Backend, Op


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Ops made here are forgotten, and no backend is forced from outside."""
    monkeypatch.setattr(dispatch, "OPS", dict(dispatch.OPS))
    monkeypatch.setattr(dispatch, "forced", None)


def toy_op():
    """A sum that tells who made it: "even" refuses an odd first number, "small" one above 9."""

    def backend(name, reason, refuses):
        return Backend(
            name, lambda x, y: (name, x + y), lambda x, y: reason if refuses(x) else None
        )

    op = Op("toy_sum", lambda x, y: ("reference", x + y), {})
    op.register(backend("even", "x is odd", lambda x: x % 2))
    op.register(backend("small", "x over 9", lambda x: x > 9))
    return op


def test_the_first_that_can_serves():
    op = toy_op()
    assert op(2, 5) == ("even", 7)
    assert op(12, 5) == ("even", 17)
    assert op(3, 5) == ("small", 8)
    assert op(13, 5) == ("reference", 18)


def test_refusals_say_why_in_order():
    op = toy_op()
    assert list(op.refusals(13, 5).items()) == [
        ("even", "x is odd"),
        ("small", "x over 9"),
        ("reference", None),
    ]
    assert op.refusals() == {"even": None, "small": None, "reference": None}


def test_a_backend_of_another_device_is_never_asked(caplog, monkeypatch):
    op = Op("toy_sum", lambda x: "reference", {})
    op.register(Backend("kernels", fails, fails, device_type="cuda"))
    with caplog.at_level("INFO"):
        assert op(torch.ones(1)) == "reference"
    assert caplog.messages == []
    assert op.refusals(torch.ones(1))["kernels"] == (
        "it runs on cuda devices, the inputs are on cpu"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert op.refusals() == {"kernels": "there is no CUDA device", "reference": None}


def test_a_refusal_is_logged_once_with_its_reason(caplog):
    op = toy_op()
    with caplog.at_level("INFO"):
        for x in (3, 5, 13, 2):
            op(x, 1)
    assert caplog.messages == [
        "toy_sum: even cannot serve: x is odd",
        "toy_sum: small cannot serve: x over 9",
    ]


def fails(*inputs):
    raise AssertionError("asked")


def test_a_backend_that_is_missing_is_never_asked():
    op = toy_op()
    op.register(Backend("absent", fails, fails, missing="not installed"))
    assert op(2, 5) == ("even", 7)
    assert op.refusals(2, 5)["absent"] == "not installed"


def test_a_name_is_taken_once():
    for name in ("even", "reference"):
        with pytest.raises(ValueError, match=f"has a backend '{name}' already"):
            toy_op().register(Backend(name, max, max))


def test_forcing(monkeypatch):
    op, other = toy_op(), Op("toy_other", lambda: "reference", {})
    monkeypatch.setattr(dispatch, "forced", "reference")
    assert op(2, 5) == ("reference", 7)
    assert op.refusals(2, 5)["even"] == "MEGATRON_HYBRID_BACKEND=reference"
    monkeypatch.setattr(dispatch, "forced", "small")
    assert op(2, 5) == ("small", 7)
    assert other() == "reference"
    with pytest.raises(RuntimeError, match="cannot serve toy_sum: x over 9"):
        op(12, 5)
    monkeypatch.setattr(dispatch, "forced", "cuda")
    names = r"\['even', 'fa3', 'fla', 'flash', 'grouped_mm', 'mcore'"
    with pytest.raises(ValueError, match=f"is 'cuda'; the backends are {names}"):
        op(2, 5)


def test_public_ops_are_dispatched(monkeypatch):
    q, kv = torch.randn(5, 4, 8), torch.randn(2, 5, 2, 8)
    arguments = (q, *kv, RaggedLayout((5,), (0,)), AttentionPattern(0.3))
    expected = varlen_attention(*arguments)
    op = dispatch.OPS["varlen_attention"]
    monkeypatch.setattr(op, "backends", [])
    op.register(Backend("twice", lambda *inputs: 2 * op.reference(*inputs), lambda *inputs: None))
    assert torch.equal(varlen_attention(*arguments), 2 * expected)


def test_info_tells_the_forced_backend(monkeypatch, capsys):
    monkeypatch.setattr(dispatch, "forced", "reference")
    assert main(["info"]) == 0
    lines = [line.replace(";", "").split() for line in capsys.readouterr().out.splitlines()]
    for name in ("ssd_scan", "paged_attention", "expert_mlps"):
        assert [name, "reference"] in [line[:2] for line in lines]


def test_the_environment_forces_and_info_refuses_what_is_no_backend(monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_HYBRID_BACKEND", "cuda")
    monkeypatch.setattr(dispatch, "forced", runpy.run_path(dispatch.__file__)["forced"])
    assert main(["info"]) == 2
    assert (
        "MEGATRON_HYBRID_BACKEND is 'cuda'; the backends are "
        "['fa3', 'fla', 'flash', 'grouped_mm', 'mcore', 'reference', 'triton']"
        in capsys.readouterr().err
    )
