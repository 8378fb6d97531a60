"""The residual stream in fp32, and dropout of attention."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from reference import greedy, is_greedy, tiny_engine, tiny_model
from small_models import random_tokens, small_config, small_model

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.mixers import base

EVERY = dict(
    mamba_num_heads=6,
    num_moe_experts=4,
    moe_router_topk=4,
    moe_ffn_hidden_size=20,
    num_shared_blocks=1,
    shared_block_adapter_rank=6,
    per_layer_input_size=12,
)


def seen_dtypes(model):
    """The dtypes of the inputs of layers and of mixers in one forward pass."""
    layers, mixers = set(), set()
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda module, args: layers.add(args[0].dtype))
        mixer = getattr(layer, layer.mixer_name)
        mixer.register_forward_pre_hook(lambda module, args: mixers.add(args[0].dtype))
    tokens = random_tokens(1, 9)
    model(tokens, labels=tokens).mean().backward()
    return layers, mixers


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_the_residual_stream_is_fp32_and_mixers_are_not(placement):
    model = small_model(
        "MGSC*W-EK+HPQRU" + ("ZV" if placement == "pre" else ""),
        **EVERY,
        params_dtype=torch.bfloat16,
        fp32_residual_connection=True,
        norm_placement=placement,
        hidden_dropout=0.1,
    ).train()
    assert seen_dtypes(model) == ({torch.float32}, {torch.bfloat16})
    assert model.config.pipeline_dtype == model.stage_input(4).dtype == torch.float32


@torch.no_grad()
def test_small_outputs_add_up_in_fp32():
    """Against the same weights in float64; half of each layer's output is lost in bf16."""
    errors = {}
    tokens = random_tokens(1, 40)
    for fp32 in (False, True):
        torch.manual_seed(0)
        config = small_config(
            "-" * 40,
            params_dtype=torch.bfloat16,
            fp32_residual_connection=fp32,
            residual_multiplier=2.0**-7,
        )
        model = build_hybrid_model(config).eval()
        exact = build_hybrid_model(small_config("-" * 40, residual_multiplier=2.0**-7)).eval()
        exact.load_state_dict(
            {n: t.float() for n, t in model.state_dict().items() if t is not None}
        )
        errors[fp32] = (model(tokens).float() - exact(tokens)).square().mean().sqrt().item()
    assert errors[True] < 0.6 * errors[False], errors


def test_it_is_part_of_the_architecture():
    config = small_config("*", params_dtype=torch.bfloat16, fp32_residual_connection=True)
    read = HybridConfig.from_dict(config.to_dict())
    assert read.fp32_residual_connection
    assert config.differences(small_config("*")) == ["fp32_residual_connection"]


def test_an_engine_serves_it():
    model = tiny_model("M*-", params_dtype=torch.bfloat16, fp32_residual_connection=True)
    engine = tiny_engine(model)
    prompt = list(range(30))
    (result,) = engine.generate([prompt], greedy(8))
    assert is_greedy(model, prompt, result.token_ids)


@pytest.mark.parametrize("pattern", ["*", "W", "L", "+", "H", "Z", "V"])
def test_attention_drops_in_training_alone(pattern):
    models = [
        small_model(pattern, **EVERY, attention_chunk_size=6, attention_dropout=p)
        for p in (0.0, 0.5)
    ]
    models[1].load_state_dict(models[0].state_dict())
    tokens = random_tokens(2, 20)
    plain, dropping = models
    assert torch.equal(plain(tokens), dropping(tokens))
    draws = [dropping.train()(tokens) for _ in range(2)]
    assert torch.equal(plain.train()(tokens), plain.eval()(tokens))
    assert not torch.allclose(*draws, atol=1e-3)


def test_heads_of_each_rank_draw_from_its_own_generator(monkeypatch):
    """A stand-in for core's tracker, which needs CUDA."""
    forks = []

    @contextlib.contextmanager
    def fork():
        forks.append("in")
        yield
        forks.append("out")

    tracker = SimpleNamespace(is_initialized=lambda: True, fork=fork)
    monkeypatch.setattr(base, "get_cuda_rng_tracker", lambda: tracker)
    tokens = random_tokens(1, 5)
    small_model("*+", attention_dropout=0.1).train()(tokens)
    assert forks == ["in", "out"] * 2
    small_model("*+", hidden_dropout=0.1).train()(tokens)
    small_model("*+", attention_dropout=0.1)(tokens)
    assert len(forks) == 4
