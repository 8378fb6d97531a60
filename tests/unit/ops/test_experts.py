"""Routed experts against all experts of all tokens in float64, by both backends."""

import contextlib
import runpy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from grouped_experts import BACKEND, grouped_experts
from host_syncs import HostSyncError, no_host_syncs
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model
from torch import nn

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.models.mixers.mlp import activated
from megatron_hybrid.models.packed_weight import PackedWeight, Packing
from megatron_hybrid.ops import ExpertPairs, RaggedLayout, expert_mlps
from megatron_hybrid.ops.packed.reference import FEW_ROWS
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT

TOKENS, EXPERTS, CHOSEN, HIDDEN, WIDTH = 13, 6, 3, 16, 24
BACKENDS = {"reference": contextlib.nullcontext, "grouped_mm": grouped_experts}
each_backend = pytest.mark.parametrize("backend", BACKENDS)
GATED = partial(
    activated,
    SimpleNamespace(
        gated_linear_unit=True,
        mlp_gate_multiplier=1.0,
        activation_sparsity=0.0,
        activation_clamp_after=False,
        activation_func=F.silu,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
    ),
)


def draw(tokens=TOKENS, experts=EXPERTS, chosen=CHOSEN, gated=False, seed=2):
    """Tokens, weights and chosen experts, and the layers of all experts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    chosen_nE = torch.zeros(tokens, experts, dtype=torch.bool)
    # Never the last expert.
    order = torch.rand(tokens, experts - 1, generator=generator).argsort(1)
    chosen_nE.scatter_(1, order[:, :chosen], True)
    outputs = 2 * WIDTH if gated else WIDTH
    layers = [normal(experts, outputs, HIDDEN) / 4, normal(experts, outputs)]
    layers += [normal(experts, HIDDEN, WIDTH) / 5, normal(experts, HIDDEN)]
    return normal(tokens, HIDDEN), normal(tokens, experts), chosen_nE, layers


def mixed(hidden, weights, chosen, layers, experts, activate=torch.relu):
    """The sums over the pairs with some of the experts."""
    pairs = ExpertPairs(chosen, CHOSEN, experts, may_lack=True)
    own = [None if layer is None else layer[experts.start : experts.stop] for layer in layers]
    return pairs.sum(expert_mlps(pairs.tokens(hidden), pairs.ends_E, *own, activate), weights)


def dense(hidden, weights, chosen, layers, experts, activate=torch.relu):
    """The same, from the MLPs of all experts of all tokens."""
    fc1, bias1, fc2, bias2 = layers
    x = torch.einsum("nh,Egh->nEg", hidden, fc1)
    y = activate(x if bias1 is None else x + bias1)
    y = torch.einsum("nEf,Ehf->nEh", y, fc2)
    y = y if bias2 is None else y + bias2
    taken = torch.zeros(chosen.shape[1], dtype=torch.bool)
    taken[experts.start : experts.stop] = True
    return (y * (weights * (chosen & taken)).unsqueeze(-1)).sum(1)


@each_backend
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sums_and_gradients_over_all_and_over_some_experts(backend, data):
    """Ragged counts, experts without rows, tokens that lack experts, biases, gates."""
    num_experts = data.draw(st.integers(2, 9), "experts")
    first = data.draw(st.integers(0, num_experts - 1), "first")
    experts = range(first, data.draw(st.integers(first + 1, num_experts), "end"))
    gated, biased = data.draw(st.booleans(), "gated"), data.draw(st.booleans(), "biased")
    tokens, seed = data.draw(st.integers(0, 40), "tokens"), data.draw(st.integers(0, 99), "seed")
    hidden, weights, chosen, layers = draw(tokens, num_experts, CHOSEN, gated, seed)
    if data.draw(st.booleans(), "dropped"):
        chosen &= torch.rand(chosen.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    layers = layers if biased else [layers[0], None, layers[2], None]
    bounds = {torch.float32: 2e-6, torch.bfloat16: 4e-2}
    if backend == "reference":
        bounds[torch.float64] = 1e-14
    dtype = data.draw(st.sampled_from(list(bounds)), "dtype")
    hidden, weights = hidden.to(dtype), weights.to(torch.promote_types(dtype, torch.float32))
    layers = [None if layer is None else layer.to(dtype) for layer in layers]
    rest = chosen, experts, GATED if gated else F.silu

    def outputs_and_gradients(function, hidden, weights, layers):
        inputs = [x.detach().requires_grad_() for x in (hidden, weights, *layers) if x is not None]
        taken = iter(inputs[2:])
        layers = [None if layer is None else next(taken) for layer in layers]
        y = function(inputs[0], inputs[1], rest[0], layers, *rest[1:])
        seeds = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        return y, *torch.autograd.grad(y, inputs, seeds)

    with BACKENDS[backend]():
        found = outputs_and_gradients(mixed, hidden, weights, layers)
    layers_64 = [None if layer is None else layer.double() for layer in layers]
    right = outputs_and_gradients(dense, hidden.double(), weights.double(), layers_64)
    for one, expected in zip(found, right):
        # A weight's gradient sums products of this size, which may cancel.
        scale = expected.abs().max().clamp(min=8) if expected.numel() else 1.0
        atol = bounds[dtype]
        torch.testing.assert_close(one.double() / scale, expected / scale, atol=atol, rtol=0)


def test_rows_of_each_expert_are_aligned_and_their_number_is_that_of_any_choice():
    lengths = set()
    for seed in range(20):
        hidden, _, chosen, _ = draw(seed=seed)
        pairs = ExpertPairs(chosen, CHOSEN, alignment=ROW_ALIGNMENT)
        assert not (pairs.ends_E % ROW_ALIGNMENT).any()
        assert pairs.ends_E.dtype == torch.int32
        lengths.add(len(pairs.tokens(hidden)))
    assert lengths == {TOKENS * CHOSEN + EXPERTS * (ROW_ALIGNMENT - 1)}


@each_backend
def test_what_is_in_rows_of_no_expert_does_not_matter(backend):
    """Not in the outputs, nor in the gradients."""
    hidden, weights, chosen, layers = draw()
    inputs = [x.requires_grad_() for x in (hidden, *layers)]
    experts = range(2, 4)
    pairs = ExpertPairs(chosen, CHOSEN, experts)
    own = [layer[2:4] for layer in layers]

    def outputs_and_gradients(noise):
        rows = pairs.tokens(hidden)
        behind = torch.arange(len(rows)).unsqueeze(1) >= pairs.ends_E[-1]
        assert behind.sum() > 3

        def noisy(x):  # as memory that nobody has written
            return x.masked_fill(behind, noise)

        rows.register_hook(noisy)
        with BACKENDS[backend]():
            y = noisy(expert_mlps(noisy(rows), pairs.ends_E, *own, torch.relu))
        total = pairs.sum(y, weights)
        return total, *torch.autograd.grad(total.sum(), inputs)

    for one, noisy in zip(outputs_and_gradients(0.0), outputs_and_gradients(torch.nan)):
        assert torch.equal(one, noisy)


def test_a_parameter_per_expert_is_as_a_stack():
    hidden, _, chosen, layers = draw()
    pairs = ExpertPairs(chosen, CHOSEN)
    rows, apart = pairs.tokens(hidden), [list(layer) for layer in layers]
    assert torch.equal(
        expert_mlps(rows, pairs.ends_E, *apart, torch.relu),
        expert_mlps(rows, pairs.ends_E, *layers, torch.relu),
    )


ROUTERS = {
    "softmax": {},
    "weights before softmax": {"moe_router_pre_softmax": True},
    "groups and a bias of selection": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 4,
    },
    "weighted inputs": {
        "moe_apply_probs_on_input": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 1,
    },
    "biases": {"add_bias_linear": True},
    "a capacity": {"moe_expert_capacity_factor": 1.0},
    "latents and a shared expert": {
        "moe_latent_size": 12,
        "moe_shared_expert_intermediate_size": 20,
        "moe_shared_expert_gate": True,
    },
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fields", ROUTERS.values(), ids=ROUTERS)
def test_router_and_experts_do_not_wait_for_the_device(fields, training):
    fields = {"num_moe_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 20, **fields}
    mixer = small_model("E", **fields).decoder.layers[0].mlp.train(training)
    context = UncachedContext(RaggedLayout((5, 8), (0, 0), num_padding=3), torch.device("cpu"))
    hidden = torch.randn(16, 48)
    expected, _ = mixer(hidden, context)
    with grouped_experts(), no_host_syncs():
        found, _ = mixer(hidden, context)
    torch.testing.assert_close(found, expected)
    with pytest.raises(HostSyncError, match="tolist"), no_host_syncs():
        mixer(hidden, context)  # by the reference


def test_a_part_of_the_experts_does_not_wait_either():
    given = draw()
    with grouped_experts(), no_host_syncs():
        found = mixed(*given, range(2, 5))
    torch.testing.assert_close(found, dense(*given, range(2, 5)))


@pytest.mark.parametrize("rows", [32, 2 * FEW_ROWS + 8])
def test_packed_experts_are_multiplied_without_waiting(rows):
    """Of few rows by the op that unpacks them inside; here by its reference, which waits."""
    packing = Packing(torch.int8, torch.float32, 16)
    stack = PackedWeight(nn.Parameter(torch.empty(2, 16, 32)), packing)
    back = PackedWeight(nn.Parameter(torch.empty(2, 32, 16)), packing)
    for own in (stack, back):
        own.codes.copy_(torch.randint(-9, 9, own.shape))
        own.scale.fill_(0.1)
    ends = torch.tensor([8, rows], dtype=torch.int32)
    given = torch.randn(rows, 32), ends, stack, None, back, None, torch.relu
    expected = expert_mlps(*given)
    with grouped_experts(), contextlib.nullcontext() if rows == 32 else no_host_syncs():
        found = expert_mlps(*given)
    torch.testing.assert_close(found, expected)


def inputs_of(**changes):
    """Arguments of the op that `grouped_mm` serves, but for some changes."""
    x = torch.zeros(32, HIDDEN)
    fc1, fc2 = torch.zeros(2, WIDTH, HIDDEN), torch.zeros(2, HIDDEN, WIDTH)
    given = {"x": x, "ends": torch.tensor([8, 16], dtype=torch.int32), "fc1": fc1, "bias1": None}
    return [*(given | {"fc2": fc2, "bias2": None, "activate": torch.relu} | changes).values()]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"fc1": [torch.zeros(WIDTH, HIDDEN)] * 2}, "parameters are not stacked"),
        ({"x": torch.zeros(32, HIDDEN).double()}, "it takes no tensors of torch.float64"),
        (
            {"x": torch.zeros(32, HIDDEN).bfloat16()},
            "tensors of one dtype, not of torch.bfloat16 and torch.float32",
        ),
        ({"fc2": torch.zeros(2, HIDDEN, 10)}, "rows of 10 numbers, which end 8 bytes after a"),
    ],
)
def test_grouped_mm_says_what_it_cannot_serve(changes, reason):
    told = BACKEND.verify(*inputs_of(**changes))
    assert told == reason if reason is None else reason in told


def test_grouped_mm_does_not_serve_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        assert BACKEND.verify(*inputs_of()) == "autocast does not know it"


def test_grouped_mm_says_which_torch_it_needs(monkeypatch):
    assert BACKEND.missing is None
    path = BACKEND.run.__code__.co_filename
    monkeypatch.delattr(F, "grouped_mm")
    missing = runpy.run_path(path)["MISSING"]
    assert (
        missing
        == f"torch {torch.__version__} has no torch.nn.functional.grouped_mm; torch 2.10 has"
    )
