"""What Gemma alone has: per-layer inputs, experts next to an MLP."""

import torch
from small_models import random_tokens, small_model
from test_mixer_context import DictContext, run

from megatron_hybrid.models.mixers.base import StackInputs

HIDDEN, VOCAB = 48, 61
EXPERTS = {"num_moe_experts": 5, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}


def test_each_layer_takes_its_own_per_layer_input():
    model = small_model("P-PP", per_layer_input_size=10)
    inputs = StackInputs(None, torch.randn(4, 3, 10))
    hidden_Th = torch.randn(4, HIDDEN)
    mixers = [model.decoder.layers[i].mixer for i in (0, 2, 3)]
    for i, mixer in enumerate(mixers):
        gate = torch.nn.functional.silu(hidden_Th @ mixer.gate.weight.T)
        expected = (gate * inputs.per_layer_TJp[:, i]) @ mixer.projection.weight.T
        output, bias = mixer(hidden_Th, None, inputs)
        torch.testing.assert_close(output, expected)
        assert bias is None


@torch.inference_mode()
def test_pieces_equal_the_whole():
    model = small_model("*PBP", per_layer_input_size=10, layer_scalar=True, **EXPERTS)
    model.decoder.layers[2].layer_scalar.fill_(0.6)
    tokens = random_tokens(1, 30)
    whole = model(tokens)[0]
    context = DictContext(model.cache_requirements(), 1)
    pieces = [
        run(model, context, tokens, {0: cut}, padding)[0]
        for padding, cut in enumerate([(0, 11), (11, 12), (12, 30)])
    ]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=1e-5)


def test_gradients_reach_every_parameter():
    model = small_model("PB", per_layer_input_size=10, **EXPERTS)
    model(random_tokens(2, 60)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
