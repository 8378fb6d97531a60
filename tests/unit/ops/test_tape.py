"""A tape computes what its function computes, to the bit, from what is in memory then."""

import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from megatron_hybrid.ops.tape import Live, Tape, once, recording

_UNARY = {
    "neg": torch.neg,
    "exp": lambda x: x.clamp(max=3.0).exp(),
    "half": lambda x: x[: max(1, len(x) // 2)],
    "turn": lambda x: x.t(),
    "flat": lambda x: x.reshape(1, -1),
    "same": lambda x: x.to(x.dtype),
    "parts": lambda x: torch.cat(x.split(1), 1),
    "last": lambda x: x.unbind(0)[-1][None],
    "in place": lambda x: x.clone().mul_(0.5).add_(1.0),
    "padded": lambda x: pad(x, (0, 1)),
    "out": lambda x: torch.mul(x, 2.0, out=torch.empty_like(x)),
    "bits": lambda x: x.contiguous().view(torch.int32).bitwise_and(-2).view(torch.float32),
    "conjugate": lambda x: (x + 1j).conj().imag + x,
    "named": lambda x: torch.add(x, x, alpha=2).div(0.3, rounding_mode="floor"),
    "picked": lambda x: torch.where(x > 0, x, 0.5).index_select(1, torch.arange(1)),
    "mean": lambda x: x.mean(-1, keepdim=True).softmax(0, dtype=torch.float32),
    "new": lambda x: torch.arange(x.shape[1]).to(x.dtype) + x,
}


def tape_and_run(tape, run, source, values):
    results = []
    for call in (tape, run):
        source.copy_(values)
        results.append(call())
    return results


@given(st.lists(st.sampled_from(sorted(_UNARY)), min_size=1, max_size=12), st.integers(0, 2**31))
def test_a_tape_equals_its_function_on_new_values(names, seed):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(3, 4, generator=generator)

    def run() -> torch.Tensor:
        source.mul_(0.5)  # all in place
        found, x = [], source
        for name in names:
            x = _UNARY[name](x)
            found.append(x.sum())
        return torch.stack(found)

    with torch.inference_mode():
        tape = Tape(run, Live())
        source.mul_(2.0)
        assert tape.reason is None and torch.equal(tape.take_first(), run())
        for _ in range(2):
            values = torch.randn(3, 4, generator=generator)
            given, expected = tape_and_run(tape, run, source, values)
            assert torch.equal(given, expected)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: torch.tensor([1.0]),
        lambda x: torch.from_numpy(__import__("numpy").ones(1)),
        lambda x: x.unsqueeze_(0),
        lambda x: x[:].resize_(1),
        lambda x: torch.rand(2, generator=torch.Generator()),
    ],
)
def test_what_may_be_otherwise_in_another_call_has_no_tape(read):
    """What the host reads or makes, too. The first call is a whole one all the same."""
    x, calls = torch.ones(2), []

    def run() -> torch.Tensor:
        x.add_(1.0)
        read(x * 1.0)
        calls.append(x.clone())
        return x * 2

    with torch.inference_mode():
        tape = Tape(run, Live())
        assert tape.reason and tape.take_first().tolist() == [4.0, 4.0] and len(calls) == 1
        assert tape().tolist() == [6.0, 6.0] and len(calls) == 2


def test_a_tensor_of_an_operation_that_was_not_seen_has_no_tape():
    x = torch.ones(2)

    def run() -> torch.Tensor:
        y = x + 1
        with once_unseen():
            z = y[:1]
        return z * 2

    def once_unseen():
        return torch.utils._python_dispatch._disable_current_modes()

    with torch.inference_mode():
        assert "not seen" in Tape(run, Live()).reason


def alone(function, *inputs):
    return recording.get().call(SimpleNamespace(serve=function), inputs)


def test_ops_that_are_taken_apart_get_what_is_live():
    """Inputs are taken anew where they are named; what the function reads does not matter."""
    x, seen, now = torch.arange(3.0), [], {"layout": "first"}
    first = now["layout"]

    def scaled(y: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((layout, y.tolist()))
        return y * 2, y * 3

    def run() -> torch.Tensor:
        a, b = alone(scaled, x + 1, first)
        return a + b

    with torch.inference_mode():
        live = Live()
        live.add(first, lambda: now["layout"])
        tape = Tape(run, live)
        assert tape.reason is None and tape.take_first().tolist() == [5.0, 10.0, 15.0]
        now["layout"] = "second"
        x.add_(1.0)
        assert tape().tolist() == [10.0, 15.0, 20.0]
    assert seen == [("first", [1.0, 2.0, 3.0]), ("second", [2.0, 3.0, 4.0])]


def test_what_is_made_once_is_kept():
    made = []

    def make() -> torch.Tensor:
        made.append(torch.tensor([2.0]))
        return made[-1]

    x = torch.ones(1)
    with torch.inference_mode():
        tape = Tape(lambda: x * once(make), Live())
        assert tape.reason is None
        x.fill_(3.0)
        assert tape().item() == 6.0 and len(made) == 1
    assert once(partial(max, 1, 2)) == 2  # where nothing is recorded


def test_a_tape_keeps_nothing_of_a_call():
    x, gone = torch.ones(4), []

    def watched(y: torch.Tensor) -> torch.Tensor:
        gone.append(weakref.ref(y))
        return y * 1.0

    with torch.inference_mode():
        tape = Tape(lambda: alone(watched, x + 1.0) + alone(watched, x + 2.0), Live())
        tape.take_first()
        del gone[:]
        assert tape().tolist() == [5.0] * 4
    assert [reference() for reference in gone] == [None, None]
