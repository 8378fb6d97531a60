import pytest
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm

from megatron_hybrid.training import cpu_seam
from megatron_hybrid.training.cpu_seam import Place


def test_core_is_answered_with_the_cpu():
    values = [torch.tensor([3.0]), torch.tensor([4.0])]
    with cpu_seam.cpu_seam() as seam:
        norm, _ = local_multi_tensor_l2_norm(None, None, [values], False)
    assert norm.device.type == "cpu" and norm.tolist() == [5.0]
    assert {place.function for place in seam.asked} == {"local_multi_tensor_l2_norm"}


def test_others_get_the_answers_of_torch():
    with cpu_seam.cpu_seam() as seam:
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert torch.zeros(1, device="meta").device.type == "meta"
    assert not seam.asked


def test_nothing_is_replaced_afterwards():
    def replaced():
        set_states = DistributedOptimizer._set_main_param_and_optimizer_states
        return (
            torch.cuda.current_device,
            torch.cuda.synchronize,
            torch.cuda.current_stream,
            set_states,
        )

    before = replaced()
    with pytest.raises(KeyError), cpu_seam.cpu_seam():
        assert all(now is not then for now, then in zip(replaced(), before))
        raise KeyError
    assert replaced() == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_place_that_is_not_listed_is_named():
    with (
        cpu_seam.cpu_seam(),
        pytest.raises(
            RuntimeError, match=r"clip_grads\.count_zeros_fp32 asks for CUDA by `device="
        ),
    ):
        clip_grads.count_zeros_fp32([], None)


def test_a_place_that_core_no_longer_has_is_named(monkeypatch):
    monkeypatch.delattr(clip_grads, "get_grad_norm_fp32")
    with (
        pytest.raises(RuntimeError, match=r"clip_grads\.get_grad_norm_fp32 .*has no `device="),
        cpu_seam.cpu_seam(),
    ):
        pass


def test_a_place_that_asks_otherwise_is_named():
    with pytest.raises(RuntimeError, match='has no `device="xpu"`: core has changed'):
        Place("megatron.core.utils", "local_multi_tensor_l2_norm", 'device="xpu"').check()


def test_other_copies_of_optimizer_states_are_not_replaced(monkeypatch):
    def copies_what_it_should(self, model_param, tensors):
        pass

    name = "_set_main_param_and_optimizer_states"
    monkeypatch.setattr(DistributedOptimizer, name, copies_what_it_should)
    with pytest.raises(RuntimeError, match=f"{name} .*core has changed"), cpu_seam.cpu_seam():
        pass
