"""Mamba mixers as they begin, and what mixers declare of states: the decay of a token."""

import pytest
import torch
from small_models import small_config, small_model
from test_mixer_context import DictContext


@pytest.mark.parametrize("pattern", ["M", "S", "G", "K"])
@torch.inference_mode()
def test_an_empty_token_leaves_of_a_state_what_is_declared(pattern):
    """Zeros in, nothing is written: the state of ones becomes the decay."""
    model = small_model(pattern)
    (cache,) = model.cache_requirements()
    tail, state = cache.states
    context = DictContext([cache], 2)
    context.pools[1, state.name].fill_(1.0)
    context.begin([0, 1], [1, 1], [5, 5])
    mixer = getattr(model.decoder.layers[0], model.decoder.layers[0].mixer_name)
    if mixer.conv1d.bias is not None:
        mixer.conv1d.bias.zero_()
    mixer(torch.zeros(2, model.config.hidden_size), context)
    after = context.pools[1, state.name]
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


def test_default_sizes():
    config = small_config("S", hidden_size=40)
    assert (config.mamba1_inner_size, config.mamba1_dt_rank) == (80, 3)
