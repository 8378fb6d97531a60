"""The mixture of experts: bits of a row, and counts."""

import contextlib

import pytest
import torch
from grouped_experts import grouped_experts
from small_models import small_config, small_model

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.activations import ACTIVATIONS
from megatron_hybrid.ops.experts import pairs
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT, RaggedLayout

HIDDEN, EXPERTS, WIDTH, SHARED, LATENT = 48, 8, 20, 28, 12
FIELDS = {"num_moe_experts": EXPERTS, "moe_ffn_hidden_size": WIDTH, "moe_router_topk": 3}


each_backend = pytest.mark.parametrize(
    "backend", [contextlib.nullcontext, grouped_experts], ids=["reference", "grouped_mm"]
)


VARIANTS = {
    "softmax, gated shared expert": {
        "moe_shared_expert_intermediate_size": SHARED,
        "moe_shared_expert_gate": True,
    },
    "sigmoid, groups, latent plain experts": {
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 1,
        "moe_shared_expert_intermediate_size": SHARED,
        "moe_latent_size": LATENT,
        "gated_linear_unit": False,
        "activation_func": ACTIVATIONS["squared_relu"],
    },
    "biases": {
        "add_bias_linear": True,
        "activation_func": ACTIVATIONS["quick_gelu"],
        "activation_func_clamp_value": 0.5,
        "glu_linear_offset": 1.0,
    },
}


def build(**fields):
    """A mixer with random weights."""
    mixer = small_model("E", hidden_size=HIDDEN, **{**FIELDS, **fields}).decoder.layers[0].mlp
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.2)
    return mixer


def inputs(rows):
    hidden = torch.randn(rows, HIDDEN)
    hidden[:, 0] = 4.0
    return hidden


def context(rows, padding=0):
    return UncachedContext(RaggedLayout((rows,), (0,), num_padding=padding), torch.device("cpu"))


@pytest.mark.parametrize("variant", VARIANTS)
@each_backend
def test_a_row_has_the_same_bits_in_every_batch(variant, backend, monkeypatch):
    alignment = 2
    if backend is grouped_experts:  # as on a GPU, which alone has it outside of tests
        alignment = ROW_ALIGNMENT
        monkeypatch.setattr(pairs, "row_alignment", lambda device: ROW_ALIGNMENT)
    mixer = build(**VARIANTS[variant])
    hidden = inputs(64)
    with torch.no_grad(), backend():
        whole, _ = mixer(hidden, context(64))
        for rows in ([5], [60, 2, 33], torch.randperm(64)[:23].tolist()):
            padding = -len(rows) % alignment
            batch = torch.cat([hidden[rows], torch.full((padding, HIDDEN), torch.nan)])
            part, _ = mixer(batch, context(len(rows), padding))
            assert torch.equal(part[: len(rows)], whole[rows])


@pytest.mark.parametrize("name", ["moe_latent_size", "moe_shared_expert_intermediate_size"])
def test_experts_beside_an_mlp_have_no_latent_and_no_shared_expert(name):
    with pytest.raises(ValueError, match=f"{name} is 12, but the experts of a layer B work on"):
        small_config("BE", **FIELDS, **{name: 12})
    config = small_config("BE", **FIELDS, layer_overrides={"E": {name: 12}})
    assert [getattr(config.for_layer(n), name) for n in (1, 2)] == [None, 12]


def test_layers_may_have_different_experts():
    config = small_config("EE", **FIELDS, layer_overrides={"2": {"num_moe_experts": 5}})
    assert [config.for_layer(n).num_moe_experts for n in (1, 2)] == [EXPERTS, 5]
    with pytest.raises(ValueError, match="num_moe_experts is 2"):
        small_config("EE", **FIELDS, layer_overrides={"2": {"num_moe_experts": 2}})
