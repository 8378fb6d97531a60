"""The layer of parallel heads, multipliers of an MLP."""

import torch
from small_models import small_model


def test_parallel_heads_keep_both_kinds_of_memory():
    (cache,) = small_model("H").cache_requirements()
    assert cache.kv.num_heads == 2
    assert [state.name for state in cache.states] == ["conv", "ssm"]


@torch.no_grad()
def test_multipliers_of_an_mlp():
    torch.manual_seed(0)
    mlp = small_model("-", mlp_gate_multiplier=0.3, mlp_output_multiplier=1.7).decoder.layers[0].mlp
    x_Th = torch.randn(5, 48)
    gate, up = (x_Th @ mlp.linear_fc1.weight.T).chunk(2, -1)
    expected = (torch.nn.functional.silu(0.3 * gate) * up) @ mlp.linear_fc2.weight.T * 1.7
    torch.testing.assert_close(mlp(x_Th, None)[0], expected)
