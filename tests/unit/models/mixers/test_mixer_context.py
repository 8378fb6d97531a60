"""Every mixer, run piece by piece through a context, gives what one uncached forward gives; what
mixers declare of states, such as the decay of a token, and Mamba mixers as they begin."""

from types import SimpleNamespace

import pytest
import torch
from differential import TOLERANCE, LogitsRecorder
from reference import finish, full_logits, greedy, tiny_engine
from small_models import ALL_MIXERS, random_tokens, small_model

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.models.mixers.base import LayerCache
from megatron_hybrid.ops import RaggedLayout, SlotStates


def check_pieces(model, tolerance=TOLERANCE):
    """Prompts in parts and decodes beside each other, and one that goes on from a state inside of
    the first: all logits are those of one forward pass. Returns the largest difference."""
    engine = tiny_engine(model, max_tokens=13)
    recorder = LogitsRecorder(engine)
    prompts = [random_tokens(length).tolist() for length in (30, 20, 1)]
    for prompt in prompts:
        options = RequestOptions(cache_breakpoints=[11] if len(prompt) > 11 else [])
        engine.add_request(prompt, greedy(3, return_log_probs=True), options)
    finish(engine)
    later = engine.add_request(prompts[0][:11] + prompts[1], greedy(1))
    finish(engine)
    assert later.prefix.skipped_tokens == 11
    return recorder.check(model, tolerance)


GEMMA = {"per_layer_input_size": 10, "layer_scalar": True, "num_moe_experts": 5}
GEMMA |= {"moe_router_topk": 2, "moe_ffn_hidden_size": 12, "num_residual_streams": 3}


@pytest.mark.parametrize(
    ("pattern", "fields"), [*((p, {}) for p in (*"MGSCK*W+-", ALL_MIXERS)), ("*PBP", GEMMA)]
)
@torch.inference_mode()
def test_pieces_equal_the_whole(pattern, fields):
    check_pieces(small_model(pattern, **fields))


def test_inference_is_the_context_alone():
    """Training mode changes nothing: what selects inference is the context."""
    model, prompt = small_model(), random_tokens(12).tolist()
    engine = tiny_engine(model)
    engine.add_request(prompt, greedy(1))
    with torch.no_grad():
        model.train()
        logits = engine.runner.forward(engine.scheduler.schedule())
        torch.testing.assert_close(logits[0], full_logits(model, prompt)[-1], atol=1e-5, rtol=1e-5)


def test_cache_requirements():
    model = small_model("MG*W-CK", recurrent_state_dtype=torch.bfloat16)
    mamba, delta, full, window, mlp, conv, kimi = model.cache_requirements()
    assert [(s.name, s.shape, s.dtype) for s in mamba.states] == [
        ("conv", (96 + 2 * 24, 3), torch.float32),
        ("ssm", (6, 16, 12), torch.bfloat16),
    ]
    assert [(s.name, s.shape, s.dtype) for s in delta.states] == [
        ("conv", (2 * 32 + 96, 3), torch.float32),
        ("delta", (4, 16, 24), torch.bfloat16),
    ]
    assert [(s.name, s.shape) for s in conv.states] == [("conv", (48, 2))]
    assert [(s.name, s.shape) for s in kimi.states] == [
        ("conv", (2 * (32 + 24), 3)),
        ("delta", (2, 16, 24)),
    ]
    assert (full.kv.num_heads, full.kv.head_dim, full.kv.window) == (2, 12, None)
    assert (window.kv.num_heads, window.kv.head_dim, window.kv.window) == (2, 12, 7)
    assert mlp == LayerCache()
    assert mamba.kv is delta.kv is conv.kv is kimi.kv is None
    assert full.states == ()


@pytest.mark.parametrize("pattern", ["M", "G", ALL_MIXERS])
@torch.inference_mode()
def test_bf16_states_are_taken_and_given(pattern):
    model = small_model(pattern, recurrent_state_dtype=torch.bfloat16)
    largest = model(random_tokens(1, 24)).abs().max().item()
    assert check_pieces(model, 0.05 * largest) > 0


@pytest.mark.parametrize("pattern", ["M", "S", "G", "K"])
@torch.inference_mode()
def test_an_empty_token_leaves_of_a_state_what_is_declared(pattern):
    """Zeros in, nothing is written: the state of ones becomes the decay."""
    model = small_model(pattern)
    (cache,) = model.cache_requirements()
    tail, state = cache.states
    layout, slots, after = (
        RaggedLayout((1, 1), (5, 5)),
        torch.arange(2),
        torch.ones(2, *state.shape),
    )
    pools = {tail.name: torch.zeros(2, *tail.shape), state.name: after}
    context = SimpleNamespace(
        ragged_layout=lambda: layout, states=lambda _, name: SlotStates(pools[name], slots, None)
    )
    mixer = getattr(model.decoder.layers[0], model.decoder.layers[0].mixer_name)
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.zero_()
    mixer(torch.zeros(2, model.config.hidden_size), context)
    assert after.min() > 0 and after.max() < 1 and after.std() > 0.01
    torch.testing.assert_close(after, state.decay.expand(2, *state.shape))
    assert not state.decay.requires_grad
    assert tail.decay is None


@pytest.mark.parametrize("pattern", ["H", "Z"])
def test_layers_with_a_mamba_inside_declare_its_decay(pattern):
    names = [
        state.name
        for cache in small_model(pattern).cache_requirements()
        for state in cache.states
        if state.decay is not None
    ]
    assert names == ["ssm"]


def test_initial_time_steps_and_decays():
    mixer = small_model("S", hidden_size=128).decoder.layers[0].mixer
    dt = torch.nn.functional.softplus(mixer.dt_proj.bias)
    assert 0.9e-3 < dt.min() < 3e-3 < 3e-2 < dt.max() < 0.101
    assert mixer.dt_proj.weight.abs().max() <= 8**-0.5  # of rank 128 / 16
    expected = torch.arange(1.0, 17.0).expand(256, 16)
    torch.testing.assert_close(mixer.A_log.exp(), expected)
    assert mixer.A_log.dtype == mixer.D.dtype == torch.float32
