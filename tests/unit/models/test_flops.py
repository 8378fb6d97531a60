"""The work of a token against torch's own count of a forward pass."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import random_tokens, tiny_model
from small_models import small_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_hybrid import ops
from megatron_hybrid.models.flops import attention_parity, token_flops, training_flops
from megatron_hybrid.ops.attention import reference
from megatron_hybrid.training.lora import LoraFields, add_adapters


def flops(model, num_tokens, num_pairs):
    of_token, of_pair = training_flops(model)
    return of_token * num_tokens + of_pair * num_pairs


def set_tiles(monkeypatch, size):
    """Let attention compute all pairs of so many tokens, no more and no fewer, and torch multiply:
    its counter does not know oneDNN's products."""
    monkeypatch.setattr(sys.modules[ops.linear.__module__], "_DTYPES", ())
    for name in ("QUERY_TILE", "SCORE_TILE"):
        monkeypatch.setattr(reference, name, size)


def counted_parity(model, monkeypatch) -> float:
    """From the FLOPs of forward passes over T tokens, a T + b T^2: where b T reaches a. Attention
    is counted as if every token saw every other one, which is what its matrix products compute."""
    lengths = (32, 64, 128)
    counts = []
    for length in lengths:
        set_tiles(monkeypatch, length)
        counter = FlopCounterMode(display=False)
        # Of torch's kernels for attention it knows this one on a CPU.
        with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model(torch.tensor([random_tokens(length)]))
        logits = 2 * length * math.prod(model.output_layer.weight.shape)
        counts.append(counter.get_total_flops() - logits)
    quadratic, linear, _ = np.polyfit(lengths, counts, 2)
    return linear / quadratic


@pytest.mark.parametrize("pattern", ["*-", "*-*-", "*E", "*-CCC"])
def test_attention_parity_is_what_torch_counts(pattern, monkeypatch):
    model = tiny_model(pattern)  # every token is sent to all experts
    counted = counted_parity(model, monkeypatch)
    assert attention_parity(*token_flops(model)) == pytest.approx(counted, rel=0.02)


def test_of_routed_experts_those_count_that_a_token_is_sent_to():
    by_topk = [
        attention_parity(*token_flops(tiny_model("*E", num_moe_experts=5, moe_router_topk=k)))
        for k in (2, 3, 5)
    ]
    assert by_topk[2] - by_topk[1] == 2 * (by_topk[1] - by_topk[0]) > 0


def test_no_full_attention_no_parity():
    assert attention_parity(*token_flops(tiny_model("MWL-"))) == math.inf


@pytest.mark.parametrize("pattern", ["*-", "*-/*-", "*-/*-/*-"])
def test_flops_of_training_are_what_torch_counts(pattern, monkeypatch):
    set_tiles(monkeypatch, 64)
    model = small_model(pattern).train()
    tokens = torch.tensor([random_tokens(64)]) % model.vocab_size
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, labels=tokens).mean().backward()
    assert flops(model, 64, 64 * 64) == counter.get_total_flops()


def test_frozen_weights_have_no_gradient_to_compute():
    model = small_model("--")
    weights = sum(p.numel() for name, p in model.named_parameters() if "linear" in name)
    logits = model.output_layer.weight.numel()
    assert flops(model, 10, 0) == 6 * 10 * (weights + logits)
    add_adapters(model, LoraFields(rank=2))
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert flops(model, 10, 0) == 10 * (4 * (weights + logits) + 6 * adapters)


@pytest.mark.parametrize(("ep", "expert_tp", "tp"), [(2, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)])
def test_experts_work_for_all_ranks_that_they_are_split_among(ep, expert_tp, tp):
    model = small_model("E", num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=20)

    def work(**sizes):
        groups = {name: SimpleNamespace(size=lambda n=n: n) for name, n in sizes.items()}
        model.pg_collection = SimpleNamespace(**groups)
        return flops(model, 10, 0)

    experts = sum(p.numel() for p in model.parameters() if p.dim() == 3)
    one = work(ep=1, expt_tp=1, tp=1)
    assert work(ep=ep, expt_tp=expert_tp, tp=tp) - one == pytest.approx(
        6 * 10 * experts * 2 / 4 * (ep * expert_tp / tp - 1)
    )
