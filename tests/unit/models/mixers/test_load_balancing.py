"""Auxiliary losses of a router against core's TopKRouter, whose tensors are put on the CPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import stock_megatron
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from router_losses import forget_losses, take_losses
from small_models import random_tokens, small_config, small_model
from torch.utils.checkpoint import checkpoint

from megatron_hybrid.models.mixers.load_balancing import AuxiliaryLosses
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.models.recompute import recompute
from megatron_hybrid.ops.ragged import RaggedLayout

HIDDEN, EXPERTS, BATCH, LENGTH = 48, 8, 3, 12
FIELDS = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": 20, "moe_router_topk": 3}
KIND, FACTOR = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
LOSSES = {
    "aux": {FACTOR: 0.7},
    "seq": {KIND: "seq_aux_loss", FACTOR: 0.7},
    "global": {KIND: "global_aux_loss", FACTOR: 0.7},
    "z": {"moe_z_loss_coeff": 0.3},
    "all": {
        KIND: ["seq_aux_loss", "aux_loss", "global_aux_loss"],
        FACTOR: [0.3, 0.5, 0.7],
        "moe_z_loss_coeff": 0.2,
    },
    "none": {KIND: "none", FACTOR: 0.7},
}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


@pytest.fixture(autouse=True)
def core_on_cpu():
    forget_losses()
    with stock_megatron.on_cpu():
        yield
    forget_losses()


def routers(**fields):
    """Ours, of the second layer, and core's with the same tensors; both in training."""
    ours = small_model("*E", **{**FIELDS, **fields}).decoder.layers[1].mlp.router.train()
    core = TopKRouter(ours.config, get_default_pg_collection())
    core.set_layer_number(2)
    with torch.no_grad():
        for tensor in ours.state_dict().values():
            tensor.normal_(std=0.3)
    core.load_state_dict(ours.state_dict(), strict=False)
    return ours, core


def context(layout, padding_mask=None):
    return UncachedContext(layout, torch.device("cpu"), padding_mask_T=padding_mask)


def ours_and_cores(ours, core, hidden, padding_mask=None):
    """Routing weights of [b, s] tokens of both routers, [b * s, E], and their inputs."""
    b, s, _ = hidden.shape
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    mask = None if padding_mask is None else padding_mask.flatten()
    weights, chosen = ours(inputs[0].flatten(0, 1), context(RaggedLayout.uniform(b, s), mask))
    own_losses = take_losses()
    mask = None if padding_mask is None else padding_mask.t()
    outputs = core(inputs[1].transpose(0, 1).contiguous(), mask)
    core_losses = take_losses()
    assert own_losses.keys() == core_losses.keys()
    for name, values in own_losses.items():
        torch.testing.assert_close(values, core_losses[name])
        assert not values[0].any()
    expected, core_chosen = (t.view(s, b, EXPERTS).transpose(0, 1).flatten(0, 1) for t in outputs)
    assert torch.equal(chosen, core_chosen)
    torch.testing.assert_close(weights, expected)
    return (weights, expected), inputs


def check_step(ours, core, padding_masks):
    """Two micro batches of one global batch give the same weights, losses and gradients."""
    for mask in padding_masks:
        hidden = torch.randn(*mask.shape, HIDDEN)
        mask = mask if mask.any() else None
        weights, inputs = ours_and_cores(ours, core, hidden, mask)
        seed = torch.randn_like(weights[0])
        for one in weights:
            (one * seed).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(ours.weight.grad, core.weight.grad)
    if ours.config.moe_router_enable_expert_bias:
        assert torch.equal(ours.local_tokens_per_expert, core.local_tokens_per_expert)


@pytest.mark.parametrize("scores", [{}, SIGMOID])
@pytest.mark.parametrize("losses", LOSSES)
def test_losses_and_gradients_are_those_of_core(losses, scores):
    ours, core = routers(**scores, **LOSSES[losses])
    for scale in (None, 1.7):
        if scale is not None:
            # In the shape that core's schedules have, after a step without them.
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([scale]))
        check_step(ours, core, torch.zeros(2, BATCH, LENGTH, dtype=torch.bool))
        for router in (ours, core):  # as finalize_model_grads does
            router.reset_global_aux_loss_tracker()


