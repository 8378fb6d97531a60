"""RoPE equals megatron-core's, for any positions, and its tables outlive inference mode."""

import pytest
import stock_megatron
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding as Stock
from megatron.core.process_groups_config import ProcessGroupCollection
from small_models import small_model

from megatron_hybrid.models.mixers.rotary import RotaryEmbedding


@pytest.mark.parametrize(("head_dim", "percent"), [(16, 1.0), (16, 0.5), (20, 0.3)])
def test_equals_core(monkeypatch, head_dim, percent):
    config = small_model("*", kv_channels=head_dim, rotary_percent=percent).config
    x = torch.randn(3000, 5, head_dim)
    with stock_megatron.on_cpu(monkeypatch):
        stock = Stock(
            head_dim,
            percent,
            rotary_base=700,
            use_cpu_initialization=True,
            cp_group=ProcessGroupCollection.use_mpu_process_groups().cp,
        )
        expected = apply_rotary_pos_emb(x.unsqueeze(1), stock(3000), config).squeeze(1)
    rotary = RotaryEmbedding(config.rotary_dim, 700)
    order = torch.randperm(3000)
    rotated = rotary.rotate(x[order], rotary.cos_sin(order, 3000, x.dtype))
    torch.testing.assert_close(rotated, expected[order], atol=1e-6, rtol=0)


def test_tables_made_in_inference_mode_serve_training():
    rotary = RotaryEmbedding(8, 123.0)
    positions = torch.arange(10)
    with torch.inference_mode():
        rotary.cos_sin(positions, 10, torch.float32)
    x = torch.randn(10, 2, 8, requires_grad=True)
    rotary.rotate(x, rotary.cos_sin(positions, 10, x.dtype)).sum().backward()
    assert x.grad is not None


def test_what_is_not_rotated_passes_through():
    x = torch.randn(4, 2, 12)
    rotary = RotaryEmbedding(8, 100.0)
    rotated = rotary.rotate(x, rotary.cos_sin(torch.arange(4), 4, x.dtype))
    assert torch.equal(rotated[..., 8:], x[..., 8:])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(rotated[0], x[0])
