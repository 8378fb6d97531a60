"""The projections without a gradient give what core's give with one."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from small_models import small_model

from megatron_hybrid.models.mixers.projections import (
    LocalColumnLinear,
    LocalRowLinear,
    build_input_projection,
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize(
    ("ours", "core", "only"),
    [
        (LocalColumnLinear, ColumnParallelLinear, {"gather_output": False}),
        (LocalRowLinear, RowParallelLinear, {"input_is_parallel": True}),
    ],
)
def test_equal_core(ours, core, only, bias, skip_bias_add):
    model = small_model()
    options = {
        "config": model.config,
        "init_method": model.config.init_method,
        "bias": bias,
        "skip_bias_add": skip_bias_add,
        "tp_group": model.pg_collection.tp,
        **only,
    }
    mine, theirs = ours(48, 32, **options), core(48, 32, **options)
    theirs.load_state_dict(mine.state_dict())
    if bias:
        for linear in (mine, theirs):
            torch.nn.init.constant_(linear.bias, 0.7)
    x = torch.randn(5, 48)
    expected = theirs(x)
    assert expected[0].requires_grad
    with torch.inference_mode():
        output = mine(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(mine(x), expected)


def test_fused_gradients_of_copies_are_refused():
    group = SimpleNamespace(size=lambda: 4)
    config = SimpleNamespace(gradient_accumulation_fusion=True, init_method=None, hidden_size=8)
    with pytest.raises(ValueError, match="gradient_accumulation_fusion=True does not sum"):
        build_input_projection(
            LocalColumnLinear, config, (8, 4), SimpleNamespace(tp=group), copies=(1, 2)
        )
