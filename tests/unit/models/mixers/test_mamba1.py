"""The Mamba-1 mixer: how it begins, and in bfloat16."""

import torch
from small_models import small_config, small_model


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
