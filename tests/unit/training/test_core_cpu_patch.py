"""Calls from megatron-core are answered with the CPU, and no others."""

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm

from megatron_hybrid.training.core_cpu_patch import core_cpu_patch

SET_STATES = "_set_main_param_and_optimizer_states"


def test_core_is_answered_with_the_cpu():
    values = [torch.tensor([3.0]), torch.tensor([4.0])]
    with core_cpu_patch():
        norm, _ = local_multi_tensor_l2_norm(None, None, [values], False)
    assert norm.device.type == "cpu" and norm.tolist() == [5.0]


def test_others_get_the_answers_of_torch_and_nothing_is_replaced_afterwards():
    def replaced():
        of_cuda = torch.cuda.current_device, torch.cuda.synchronize, torch.cuda.current_stream
        return *of_cuda, getattr(DistributedOptimizer, SET_STATES)

    before = replaced()
    with pytest.raises(KeyError), core_cpu_patch():
        assert all(now is not then for now, then in zip(replaced(), before))
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert torch.zeros(1, device="meta").device.type == "meta"
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA|GPU"):
            torch.zeros(1, device="cuda:99")
        raise KeyError
    assert replaced() == before
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_other_copies_of_optimizer_states_are_not_replaced(monkeypatch):
    def copies_what_it_should(self, model_param, tensors):
        pass

    monkeypatch.setattr(DistributedOptimizer, SET_STATES, copies_what_it_should)
    with pytest.raises(RuntimeError, match=f"{SET_STATES} .*core has changed"), core_cpu_patch():
        pass