@pytest.mark.parametrize("losses", LOSSES)
def test_padding_in_sequences_does_not_count(losses):
    ours, core = routers(**LOSSES[losses])
    # As many in all sequences: core takes them for equally long.
    masks = torch.rand(2, BATCH, LENGTH).argsort(-1) < 5
    check_step(ours, core, masks)


@pytest.mark.parametrize("scores", [{}, SIGMOID])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 3.0])
def test_tokens_beyond_the_capacity_are_dropped_as_by_core(factor, policy, scores):
    fields = {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy}
    ours, core = routers(**scores, **LOSSES["all"], **fields)
    # The first tokens of several sequences have other places in core's rows.
    shape = (1, BATCH * LENGTH) if policy == "position" else (BATCH, LENGTH)
    check_step(ours, core, torch.zeros(2, *shape, dtype=torch.bool))


def test_no_token_is_dropped_outside_of_training():
    fields = {"moe_expert_capacity_factor": 0.5}
    mixer = small_model("E", **FIELDS, **fields).decoder.layers[0].mlp
    hidden, layout = torch.randn(LENGTH, HIDDEN), RaggedLayout.uniform(1, LENGTH)
    whole, chosen = mixer.router(hidden, context(layout))
    assert chosen.sum() == LENGTH * 3
    weights, kept = mixer.router.train()(hidden, context(layout))
    assert kept.sum() < LENGTH * 2
    assert torch.equal(weights, whole * kept)
    # The experts run on the pairs that are left, and give their weighted sum.
    output = mixer.experts(hidden, weights, kept, False)
    torch.testing.assert_close(output, mixer.experts(hidden, weights, chosen, False))
    assert not output[~kept.any(1)].any()


@pytest.mark.parametrize("losses", LOSSES)
def test_losses_per_token(losses):
    ours, core = routers(**LOSSES[losses], calculate_per_token_loss=True)
    # One sequence: 0.16.1 multiplies by the tokens of one alone.
    check_step(ours, core, torch.zeros(2, 1, LENGTH, dtype=torch.bool))


@pytest.mark.parametrize("scores", [{}, SIGMOID])
@pytest.mark.parametrize("router_dtype", ["fp32", "fp64", None])
def test_dtypes_of_the_logits_are_those_of_core(router_dtype, scores):
    ours, core = routers(**scores, moe_router_dtype=router_dtype, params_dtype=torch.bfloat16)
    core.to(torch.float32)
    core.load_state_dict(ours.state_dict())
    hidden = torch.randn(1, LENGTH, HIDDEN).bfloat16()
    weights, chosen = ours(hidden[0], context(RaggedLayout.uniform(1, LENGTH)))
    expected, core_chosen = core(hidden.transpose(0, 1))
    assert weights.dtype is torch.float32
    assert expected.dtype is {"fp32": torch.float32, "fp64": torch.float64}.get(
        router_dtype, torch.bfloat16
    )
    assert torch.equal(chosen, core_chosen)
    # core 0.16 rounds scores of a sigmoid to bf16 before it divides them by their sum.
    rtol = 2**-7 if router_dtype is None and scores else 1e-6
    torch.testing.assert_close(weights, expected.float(), atol=1e-6, rtol=rtol)


def test_tokens_of_fp64_keep_their_precision():
    mixer = small_model("E", **FIELDS, moe_router_dtype="fp64").decoder.layers[0].mlp.double()
    hidden = torch.randn(LENGTH, HIDDEN, dtype=torch.float64)
    output, _ = mixer(hidden, context(RaggedLayout.uniform(1, LENGTH)))
    experts = mixer.experts
    scores, chosen = (hidden @ mixer.router.weight.t()).topk(3)
    for row, x in enumerate(hidden):
        expected = 0
        for weight, e in zip(scores[row].softmax(-1), chosen[row].tolist()):
            gate, value = (experts.linear_fc1.weight[e] @ x).chunk(2)
            inner = torch.nn.functional.silu(gate) * value
            expected = expected + weight * (experts.linear_fc2.weight[e] @ inner)
        # The scores are fp32 in megatron-core.
        torch.testing.assert_close(output[row], expected, atol=1e-6, rtol=1e-6)


