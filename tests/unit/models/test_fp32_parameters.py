"""What a 16-bit model keeps in fp32 stays fp32, with its bits, however the model is converted."""

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from small_models import random_tokens, small_config

from megatron_hybrid.models.hybrid_model import build_hybrid_model

KEPT = {"A_log", "D", "dt_bias", "router.weight", "expert_bias", "local_tokens_per_expert"}
FIELDS = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=20,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.125,
)


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def model(dtype=torch.bfloat16, pattern="MGSK*E"):
    torch.manual_seed(0)
    return build_hybrid_model(small_config(pattern, params_dtype=dtype, **FIELDS))


CONVERSIONS = {
    "wrapper": lambda one: Float16Module(one.config, one).module,
    "method": lambda one: one.bfloat16() if one.config.bf16 else one.half(),
    "to": lambda one: one.to("cpu", one.config.params_dtype),
    "twice": lambda one: one.float().to(one.config.params_dtype),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions_leave_them(conversion, dtype):
    expected = tensors(model(dtype))
    converted = tensors(CONVERSIONS[conversion](model(dtype)))
    assert converted.keys() == expected.keys()
    for name, tensor in converted.items():
        kept = any(name.endswith(f".{end}") for end in KEPT)
        assert tensor.dtype == (torch.float32 if kept else dtype), name
        assert torch.equal(tensor, expected[name]), name


def test_gradients_keep_the_dtype_of_their_parameters():
    converted = model()
    converted(random_tokens(1, 9), labels=random_tokens(1, 9)).mean().backward()
    converted.bfloat16()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in converted.parameters())
    assert converted.decoder.layers[0].mixer.A_log.grad.dtype == torch.float32


def test_a_model_of_fp32_is_converted_whole():
    assert {t.dtype for t in tensors(model(torch.float32).bfloat16()).values()} == {torch.bfloat16}
