"""What Gemma alone has: per-layer inputs."""

import torch
from small_models import small_model

from megatron_hybrid.models.mixers.base import StackInputs

HIDDEN = 48


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
