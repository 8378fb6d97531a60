"""Recompute by core's fields: equal gradients, less saved, nothing counted twice."""

from types import SimpleNamespace

import pytest
import torch
from saved_tensors import Saved
from small_models import (
    EVERY_KIND,
    FIELDS_OF_EVERY_KIND,
    packed_params,
    random_tokens,
    small_config,
)
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_hybrid.models import recompute
from megatron_hybrid.models.hybrid_model import build_hybrid_model

FIELDS = dict(
    FIELDS_OF_EVERY_KIND,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    layer_overrides={
        **FIELDS_OF_EVERY_KIND["layer_overrides"],
        "6": {"differential_lambda": 0.4, "position_embedding_type": "none"},
        "17": {"kv_source_layer": 5},
    },
)
DROPOUT = 0.2
FULL = {"recompute_granularity": "full"}
KINDS = {
    "one": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 1},
    "three": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 3},
    "all": {**FULL, "recompute_method": "uniform", "recompute_num_layers": 99},
    "block": {**FULL, "recompute_method": "block", "recompute_num_layers": 5},
    "default": {"recompute_granularity": "selective"},
}
PARTS = ("core_attn", "mla_up_proj", "shared_experts", "layernorm")
MIXERS = {
    "mamba": "MS",
    "gated_delta_net": "G",
    "kimi_delta_attention": "K",
    "short_conv": "C",
    "attention": "*WL+",
    "mlp": "-",
    "moe": "EB",
    "parallel_heads": "H",
    "shared_block": "ZV",
    "attention_and_mlp": "QR",
    "rg_lru": "U",
}
for modules in [*PARTS, *MIXERS]:
    KINDS[modules] = {"recompute_granularity": "selective", "recompute_modules": [modules]}
KINDS["every"] = {"recompute_granularity": "selective", "recompute_modules": [*PARTS, *MIXERS]}


def step(pattern=EVERY_KIND, dropout=0.0, **fields):
    """Loss, gradients, counts of the routers and saved bytes of one forward and backward pass."""
    fields = {**FIELDS, **fields, "hidden_dropout": dropout, "attention_dropout": dropout}
    fields["layer_overrides"] = {
        key: value
        for key, value in fields["layer_overrides"].items()
        if key in pattern or (key.isdecimal() and pattern == EVERY_KIND)
    }
    torch.manual_seed(7)
    model = build_hybrid_model(small_config(pattern, **fields)).train()
    tokens = random_tokens(1, 29)
    packed = packed_params(0, 11, 28)
    saved = Saved(model)
    with saved.counted():
        loss = model(tokens[:, :-1], labels=tokens[:, 1:], packed_seq_params=packed).mean()
    num_bytes = saved.bytes()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    counts = [b for name, b in model.named_buffers() if name.endswith("local_tokens_per_expert")]
    return loss, gradients, counts, num_bytes, torch.rand(1)


@pytest.fixture(scope="module")
def expected():
    return step(dropout=DROPOUT)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_counts_are_those_without(kind, expected):
    loss, gradients, counts, num_bytes, next_random = expected
    ours = step(dropout=DROPOUT, **KINDS[kind])
    assert torch.equal(ours[0], loss)
    assert all(torch.equal(ours[1][name], gradients[name]) for name in gradients)
    assert len(counts) == 2 and all(count.sum() == 28 * 2 for count in counts)
    assert all(map(torch.equal, ours[2], counts))
    assert torch.equal(ours[4], next_random)
    if kind not in ("layernorm", "every"):  # whose hooks hide from ours what they keep
        assert ours[3] < num_bytes


@pytest.mark.parametrize("kind", ["moe", "one"])
def test_counts_of_a_global_batch_are_those_of_the_forward_pass(kind):
    """In a pipeline the next micro-batch is counted before the backward pass of this one."""
    balanced = dict(
        num_moe_experts=4,
        moe_ffn_hidden_size=20,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1.0,
    )
    gradients = []
    for fields in ({}, KINDS[kind]):
        torch.manual_seed(7)
        model = build_hybrid_model(small_config("E", **balanced, **fields)).train()
        batches = [random_tokens(1, 30) for _ in range(3)]
        for loss in [model(tokens, labels=tokens).mean() for tokens in batches]:
            loss.backward()
        gradients.append(model.decoder.layers[0].mlp.router.weight.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", MIXERS)
def test_of_a_whole_mixer_its_input_is_kept(name):
    for symbol in MIXERS[name]:
        plain, ours = (step(symbol * 4, **fields)[3] for fields in ({}, KINDS[name]))
        bare = step("P")[3]  # embedding, final norm and logits
        assert ours - bare < 0.4 * (plain - bare), symbol


def test_full_recompute_keeps_the_inputs_of_layers():
    hidden = 28 * 48 * 4
    sizes = {kind: step("M*-G" * 3, **KINDS[kind])[3] for kind in ("one", "three")}
    assert sizes["one"] - sizes["three"] == 8 * hidden  # 12 inputs, 4 inputs


def test_layers_of_several_streams_are_recomputed_by_groups():
    fields = {"num_residual_streams": 3, "residual_rank": 5}
    plain, ours = (step("*-PM-P", **fields, **kind) for kind in ({}, KINDS["one"]))
    assert all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])
    assert ours[3] < plain[3]


