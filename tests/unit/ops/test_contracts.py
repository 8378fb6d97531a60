"""Contracts of ops: each size of each tensor is tied to another one, and checked at the door."""

import inspect

import pytest
import torch
from op_calls import DECODES, MIXED, assert_refused, calls, scans, tensors

from megatron_hybrid.ops import RaggedLayout, causal_conv1d, dispatch, gated_rms_norm, rms_norm
from megatron_hybrid.ops.dispatch import Op

CALLS = calls()
RECURRENT = sorted(
    name for name, make in scans(3).items() if "attention" not in name or "kimi" in name
)

OWN = "megatron_hybrid."
OPS = {n: op for n, op in dispatch.OPS.items() if op.reference.__module__.startswith(OWN)}
"""Without those that other tests have made."""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Ops made here are forgotten."""
    monkeypatch.setattr(dispatch, "OPS", dict(dispatch.OPS))


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_a_size_that_differs_by_one_is_refused_and_changes_nothing(name):
    op = name.partition(" ")[0]
    OPS[op](*CALLS[name]())
    assert assert_refused(op, CALLS[name]) > 3


def test_each_op_is_called_with_each_of_its_tensors():
    for name, op in OPS.items():
        whole = [make for own, make in CALLS.items() if own.partition(" ")[0] == name]
        assert whole, name
        assert len(tensors(whole[0]())) == len(op.contracts), name


def test_an_op_whose_tensor_has_no_contract_cannot_be_made():
    def reference(x: torch.Tensor, y: torch.Tensor | None, size: int) -> torch.Tensor:
        raise AssertionError("called")

    with pytest.raises(TypeError, match=r"toy has contracts for \['x'\] and the tensors \['x', "):
        Op("toy", reference, {"x": "T T"})
    with pytest.raises(TypeError, match="C of y of toy is the size of no other operand"):
        Op("toy", reference, {"x": "T T", "y": "T C or None"})
    op = Op("toy", reference, {"x": "T T", "y": "T any or None"})
    with pytest.raises(ValueError, match=r"y of toy has shape \[3, 1\], expected .* = \[2, any\]"):
        op(torch.zeros(2, 2), torch.zeros(3, 1), 1)
    with pytest.raises(ValueError, match="x of toy is None, expected"):
        op(None, torch.zeros(3, 1), 1)


@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_refused_by_name(name):
    *rest, states, layout = scans(3)[name](DECODES)
    op, before = OPS[name], states.pool_S.clone()
    refusals = {
        r"captured_n is None, and the layout has 2 captures: give a tensor \[2, ": (
            ValueError,
            {"captured_n": None},
        ),
        r"slot_ids_R of \w+ has dtype torch.float32": (TypeError, {"slot_ids_R": torch.zeros(3)}),
        r"pool_S of \w+ has dtype torch.int64": (TypeError, {"pool_S": states.pool_S.long()}),
    }
    if name == "causal_conv1d":
        reason, error = "rounds and overflows", ValueError
    else:
        reason, error = "accumulates over the whole sequence", TypeError
    refusals[reason] = error, {"pool_S": states.pool_S.half()}
    for message, (error, changed) in refusals.items():
        with pytest.raises(error, match=message):
            op(*rest, states._replace(**changed), layout)
    with pytest.raises(TypeError, match=r"has dtype torch.int64; give one of"):
        op(rest[0].long(), *rest[1:], states, layout)
    assert torch.equal(before, states.pool_S)


def inputs_of(name, **changed):
    make = CALLS[name]
    names = list(inspect.signature(OPS[name.partition(" ")[0]].reference).parameters)
    return [changed.get(own, value) for own, value in zip(names, make())]


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("time_steps", {"factor_F": torch.ones(3)}, "3 numbers, .* evenly to 8 channels"),
        ("time_steps", {"factor_F": torch.ones(0)}, "0 numbers, .* evenly to 8 channels"),
        ("rotate_heads", {"cos_T1d": torch.ones(3, 1, 5), "sin_T1d": torch.ones(3, 1, 5)}, "5 pa"),
        ("rotate_heads", {"cos_T1d": torch.ones(1, 1, 4)}, r"cos_T1d .* \[3, 1, 4\]"),
        ("gated_rms_norm", {"weight_GC": torch.ones(1, 8)}, r"\[1, 8\], expected \[G, C\] or "),
        ("gated_rms_norm", {"weight_GC": torch.ones(2, 1)}, r"weight_GC .* \[2, 8\] or \[8\]"),
        ("rms_norm", {"weight_C": torch.ones(1)}, r"weight_C .* \[8\]"),
        ("rms_norm", {"added": torch.ones(1, 8)}, r"added .* \[3, 8\]"),
        ("ssd_scan mixed", dict.fromkeys(("B_TGN", "C_TGN"), torch.ones(12, 3, 16)), "to 3 groups"),
        ("ssd_scan mixed", dict.fromkeys(("B_TGN", "C_TGN"), torch.ones(12, 0, 16)), "to 0 groups"),
        (
            "gated_delta_rule mixed",
            dict.fromkeys(("q_THN", "k_THN"), torch.ones(12, 3, 16)),
            "4 heads of v cannot be shared out evenly to 3 of q and k",
        ),
        (
            "causal_conv1d mixed",
            {"weight_CK": torch.ones(8, 1), "initial_states_RCk": None},
            "has K = 1 columns",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_named(name, changed, message):
    with pytest.raises(ValueError, match=message):
        OPS[name.partition(" ")[0]](*inputs_of(name, **changed))


def test_options_are_refused_by_name():
    x, weight, layout = torch.ones(8, 8), torch.ones(8, 4), RaggedLayout((8,), (0,))
    with pytest.raises(ValueError, match="activation is 'relu'; choose 'silu' or None"):
        causal_conv1d(x, weight, None, None, layout, "relu")
    with pytest.raises(ValueError, match="activation is 'relu'; choose 'silu' or 'sigmoid'"):
        gated_rms_norm(x[:, None], x[:, None], x[0], 1e-5, "relu")
    for name in ("ssd_scan", "selective_scan", "gated_delta_rule", "kimi_delta_attention"):
        with pytest.raises(ValueError, match="chunk_size is 0; it must be at least 1"):
            OPS[name](*scans(12)[name](MIXED), 0)


def test_a_norm_of_no_numbers_has_none():
    assert rms_norm(torch.ones(0, 5), torch.ones(5), 1e-5).shape == (0, 5)
    empty = torch.ones(3, 2, 0)
    assert gated_rms_norm(empty, empty, torch.ones(0), 1e-5).shape == (3, 2, 0)
