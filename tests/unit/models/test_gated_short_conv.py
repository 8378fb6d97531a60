"""The gated short convolution against that of transformers, and what its config refuses."""

import pytest
import torch
from small_models import small_config, small_model
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.ragged import RaggedLayout

HIDDEN = 48


@pytest.mark.parametrize(("kernel", "bias"), [(3, False), (5, True)])
def test_outputs_and_gradients_are_those_of_transformers(kernel, bias):
    config = Lfm2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["conv"],
        conv_L_cache=kernel,
        conv_bias=bias,
    )
    reference = Lfm2ShortConv(config, 0)
    model = small_model("C", short_conv_kernel=kernel, short_conv_bias=bias)
    mixer = model.decoder.layers[0].mixer
    state = reference.state_dict()
    renamed = {name.replace("conv.", "conv1d."): value for name, value in state.items()}
    mixer.load_state_dict(renamed, strict=True)
    theirs = torch.randn(2, 21, HIDDEN, requires_grad=True)
    ours = theirs.detach().clone().requires_grad_()
    probe = torch.randn(2, 21, HIDDEN)

    expected = reference(theirs)
    (expected * probe).sum().backward()
    layout = RaggedLayout.uniform(2, 21)
    output, added = mixer(ours.flatten(0, 1), UncachedContext(layout, "cpu"))
    output = (output if added is None else output + added).view_as(expected)
    (output * probe).sum().backward()

    assert expected.std() > 0.02
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    gradients = {name: p.grad for name, p in mixer.named_parameters()}
    for name, parameter in reference.named_parameters():
        own = gradients.pop(name.replace("conv.", "conv1d."))
        torch.testing.assert_close(own, parameter.grad, atol=2e-5, rtol=1e-5, msg=name)
    assert not gradients


def test_what_is_kept_is_the_tail_of_the_convolution():
    (cache,) = small_model("C", short_conv_kernel=4).cache_requirements()
    assert cache.kv is None
    assert [(state.name, state.shape) for state in cache.states] == [("conv", (HIDDEN, 3))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"short_conv_kernel": 1}, "short_conv_kernel is 1; a causal convolution needs"),
        (
            {"hidden_size": 49, "tensor_model_parallel_size": 2},
            "hidden_size is 49, which does not divide evenly",
        ),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError) as error:
        small_config("C", **fields)
    assert message in str(error.value)
