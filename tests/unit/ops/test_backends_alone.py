"""What keeps tests on a GPU from comparing a reference with itself; `meta` stands in for a GPU."""

import pytest
import torch
from backends_alone import let_backends_serve_alone

from megatron_hybrid.ops import dispatch
from megatron_hybrid.ops.dispatch import Backend, Op

ON_CPU, ON_DEVICE = torch.ones(2), torch.ones(2, device="meta")


@pytest.fixture
def toy_op(monkeypatch):
    """Doubles; returns what makes an op with a backend that gives a reason, or is missing."""
    monkeypatch.setattr(dispatch, "OPS", {})
    monkeypatch.setattr(dispatch, "forced", None)

    def make(reason=None, missing=None):
        op = Op("toy", lambda x: 2 * x, {})
        op.register(Backend("kernels", lambda x: 2 * x, lambda x: reason, missing))
        return op, let_backends_serve_alone(monkeypatch)["toy"]

    return make


def test_a_backend_serves_and_the_reference_can_be_called(toy_op):
    op, reference = toy_op()
    assert op(ON_DEVICE).is_meta and reference(ON_DEVICE).is_meta


def test_a_refusal_fails_on_a_device_alone(toy_op):
    op, _ = toy_op(reason="it is odd")
    assert op(ON_CPU).tolist() == [2, 2]
    with pytest.raises(pytest.fail.Exception, match=r"toy is served by its reference.*it is odd"):
        op(ON_DEVICE)


def test_a_missing_library_skips_by_its_name(toy_op):
    op, _ = toy_op(missing="fla-core is not installed")
    with pytest.raises(pytest.skip.Exception, match="toy: fla-core is not installed"):
        op(ON_DEVICE)
