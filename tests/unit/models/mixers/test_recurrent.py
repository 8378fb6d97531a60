"""What the recurrent mixers keep of a sequence."""

import pytest
import torch
from small_models import small_model

from megatron_hybrid.models.mixers.base import StateTensor

HEADS, VALUE_HEADS, KEY, VALUE = 2, 4, 16, 24


@pytest.mark.parametrize(
    ("symbol", "fields", "tail", "states"),
    [
        ("C", {"short_conv_kernel": 4}, (48, 3), ()),
        ("G", {}, (2 * HEADS * KEY + VALUE_HEADS * VALUE, 3), ((VALUE_HEADS, KEY, VALUE),)),
        ("K", {}, (HEADS * (2 * KEY + VALUE), 3), ((HEADS, KEY, VALUE),)),
    ],
)
def test_what_is_kept(symbol, fields, tail, states):
    model = small_model(symbol, recurrent_state_dtype=torch.bfloat16, **fields)
    (cache,) = model.cache_requirements()
    assert cache.kv is None
    assert cache.states == (
        StateTensor("conv", tail, torch.float32),
        *(StateTensor("delta", shape, torch.bfloat16) for shape in states),
    )