@pytest.mark.parametrize("modules", [[], ["layernorm"], ["mlp", "layernorm"]])
def test_outputs_of_recomputed_norms_and_of_a_mixer_beside_them_are_not_kept(modules):
    fields = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    model, outputs = build_hybrid_model(small_config("MGC*-+", **fields)).train(), []
    observed = [getattr(layer, layer.norm_name) for layer in model.decoder.layers]
    observed += [model.decoder.layers[4].mlp.linear_fc1] if "mlp" in modules else []

    def note(module, args, output):
        tensor = output[0] if isinstance(output, tuple) else output
        outputs.append(StorageWeakRef(tensor.untyped_storage()))

    for module in observed:
        module.register_forward_hook(note)
    tokens = random_tokens(1, 9)
    loss = model(tokens, labels=tokens).mean()
    assert [output.expired() for output in outputs] == [bool(modules)] * len(observed)
    loss.backward()


def test_a_norm_runs_again_once_for_all_that_use_it():
    model = build_hybrid_model(small_config("+", **KINDS["layernorm"])).train()
    norm, runs = model.decoder.layers[0].input_layernorm, []
    norm.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    tokens = random_tokens(1, 9)
    model(tokens, labels=tokens).mean().backward()
    assert runs == [True, False]


def test_nothing_is_recomputed_in_evaluation(monkeypatch):
    monkeypatch.setattr(recompute, "checkpoint", None)
    for kind in ("one", "every"):
        torch.manual_seed(0)
        model = build_hybrid_model(small_config(EVERY_KIND, **FIELDS, **KINDS[kind]))
        tokens = random_tokens(1, 9)
        assert torch.isfinite(model.eval()(tokens, labels=tokens)).all()
        with torch.no_grad():
            assert torch.isfinite(model.train()(tokens, labels=tokens)).all()
        with pytest.raises(TypeError, match="not callable"):
            model(tokens, labels=tokens)


def test_generators_of_core_start_where_the_forward_pass_did(monkeypatch):
    """A stand-in for core's tracker, which needs CUDA."""
    tracker = SimpleNamespace(states={"model-parallel-rng": torch.tensor(1)}, seen=[])
    tracker.is_initialized = lambda: True
    tracker.get_states = lambda: dict(tracker.states)
    tracker.set_states = lambda states: setattr(tracker, "states", states)
    monkeypatch.setattr(recompute, "get_cuda_rng_tracker", lambda: tracker)

    def draw(x):
        state = tracker.states["model-parallel-rng"]
        tracker.seen.append((state.item(), recompute.is_recomputing()))
        tracker.states["model-parallel-rng"] = state + 1
        return x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    recompute.recompute(draw, recompute.recompute(draw, x)).sum().backward()
    assert tracker.seen == [(1, False), (2, False), (2, True), (1, True)]
    assert tracker.states["model-parallel-rng"] == 3
    assert not recompute.is_recomputing()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"recompute_granularity": "layer"}, "'layer'; use 'full' or 'selective'"),
        ({**FULL, "recompute_method": "block"}, "recompute_num_layers is None; it must be a whole"),
        ({**KINDS["default"], "recompute_num_layers": 2}, "takes the recompute_modules of all"),
        ({"moe_layer_recompute": True}, r"use recompute_granularity='selective' and recompute_mod"),
    ],
)
def test_fields_that_contradict_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config("M*", **fields)


def test_full_recompute_alone_is_of_each_layer():
    assert build_hybrid_model(small_config("M*-", **FULL)).decoder.recomputed_layers == [1, 1, 1]


@pytest.mark.parametrize("name", ["moe_act", "moe", "gdp_qkv"])
def test_modules_of_no_layer_are_refused(name):
    config = small_config("MM+", recompute_granularity="selective", recompute_modules=[name])
    with pytest.raises(ValueError, match=f"recompute_modules has '{name}'") as error:
        build_hybrid_model(config)
    assert "'mamba' (Mamba-2), 'mla_up_proj' (multi-head latent attention)" in str(error.value)


def test_attention_alone_is_nothing_for_a_model_without():
    with pytest.raises(ValueError, match=r"has 'core_attn'.*'mamba' \(Mamba-2\), or rec"):
        build_hybrid_model(small_config("MM", recompute_granularity="selective"))
