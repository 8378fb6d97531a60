"""The Mamba-1 mixer against those of transformers, and what its config refuses."""

import pytest
import torch
from small_models import small_config, small_model
from transformers import FalconMambaConfig, JambaConfig, MambaConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaModel
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

HIDDEN, INNER, STATES, RANK = 48, 144, 6, 5


def mamba(biases):
    config = MambaConfig(
        hidden_size=HIDDEN,
        expand=3,
        state_size=STATES,
        time_step_rank=RANK,
        use_bias=biases,
        use_conv_bias=biases,
    )
    return MambaMixer(config, 0)


def falcon_mamba(biases):
    config = FalconMambaConfig(
        vocab_size=7,
        num_hidden_layers=1,
        hidden_size=HIDDEN,
        expand=3,
        state_size=STATES,
        time_step_rank=RANK,
        use_bias=biases,
        use_conv_bias=biases,
        mixer_rms_eps=1e-3,
    )
    return FalconMambaModel(config).layers[0].mixer  # alone it cannot be built


def jamba(biases):
    config = JambaConfig(
        hidden_size=HIDDEN,
        mamba_expand=3,
        mamba_d_state=STATES,
        mamba_dt_rank=RANK,
        mamba_proj_bias=biases,
        mamba_conv_bias=biases,
        rms_norm_eps=1e-3,
    )
    return JambaMambaMixer(config, 0)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    ("build", "norm"), [(mamba, "none"), (falcon_mamba, "weightless"), (jamba, "weighted")]
)
def test_outputs_and_gradients_are_those_of_transformers(build, norm, biases):
    reference = build(biases)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    model = small_model(
        "S",
        mamba1_inner_size=INNER,
        mamba1_state_dim=STATES,
        mamba1_dt_rank=RANK,
        mamba1_conv_bias=biases,
        mamba1_proj_bias=biases,
        mamba1_norm=norm,
        mamba1_norm_epsilon=1e-3,
        mamba1_chunk_size=8,
    )
    mixer = model.decoder.layers[0].mixer
    mixer.load_state_dict(reference.state_dict(), strict=True)
    hidden = torch.randn(2, 21, HIDDEN)
    probe = torch.randn(2, 21, HIDDEN)

    theirs = hidden.clone().requires_grad_()
    expected = reference.eval()(theirs)
    (expected * probe).sum().backward()
    ours = hidden.clone().requires_grad_()
    output, bias = mixer(ours.flatten(0, 1), UncachedContext(RaggedLayout.uniform(2, 21), "cpu"))
    output = (output if bias is None else output + bias).view_as(expected)
    (output * probe).sum().backward()

    assert expected.std() > 0.05
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5, rtol=1e-4)
    gradients = {name: p.grad for name, p in mixer.named_parameters()}
    for name, parameter in reference.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            gradients.pop(name), parameter.grad, atol=1e-5 * scale, rtol=1e-4, msg=name
        )
    assert not gradients


def test_initial_time_steps_and_decays():
    mixer = small_model("S", hidden_size=128).decoder.layers[0].mixer
    dt = torch.nn.functional.softplus(mixer.dt_proj.bias)
    assert 0.9e-3 < dt.min() < 3e-3 < 3e-2 < dt.max() < 0.101
    assert mixer.dt_proj.weight.abs().max() <= 8**-0.5  # of rank 128 / 16
    expected = torch.arange(1.0, 17.0).expand(256, 16)
    torch.testing.assert_close(mixer.A_log.exp(), expected)
    assert mixer.A_log.dtype == mixer.D.dtype == torch.float32


@torch.inference_mode()
def test_bfloat16():
    torch.manual_seed(0)
    model = small_model("S", params_dtype=torch.bfloat16, mamba1_norm="weighted")
    mixer = model.decoder.layers[0].mixer
    exact = small_model("S", mamba1_norm="weighted").decoder.layers[0].mixer
    exact.load_state_dict(mixer.state_dict())
    assert mixer.A_log.dtype == torch.float32
    hidden = torch.randn(30, HIDDEN, dtype=torch.bfloat16)
    context = UncachedContext(RaggedLayout.uniform(1, 30), "cpu")
    output, expected = mixer(hidden, context)[0], exact(hidden.float(), context)[0]
    assert output.dtype == torch.bfloat16
    assert (output - expected).abs().max() < 0.03 * expected.abs().max()


def test_default_sizes():
    config = small_config("S", hidden_size=40)
    assert (config.mamba1_inner_size, config.mamba1_dt_rank) == (80, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mamba1_norm": "rms"}, "mamba1_norm is 'rms'; use 'none', 'weighted' or 'weightless'"),
        ({"mamba1_state_dim": 0}, "mamba1_state_dim is 0; it must be a whole number from 1"),
        ({"mamba1_dt_rank": 0}, "mamba1_dt_rank is 0"),
        ({"mamba1_chunk_size": 0}, "mamba1_chunk_size is 0"),
        ({"mamba1_conv_kernel": 1}, "mamba1_conv_kernel is 1; it must be a whole number from 2"),
        (
            {"mamba1_inner_size": 95, "tensor_model_parallel_size": 2},
            "mamba1_inner_size is 95, which does not divide evenly",
        ),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError) as error:
        small_config("S", **fields)
    assert message in str(error.value)