def test_jitter_of_the_input_is_cores():
    ours, core = routers(moe_input_jitter_eps=0.2)
    hidden, layout = torch.randn(1, LENGTH, HIDDEN), RaggedLayout.uniform(1, LENGTH)
    outputs = []
    for router, x in ((ours, hidden[0]), (core, hidden.transpose(0, 1))):
        torch.manual_seed(5)
        outputs.append(router(x, context(layout) if router is ours else None)[0])
    torch.testing.assert_close(*outputs)
    served = ours.eval()(hidden[0], context(layout))[0]
    assert not torch.allclose(served, outputs[0], atol=1e-3)
    assert torch.equal(served, ours(hidden[0], context(layout))[0])


def test_forced_balance_chooses_as_core_and_keeps_gradients(monkeypatch):
    monkeypatch.setattr(
        moe_utils, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=lambda _: nullcontext())
    )
    ours, core = routers(moe_router_force_load_balancing=True)
    hidden, layout = torch.randn(1, 400, HIDDEN), RaggedLayout.uniform(1, 400)
    weights = []
    for router, x in ((ours, hidden[0]), (core, hidden.transpose(0, 1))):
        torch.manual_seed(5)
        weights.append(router(x, context(layout) if router is ours else None)[0])
    torch.testing.assert_close(*weights)
    counts = weights[0].count_nonzero(0)
    assert counts.max() < 1.3 * counts.min()
    seed = torch.randn_like(weights[0])
    for one in weights:
        (one * seed).sum().backward()
    torch.testing.assert_close(ours.weight.grad, core.weight.grad)


@pytest.mark.parametrize("deviation", [1.5, -1.5])
def test_forced_bias_is_drawn_anew_or_kept(deviation):
    ours, _ = routers(moe_router_force_biased=deviation)
    hidden, layout = torch.randn(4000, HIDDEN), RaggedLayout.uniform(1, 4000)
    first, second = (ours(hidden, context(layout))[1].sum(0) for _ in range(2))
    assert first.max() > 3 * first.min()
    assert ((first - second).abs().max() < 200) == (deviation < 0)
    other = small_model("E", **FIELDS, moe_router_force_biased=deviation).decoder.layers[0].mlp
    third = other.router.train()(hidden, context(layout))[1].sum(0)
    assert (first - third).abs().max() > 400  # another layer


def test_limited_devices_are_groups_of_experts():
    with pytest.warns(UserWarning, match="moe_router_topk_limited_devices is deprecated"):
        config = small_config(
            "E",
            **{**FIELDS, "moe_router_topk": 4},
            moe_router_topk_limited_devices=2,
            expert_model_parallel_size=4,
        )
    assert (config.moe_router_num_groups, config.moe_router_group_topk) == (4, 2)


def test_padding_is_no_token_to_the_bias():
    ours, _ = routers(**SIGMOID)
    mask = torch.arange(16) % 4 == 0
    ours(torch.randn(16, HIDDEN), context(RaggedLayout((5, 6), (0, 0), num_padding=5), mask))
    assert ours.local_tokens_per_expert.sum() == (11 - 3) * 3


