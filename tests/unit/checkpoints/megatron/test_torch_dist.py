"""torch_dist folders, against megatron-core's own writer, reader and models."""

import stock_megatron
import torch
from megatron_folders import PATTERN_ARGUMENT, load_folder, megatron_args, save_folder

from megatron_hybrid.checkpoints.megatron.torch_dist import load_megatron, save_megatron
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model

CONFIG = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_query_groups": 2,
    "vocab_size": 61,
    "ffn_hidden_size": 80,
    "mamba_head_dim": 16,
    "mamba_state_dim": 12,
    "mamba_num_groups": 2,
    "init_method_std": 0.15,
}


def scramble(model):
    """Random values for the parameters that start as ones or zeros, which hide mistakes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "A_log" not in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(40)[None] % 61, position_ids=None, attention_mask=None)


def test_folder_of_a_stock_model(monkeypatch, tmp_path):
    config = HybridConfig(layer_pattern="M*-M", qk_layernorm=True, **CONFIG)
    build_hybrid_model(config)
    with stock_megatron.on_cpu(monkeypatch):
        stock = stock_megatron.mamba_model(config).eval()
        scramble(stock)
        expected = logits_of(stock)
        args = megatron_args(num_layers=4, qk_layernorm=True, **{PATTERN_ARGUMENT: "M*-M"})
        save_folder(stock, tmp_path, args)
        model = load_megatron(tmp_path)
        torch.testing.assert_close(logits_of(model), expected, atol=2e-5, rtol=1e-5)
        save_megatron(model, tmp_path / "back")
        again = stock_megatron.mamba_model(config).eval()
        load_folder(again, tmp_path / "back" / "release")
    for name, value in stock.state_dict().items():
        assert value is None or torch.equal(value, again.state_dict()[name]), name
