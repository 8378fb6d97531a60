"""Blocks that layers share: one storage each, a cache for every layer that runs one."""

import torch
from small_models import random_tokens, small_model

from megatron_hybrid.checkpoints.model_tensors import full_state_dict

PATTERN = "ZMZ-ZZ"  # blocks 0, 1, 0 and 1


def shared_layers(model):
    return [model.decoder.layers[i].mixer for i, symbol in enumerate(PATTERN) if symbol == "Z"]


def test_first_layers_own_the_blocks():
    model = small_model(PATTERN, num_shared_blocks=2)
    assert [mixer.block is not None for mixer in shared_layers(model)] == [True, True, False, False]
    names = full_state_dict(model).keys()
    owners = {name.split(".")[2] for name in names if ".block." in name}
    assert owners == {"0", "2"}
    assert len(model.cache_requirements()) == len(PATTERN)
    for layer in (0, 2, 4, 5):
        cache = model.cache_requirements()[layer]
        assert cache.kv.num_heads == 2
        assert [state.name for state in cache.states] == ["conv", "ssm"]


@torch.no_grad()
def test_a_block_serves_every_second_layer():
    """Emptied of its last projection, a block adds nothing: its layers are plain Mamba-2 layers."""
    torch.manual_seed(0)
    model = small_model(PATTERN, num_shared_blocks=2)
    tokens = random_tokens(1, 20)
    shared = shared_layers(model)
    before = model(tokens)
    shared[0].block.linear_fc2.weight.zero_()
    without_block = model(tokens)
    assert (before - without_block).abs().max() > 1e-3
    shared[0].linear.weight.zero_()
    shared[2].linear.weight.zero_()
    torch.testing.assert_close(model(tokens), without_block, atol=0, rtol=0)
    shared[1].linear.weight.zero_()
    assert (model(tokens) - without_block).abs().max() > 1e-3
