"""Blocks that layers share: one storage each, a cache for every layer that runs one."""

import pytest
import torch
from small_models import random_tokens, small_config, small_model
from transformers import Zamba2Config
from transformers.models.zamba2.modeling_zamba2 import (
    Zamba2AttentionDecoderLayer,
    Zamba2HybridLayer,
    Zamba2MambaDecoderLayer,
    Zamba2RotaryEmbedding,
)

from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.models.mixers.base import StackInputs
from megatron_hybrid.models.mixers.mixer_context import UncachedContext
from megatron_hybrid.ops.activations import ACTIVATIONS
from megatron_hybrid.ops.ragged import RaggedLayout

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


@pytest.mark.parametrize("attention_adapters", [False, True])
def test_all_parameters_learn(attention_adapters):
    model = small_model(
        PATTERN, num_shared_blocks=2, shared_block_attention_adapters=attention_adapters
    )
    tokens = random_tokens(2, 20)
    model(tokens, labels=tokens).mean().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


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


def zamba2_layer():
    """The second layer that runs Zamba2's first block, with adapters of its own."""
    config = Zamba2Config(
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_mem_blocks=1,
        layers_block_type=["hybrid", "hybrid"],
        num_hidden_layers=2,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        adapter_rank=6,
        n_mamba_heads=6,
        mamba_d_state=12,
        mamba_ngroups=2,
        rms_norm_eps=1e-3,
        attn_implementation="eager",
    )
    layer = Zamba2HybridLayer(
        Zamba2AttentionDecoderLayer(config, block_id=0),
        torch.nn.Linear(48, 48, bias=False),
        Zamba2MambaDecoderLayer(config, layer_idx=1),
    ).eval()
    for parameter in layer.parameters():
        parameter.normal_(std=0.2)
    return layer, config


@torch.no_grad()
def test_equals_zamba2():
    theirs, config = zamba2_layer()
    model = small_model(
        "ZZ",
        num_query_groups=4,
        kv_channels=24,
        softmax_scale=12**-0.5,
        activation_func=ACTIVATIONS["gelu"],
        mamba_num_heads=6,
        mamba_dt_min=config.time_step_min,
        layernorm_epsilon=1e-3,
        shared_block_adapter_rank=6,
        shared_block_attention_adapters=True,
    )
    first, second = (layer.mixer for layer in model.decoder.layers)
    block, shared = first.block, theirs.shared_transformer
    attention = shared.self_attn
    groups = [getattr(attention, f"{name}_proj").weight.unflatten(0, (4, -1)) for name in "qkv"]
    block.self_attention.linear_qkv.weight.copy_(torch.cat(groups, 1).flatten(0, 1))
    adapters = [getattr(attention, f"linear_{name}_adapter_list")[1] for name in "qkv"]
    adapters.append(shared.feed_forward.gate_up_proj_adapter_list[1])
    for own, given in zip([*second.qkv_adapters, second.mlp_adapter], adapters, strict=True):
        own.down.weight.copy_(given[0].weight)
        own.up.weight.copy_(given[1].weight)
    for own, given in (
        (block.input_layernorm, shared.input_layernorm),
        (block.self_attention.linear_proj, attention.o_proj),
        (block.pre_mlp_layernorm, shared.pre_ff_layernorm),
        (block.linear_fc1, shared.feed_forward.gate_up_proj),
        (block.linear_fc2, shared.feed_forward.down_proj),
        (second.linear, theirs.linear),
        (second.norm, theirs.mamba_decoder.input_layernorm),
    ):
        own.weight.copy_(given.weight)
    second.mamba.load_state_dict(theirs.mamba_decoder.mamba.state_dict())

    x_Th, embedding_Th = torch.randn(2, 19, 48)
    rotary = Zamba2RotaryEmbedding(config)(x_Th, torch.arange(19)[None])
    causal = torch.full((19, 19), -torch.inf).triu(1)[None, None]
    expected = theirs(
        x_Th[None], embedding_Th[None], 1, causal_mask=causal, position_embeddings=rotary
    )[0]
    inputs = StackInputs(embedding_Th, shared_blocks={0: block})
    context = UncachedContext(RaggedLayout.uniform(1, 19), x_Th.device)
    given, bias = second(x_Th, context, inputs)
    assert bias is None
    torch.testing.assert_close(x_Th + given, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_shared_blocks": 0}, "num_shared_blocks is 0"),
        ({"gated_linear_unit": False}, "need True"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is 1.0, but shared blocks"),
    ],
)
def test_one_clear_error(fields, message):
    with pytest.raises(ValueError, match=message):
        small_config("ZZ", **fields)
