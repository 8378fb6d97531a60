"""Norms of hidden states against transformers and torch; the residual stream in fp32; dropout; what
a 16-bit model keeps in fp32, with its bits, however it is converted."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from reference import greedy, is_greedy, tiny_engine, tiny_model
from small_models import random_tokens, small_config, small_model

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.mixers import base
from megatron_hybrid.models.norms import LocalNorm


def norm_of(**fields) -> LocalNorm:
    return LocalNorm(small_config("-", **fields), 24, 1e-2)


@torch.no_grad()
def test_layer_norm():
    plain, centered = (
        norm_of(normalization="LayerNorm", layernorm_zero_centered_gamma=zero)
        for zero in (False, True)
    )
    reference, x = torch.nn.LayerNorm(24, eps=1e-2), torch.randn(5, 24)
    for norm, offset in ((plain, 0.0), (centered, 1.0)):
        reference.weight.copy_(norm.weight.normal_() + offset)
        reference.bias.copy_(norm.bias.normal_())
        torch.testing.assert_close(norm(x), reference(x))


@torch.no_grad()
def test_factors_of_nearly_one_survive_half_precision():
    """1 + weight is taken in fp32: in bfloat16, 1 + 2^-10 would be 1."""
    norm = norm_of(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16)
    x = torch.randn(64, 24).bfloat16()
    before = norm(x)
    norm.weight.fill_(2**-10)
    after = norm(x)
    assert after.dtype == torch.bfloat16
    assert not torch.equal(after, before)


@torch.no_grad()
def test_the_norm_of_a_residual_sum_is_made_with_it():
    config = small_config("-*-", params_dtype=torch.bfloat16)
    model = build_hybrid_model(config).eval()
    norms = [getattr(layer, layer.norm_name) for layer in model.decoder.layers]
    norms.append(model.decoder.final_norm)
    calls = []
    for norm in norms:
        norm.forward = lambda x, norm=norm: calls.append(norm) or type(norm).forward(norm, x)
    ids = torch.arange(8)[None]
    expected = model(ids)
    assert calls == norms[:1]  # the others are of sums

    # What a hook returns is what is normed.
    layer = model.decoder.layers[0]
    layer.register_forward_hook(lambda *given: given[-1].clone())
    assert torch.equal(model(ids), expected) and calls == [*norms[:1], *norms[:2]]
    # A hook of a norm sees its input and its output.
    norms[2].register_forward_hook(lambda _, args, out: calls.append((args[0] + 0 * out).dtype))
    assert torch.equal(model(ids), expected) and calls[-1] == torch.bfloat16


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


@pytest.mark.parametrize(
    ("pattern", "kind"), [*((each, "attention") for each in "*WL+HZV"), ("-", "hidden")]
)
def test_numbers_are_dropped_in_training_alone(pattern, kind):
    models = [
        small_model(pattern, **EVERY, attention_chunk_size=6, **{f"{kind}_dropout": p})
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


KEPT = {"A_log", "D", "dt_bias", "router.weight", "expert_bias", "local_tokens_per_expert"}
FIELDS = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=20,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.125,
)


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def model(dtype=torch.bfloat16, pattern="MGSK*E"):
    torch.manual_seed(0)
    return build_hybrid_model(small_config(pattern, params_dtype=dtype, **FIELDS))


CONVERSIONS = {
    "wrapper": lambda one: Float16Module(one.config, one).module,
    "method": lambda one: one.bfloat16() if one.config.bf16 else one.half(),
    "to": lambda one: one.to("cpu", one.config.params_dtype),
    "twice": lambda one: one.float().to(one.config.params_dtype),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_leave_them(conversion, dtype):
    expected = tensors(model(dtype))
    converted = tensors(CONVERSIONS[conversion](model(dtype)))
    assert converted.keys() == expected.keys()
    for name, tensor in converted.items():
        kept = any(name.endswith(f".{end}") for end in KEPT)
        assert tensor.dtype == (torch.float32 if kept else dtype), name
        assert torch.equal(tensor, expected[name]), name


def test_gradients_keep_the_dtype_of_their_parameters():
    converted = model()
    converted(random_tokens(1, 9), labels=random_tokens(1, 9)).mean().backward()
    converted.bfloat16()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in converted.parameters())
    assert converted.decoder.layers[0].mixer.A_log.grad.dtype == torch.float32


def test_a_model_of_fp32_is_converted_whole():
    assert {t.dtype for t in tensors(model(torch.float32).bfloat16()).values()} == {torch.bfloat16}
