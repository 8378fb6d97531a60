"""What scripts of Megatron read of a model, and how they call it."""

import inspect

import pytest
import stock_megatron
import torch
from megatron.core.models.mamba import MambaModel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model
from small_models import small_config

from megatron_hybrid.models.hybrid_model import HybridModel, build_hybrid_model


@pytest.fixture(params=["ours", "stock"])
def model(request, monkeypatch):
    """In bf16, in core's wrapper."""
    config = small_config("-M*M", params_dtype=torch.bfloat16, mamba_chunk_size=48)
    ours = build_hybrid_model(config)
    if request.param == "ours":
        return Float16Module(config, ours)
    with stock_megatron.on_cpu(monkeypatch):
        return Float16Module(config, stock_megatron.mamba_model(config))


def test_reads_of_an_inference_config(model):
    """The attributes that Megatron-LM's `to_inference_config` takes through the wrappers."""

    def read(name):
        return get_attr_wrapped_model(model, name)

    assert read("position_embedding_type") == "rope"
    assert read("max_sequence_length") in (None, 512)  # ours has no limit
    assert read("pg_collection").tp.size() == 1
    assert read("vocab_size") == read("config").vocab_size
    decoder = read("decoder")
    assert "".join(decoder.layer_type_list) == "-M*M"
    chunks = [layer.mixer.chunk_size for layer in decoder.layers if hasattr(layer, "mixer")]
    assert chunks == [48, 48]
    config = read("config")
    conv, state = decoder.mamba_state_shapes_per_request()
    heads, groups = config.mamba_num_heads, config.mamba_num_groups
    channels = heads * config.mamba_head_dim + 2 * groups * config.mamba_state_dim
    assert conv == (channels, config.mamba_conv_kernel)
    assert state == (heads, config.mamba_head_dim, config.mamba_state_dim)
    if not stock_megatron.IS_0_16:  # where scripts put these together
        from megatron.core.inference.config import MambaInferenceStateConfig

        made = MambaInferenceStateConfig.from_model(model)
        assert (made.conv_states_shape, made.ssm_states_shape) == (conv, state)
        assert (made.mamba_chunk_size, made.ssm_states_dtype) == (48, torch.bfloat16)


def test_a_model_without_mamba_layers_has_no_state_shapes():
    model = build_hybrid_model(small_config("*-"))
    assert model.decoder.mamba_state_shapes_per_request() is None
    assert model.vp_stage is None


def parameters(model_class) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model_class.forward).parameters)


def test_forward_takes_the_arguments_of_the_stock_model():
    stock, ours = parameters(MambaModel), parameters(HybridModel)
    missing = set(stock) - set(ours)
    assert not missing
    positional = [
        [name for name, p in each.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for each in (stock, ours)
    ]
    assert positional[0] == positional[1]


@torch.no_grad()
def test_a_decoder_input_takes_the_place_of_the_embedding():
    model = build_hybrid_model(small_config("M*-")).eval()
    tokens = torch.arange(14).view(2, 7)
    rows_sbh = model.embedding(tokens, None)
    expected = model(tokens)
    assert torch.equal(model(None, None, None, rows_sbh), expected)
    assert torch.equal(model(tokens + 1, decoder_input=rows_sbh), expected)
    with pytest.raises(ValueError, match="the first pipeline stage needs tokens"):
        model(None)


@torch.no_grad()
def test_routers_are_told_the_padding():
    model = build_hybrid_model(small_config("M")).eval()
    tokens, mask = torch.arange(14).view(2, 7), torch.rand(2, 7) > 0.5
    told = []
    model.decoder.register_forward_pre_hook(lambda module, args: told.append(args[1]))
    model(tokens, padding_mask=mask)
    assert torch.equal(told[0].padding_mask_T, mask.flatten())
    for wrong in (mask.float(), mask[:1]):
        with pytest.raises(ValueError, match=r"it must be torch\.bool \[2, 7\], True where a tok"):
            model(tokens, padding_mask=wrong)


@torch.no_grad()
def test_masks_of_the_loss_and_of_padding_change_nothing():
    model = build_hybrid_model(small_config("M*-")).eval()
    tokens = torch.arange(14).view(2, 7)
    masks = {"loss_mask": torch.zeros(2, 7), "padding_mask": torch.ones(2, 7, dtype=torch.bool)}
    assert torch.equal(model(tokens, labels=tokens, **masks), model(tokens, labels=tokens))
