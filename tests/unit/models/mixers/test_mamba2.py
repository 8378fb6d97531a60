"""The layer of parallel heads, multipliers of an MLP."""

import torch
from small_models import small_model


@torch.no_grad()
def test_multipliers_of_an_mlp():
    torch.manual_seed(0)
    mlp = small_model("-", mlp_gate_multiplier=0.3, mlp_output_multiplier=1.7).decoder.layers[0].mlp
    x_Th = torch.randn(5, 48)
    gate, up = (x_Th @ mlp.linear_fc1.weight.T).chunk(2, -1)
    expected = (torch.nn.functional.silu(0.3 * gate) * up) @ mlp.linear_fc2.weight.T * 1.7
    torch.testing.assert_close(mlp(x_Th, None)[0], expected)
