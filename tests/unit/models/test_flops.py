"""The work of a token against torch's own count of a forward pass."""

import math

import numpy as np
import pytest
import torch
from reference import random_tokens, tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_hybrid.models.flops import attention_parity, token_flops


def counted_parity(model) -> float:
    """From the FLOPs of forward passes over T tokens, a T + b T^2: where b T reaches a. Attention
    is counted as if every token saw every other one, which is what its matrix products compute."""
    lengths = (32, 64, 128)
    counts = []
    for length in lengths:
        counter = FlopCounterMode(display=False)
        # Of torch's kernels for attention it knows this one on a CPU.
        with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            model(torch.tensor([random_tokens(length)]))
        logits = 2 * length * math.prod(model.output_layer.weight.shape)
        counts.append(counter.get_total_flops() - logits)
    quadratic, linear, _ = np.polyfit(lengths, counts, 2)
    return linear / quadratic


@pytest.mark.parametrize("pattern", ["*-", "*-*-", "*E", "*-CCC"])
def test_attention_parity_is_what_torch_counts(pattern):
    model = tiny_model(pattern)  # every token is sent to all experts
    assert attention_parity(*token_flops(model)) == pytest.approx(counted_parity(model), rel=0.02)


def test_of_routed_experts_those_count_that_a_token_is_sent_to():
    by_topk = [
        attention_parity(*token_flops(tiny_model("*E", num_moe_experts=5, moe_router_topk=k)))
        for k in (2, 3, 5)
    ]
    assert by_topk[2] - by_topk[1] == 2 * (by_topk[1] - by_topk[0]) > 0


def test_no_full_attention_no_parity():
    assert attention_parity(*token_flops(tiny_model("MWL-"))) == math.inf
