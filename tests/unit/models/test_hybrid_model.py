"""The model as a whole: it builds, learns, and does what its configuration says."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_models import ALL_MIXERS, random_tokens, small_config, small_model
from torch.autograd.graph import saved_tensors_hooks

from megatron_hybrid.models import hybrid_model
from megatron_hybrid.models.hybrid_model import NO_LABEL, HybridModel, build_hybrid_model

EXPERTS = {"num_moe_experts": 5, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
GATED = {"qk_layernorm": True, "attention_output_gate": True}
LEARNING = {
    **dict.fromkeys([*"MGSC*W-", ALL_MIXERS, "M|G*|W-"], GATED),
    **{"K": {}, "+": {}},
    "K+R": {"kda_low_rank_gates": False, "kda_decay_bound": -5.0, "latent_output_gate": True},
    "H-": {"mamba_section_multipliers": [0.9, 0.8, 1.2, 0.7, 1.3], "activation_sparsity": 0.7},
    "*EME": {**EXPERTS, "moe_shared_expert_intermediate_size": 28},
    "-PBP": {**EXPERTS, "per_layer_input_size": 10, "num_residual_streams": 3, "residual_rank": 5},
    "VSV": {"mamba1_num_heads": 3, "shared_block_adapter_rank": None},
    "ZMZ-ZZ": {"num_shared_blocks": 2, "shared_block_attention_adapters": True},
}
"""Pattern -> fields of a model."""


@pytest.mark.parametrize("pattern", LEARNING)
def test_every_parameter_gets_a_gradient(pattern):
    model = small_model(pattern, **LEARNING[pattern]).train()
    tokens = random_tokens(2, 60)
    loss = model(tokens[:, :-1], labels=tokens[:, 1:])
    assert loss.shape == (2, 59)
    loss.mean().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


@pytest.mark.parametrize("fields", [{}, {"share_embeddings_and_output_weights": True}])
def test_losses_by_rows_are_those_of_all_logits_and_keep_none(fields, monkeypatch):
    model = small_model("-", final_logit_softcap=9.0, **fields).train()
    tokens, shapes = random_tokens(2, 20), []
    logits = model(tokens[:, :-1])
    expected = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    factors = torch.rand_like(expected)
    wanted = torch.autograd.grad((expected * factors).sum(), list(model.parameters()))
    for rows in (38, 7, 1):
        monkeypatch.setattr(hybrid_model, "LOSS_BYTES", 4 * model.vocab_size * rows)
        shapes.clear()
        with saved_tensors_hooks(lambda x: [x, shapes.append(x.shape)][0], lambda x: x):
            loss = model(tokens[:, :-1], labels=tokens[:, 1:])
        assert ((38, model.vocab_size) in shapes) == (rows == 38)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        found = torch.autograd.grad((loss * factors).sum(), list(model.parameters()))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_token_without_a_label_has_no_loss():
    model = small_model()
    tokens = random_tokens(2, 20)
    labels = tokens[:, 1:].clone()
    whole = model(tokens[:, :-1], labels=labels)
    labels[:, 3:7] = NO_LABEL
    loss = model(tokens[:, :-1], labels=labels)
    torch.testing.assert_close(loss, whole.masked_fill(labels == NO_LABEL, 0.0))
    assert whole.min() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_run(dtype):
    exact = small_model()
    model = small_model(params_dtype=dtype)
    model.load_state_dict(exact.state_dict())
    kept = {n.rsplit(".")[-1] for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A_log", "D", "dt_bias"}
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        logits, expected = model(tokens), exact(tokens)
    assert logits.dtype == dtype
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < 0.05


def test_a_model_built_on_a_device_lies_there():
    with torch.device("meta"):
        model = build_hybrid_model(small_config(perform_initialization=False))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_groups_of_another_size_are_refused(core_groups):
    with pytest.raises(ValueError, match="parallel_size is 2, but the process group"):
        small_model(tensor_model_parallel_size=2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cp", "cp has 2 ranks, but HybridModel supports context_parallel_size=1"),
        ("ep", "expert_model_parallel_size is 1, but the process group that is set up has 2 ranks"),
    ],
)
def test_groups_that_do_not_fit_are_refused(name, message):
    groups = copy.copy(small_model().pg_collection)
    setattr(groups, name, SimpleNamespace(size=lambda: 2))
    with pytest.raises(ValueError, match=message):
        HybridModel(small_config(), groups)
    setattr(groups, name, None)  # as where the caller made none
    HybridModel(small_config(), groups)