@pytest.mark.parametrize("losses", ["aux", "seq", "z"])
def test_packed_sequences_are_as_separate_ones(losses):
    lengths = (7, 1, 12)
    ours, _ = routers(**LOSSES[losses])
    hidden = torch.randn(24, HIDDEN)  # with rows of padding
    apart, total = torch.zeros(EXPERTS, HIDDEN), 0.0
    for rows in hidden[:20].split(lengths):
        ours.weight.grad = None
        weights, _ = ours(rows, context(RaggedLayout.uniform(1, len(rows))))
        (0 * weights).sum().backward()
        (values,) = take_losses().values()
        apart += ours.weight.grad * len(rows) / 20
        total += values[1] * len(rows) / 20
    ours.weight.grad = None
    weights, _ = ours(hidden, context(RaggedLayout(lengths, (0, 0, 0), num_padding=4)))
    (0 * weights).sum().backward()
    (values,) = take_losses().values()
    is_same = losses != "aux"
    assert torch.allclose(values[1], total) == is_same
    assert torch.allclose(ours.weight.grad, apart, atol=1e-6) == is_same
    assert ours.weight.grad.abs().max() > 1e-3


def gradients(model, tokens):
    model.zero_grad()
    model(tokens[:, :-1], labels=tokens[:, 1:].contiguous()).mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def recompute_layer(layer, gradients_twice):
    """Recompute this layer in the backward pass."""
    forward = layer.forward

    def without_gradients_first(*args):  # as core's
        return checkpoint(forward, *args, use_reentrant=True)

    def with_gradients_twice(*args):
        return recompute(forward, *args)

    layer.forward = with_gradients_twice if gradients_twice else without_gradients_first


@pytest.mark.parametrize("gradients_twice", [False, True])
def test_a_recomputed_layer_counts_once(gradients_twice):
    model = small_model("*E*E", **FIELDS, **SIGMOID, **LOSSES["all"]).train()
    tokens = random_tokens(2, 17)
    results = []
    for _ in range(2):
        found = gradients(model, tokens), take_losses()
        router = model.decoder.layers[3].mlp.router
        results.append((*found, router.local_tokens_per_expert.clone()))
        router.local_tokens_per_expert.zero_()
        router.reset_global_aux_loss_tracker()
        recompute_layer(model.decoder.layers[3], gradients_twice)
    (one, losses, counts), (again, same_losses, same_counts) = results
    assert counts.sum() == 2 * 16 * 3
    assert torch.equal(counts, same_counts)
    assert losses.keys() == same_losses.keys()
    assert all(torch.equal(losses[name][3], same_losses[name][3]) for name in losses)
    assert all(torch.equal(one[name], again[name]) for name in one)


def test_nothing_is_counted_in_evaluation():
    model = small_model("*E", **FIELDS, **SIGMOID, **LOSSES["all"])
    tokens = random_tokens(2, 17)
    found = gradients(model, tokens)
    assert not take_losses()
    plain = small_model("*E", **FIELDS, **SIGMOID)
    plain.load_state_dict(model.state_dict())
    expected = gradients(plain, tokens)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    model.train()
    with torch.no_grad():
        model(tokens)
    assert not take_losses()
    trained = gradients(model, tokens)
    assert take_losses().keys() == {
        "load_balancing_loss",
        "seq_load_balancing_loss",
        "global_load_balancing_loss",
        "z_loss",
    }
    name = "decoder.layers.1.mlp.router.weight"
    assert (trained[name] - expected[name]).abs().max() > 1e-3


def test_layers_are_counted_through_the_pipeline_stages():
    config = small_model("*E*|EE", **FIELDS, **LOSSES["z"]).config
    second = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    losses = AuxiliaryLosses(config, 2, ProcessGroupCollection(pp=second))
    losses.attach_to_logits(torch.randn(5, EXPERTS), None)
    (values,) = take_losses().values()
    assert values.nonzero().tolist() == [[4]]
    assert len(values) == 5


def test_layers_of_predictions_are_counted_behind_the_others():
    model = small_model("*E/*EE/*EE", **FIELDS, **LOSSES["z"]).train()
    tokens = random_tokens(2, 17)
    model(tokens[:, :-1], labels=tokens[:, 1:].contiguous())
    (values,) = take_losses().values()
    assert values.nonzero().flatten().tolist() == [1, 2, 3]
    assert len(values) == 4  # as many layers, and parts
