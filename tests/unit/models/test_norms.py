"""Norms of hidden states against transformers and torch."""

import torch
from small_models import small_config

from megatron_hybrid import build_hybrid_model
from megatron_hybrid.models.norms import LocalNorm


def norm_of(**fields) -> LocalNorm:
    return LocalNorm(small_config("-", **fields), 24, 1e-2)


@torch.no_grad()
def test_layer_norm():
    plain, centered = (
        norm_of(normalization="LayerNorm", layernorm_zero_centered_gamma=zero)
        for zero in (False, True)
    )
    reference, x = torch.nn.LayerNorm(24, eps=1e-2), torch.randn(5, 24)
    for norm, offset in ((plain, 0.0), (centered, 1.0)):
        reference.weight.copy_(norm.weight.normal_() + offset)
        reference.bias.copy_(norm.bias.normal_())
        torch.testing.assert_close(norm(x), reference(x))


@torch.no_grad()
def test_factors_of_nearly_one_survive_half_precision():
    """1 + weight is taken in fp32: in bfloat16, 1 + 2^-10 would be 1."""
    norm = norm_of(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16)
    x = torch.randn(64, 24).bfloat16()
    before = norm(x)
    norm.weight.fill_(2**-10)
    after = norm(x)
    assert after.dtype == torch.bfloat16
    assert not torch.equal(after, before)


@torch.no_grad()
def test_the_norm_of_a_residual_sum_is_made_with_it():
    config = small_config("-*-", params_dtype=torch.bfloat16)
    model = build_hybrid_model(config).eval()
    norms = [layer._modules[layer.norm_name] for layer in model.decoder.layers]
    norms.append(model.decoder.final_norm)
    calls = []
    for norm in norms:
        norm.forward = lambda x, norm=norm: calls.append(norm) or type(norm).forward(norm, x)
    ids = torch.arange(8)[None]
    expected = model(ids)
    assert calls == norms[:1]  # the others are of sums

    # What a hook returns is what is normed.
    layer = model.decoder.layers[0]
    layer.register_forward_hook(lambda *given: given[-1].clone())
    assert torch.equal(model(ids), expected) and calls == [*norms[:1], *norms[:2]]
    # A hook of a norm sees its input and its output.
    norms[2].register_forward_hook(lambda _, args, out: calls.append((args[0] + 0 * out).dtype))
    assert torch.equal(model(ids), expected) and calls[-1] == torch.bfloat16
