"""Attention's options against the eager attention of the transformers models that brought them."""

from types import SimpleNamespace

import pytest
import torch
from recurrences import assert_near
from transformers import DynamicCache, Llama4TextConfig
from transformers.masking_utils import create_chunked_causal_mask
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from megatron_hybrid.ops import AttentionPattern, RaggedLayout, paged_attention, varlen_attention

H, K, D, BLOCK = 4, 2, 16, 16
MODULE = SimpleNamespace(num_key_value_groups=H // K, training=False)
START, LENGTH = 37, 50


def case():
    torch.manual_seed(0)
    total = START + LENGTH
    return torch.randn(total, H, D), torch.randn(total, K, D), torch.randn(total, K, D)


def causal_mask():
    total = START + LENGTH
    return torch.full((total, total), -torch.inf).triu(1)[None, None]


def eager(forward, q, k, v, mask, scale, **options):
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    o, _ = forward(MODULE, q, k, v, mask, scaling=scale, **options)
    return o[0]


def check(q, k, v, expected, pattern, sinks=None):
    """The whole by varlen attention; a later part, a step and a prefill, out of pages."""
    total = len(q)
    assert_near(varlen_attention(q, k, v, RaggedLayout((total,), (0,)), pattern, sinks), expected)
    blocks = -(-total // BLOCK)
    pages = torch.zeros(2, blocks * BLOCK, K, D)
    pages[0, :total], pages[1, :total] = k, v
    table = torch.arange(blocks).expand(2, -1)
    layout = RaggedLayout((1, LENGTH), (total - 1, START))
    rows = torch.tensor([total - 1, *range(START, total)])
    o = paged_attention(q[rows], *pages.unflatten(1, (-1, BLOCK)), table, layout, pattern, sinks)
    assert_near(o, expected[rows])


def test_sinks_of_gpt_oss():
    q, k, v = case()
    sinks = torch.randn(H)
    MODULE.sinks = sinks
    expected = eager(modeling_gpt_oss.eager_attention_forward, q, k, v, causal_mask(), 0.2)
    check(q, k, v, expected, AttentionPattern(0.2), sinks)


def test_softcap_of_gemma2():
    q, k, v = case()
    forward = modeling_gemma2.eager_attention_forward
    expected = eager(forward, q, k, v, causal_mask(), 0.5, softcap=1.5)
    check(q, k, v, expected, AttentionPattern(0.5, softcap=1.5))


@pytest.mark.parametrize("chunk", [1, 20, 32])
def test_chunks_of_llama4(chunk):
    q, k, v = case()
    config = Llama4TextConfig(attention_chunk_size=chunk, num_hidden_layers=1)
    config._attn_implementation = "eager"
    cache = DynamicCache()
    mask = create_chunked_causal_mask(config, torch.zeros(1, len(q), 8), None, cache)
    expected = eager(modeling_gemma2.eager_attention_forward, q, k, v, mask, 0.3)
    check(q, k, v, expected, AttentionPattern(0.3, chunk=chunk))
