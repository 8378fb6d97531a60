"""Model geometries against figures worked out by hand from the published configurations."""

from dataclasses import replace
from math import inf

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    JambaConfig,
    LlamaConfig,
    NemotronHConfig,
    Qwen3_5TextConfig,
)

from benchmarks.replay.geometry import GEOMETRIES
from megatron_hybrid.checkpoints.folder import config_of
from megatron_hybrid.inference.config import STATE_ENCODINGS
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.tools.plan import spec_of

KIB = 1024


@pytest.mark.parametrize(
    ("name", "kv_per_token", "state"),
    [
        # 4 layers x 2 x 8 heads x 128 x 2 bytes; 24 x (3 x 10240 x 2 + 128 x 64 x 128 x 4)
        ("nemotron-h-8b", 16 * KIB, 102_137_856),
        # 8 x 2 x 4 x 256 x 2; 24 x (3 x 8192 x 2 + 32 x 128 x 128 x 4)
        ("qwen3.5-4b", 32 * KIB, 51_511_296),
        # 4 x 2 x 8 x 128 x 2; 28 x (3 x 8192 x 2 + 8192 x 16 x 4)
        ("jamba-1.5-mini", 16 * KIB, 16_056_320),
        # 10 x 2 x 16 x 128 x 2; 52 layers of 1024 tokens at 8 KiB
        ("gemma-3-27b", 80 * KIB, 436_207_616),
        # 32 x 2 x 8 x 128 x 2
        ("llama-3-8b", 128 * KIB, 0),
    ],
)
def test_bytes(name, kv_per_token, state):
    geometry = GEOMETRIES[name]
    assert geometry.kv_bytes_per_token == kv_per_token
    assert geometry.state_bytes() == state
    spec = geometry.spec()
    assert spec.block_size_tokens == 16
    assert spec.needs_state == (state > 0)
    per_block = spec.kv_pages_per_block * spec.page_bytes
    assert 16 * kv_per_token <= per_block <= 1.15 * 16 * kv_per_token


PUBLISHED = {
    "nemotron-h-8b": NemotronHConfig(
        hidden_size=4096,
        intermediate_size=21504,
        layers_block_type=[
            {"M": "mamba", "-": "mlp", "*": "attention"}[layer]
            for layer in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
        ],
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
    ),
    "qwen3.5-4b": Qwen3_5TextConfig(
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
    "jamba-1.5-mini": JambaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_experts=16,
        mamba_d_state=16,
    ),
    "gemma-3-27b": Gemma3TextConfig(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        sliding_window=1024,
    ),
    "llama-3-8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_cache_is_told_what_the_engine_tells_it_of_the_published_model(name):
    architecture = (
        type(PUBLISHED[name]).__name__.replace("Text", "").replace("Config", "ForCausalLM")
    )
    hf = {**PUBLISHED[name].to_dict(), "architectures": [architecture], "dtype": "bfloat16"}
    with torch.device("meta"):
        model = build_hybrid_model(config_of(hf, name, perform_initialization=False))
    for encoding in STATE_ENCODINGS:
        by_tokens = replace(spec_of(model, 16, encoding), attention_parity=inf)
        assert GEOMETRIES[name].spec(encoding) == by_tokens


def test_encodings_of_the_nemotron_state():
    geometry = GEOMETRIES["nemotron-h-8b"]
    exact, half, quarter = (geometry.recurrent_bytes(e) for e in ("exact", "bf16", "int8"))
    conv = 24 * 3 * 10240 * 2
    assert (round(exact / 1e6, 1), round(half / 1e6, 1)) == (102.1, 51.8)
    assert 4 * (quarter - conv) == 2 * (half - conv) == exact - conv
    assert geometry.spec("int8").checkpoint_bytes == quarter + 2 * 4096


def test_windows_are_the_state_of_gemma():
    spec = GEOMETRIES["gemma-3-27b"].spec("int8")
    full, local = spec.groups
    assert (full.num_layers, local.num_layers, local.window) == (10, 52, 1024)
    assert spec.state_bytes == 0 and spec.needs_state


def test_prefill_flops_grow_with_the_square_only_where_something_attends_to_everything():
    attending, gemma = GEOMETRIES["llama-3-8b"], GEOMETRIES["gemma-3-27b"]
    for geometry in (attending, gemma):
        once, twice = (geometry.prefill_flops(n) for n in (100_000, 200_000))
        assert twice > 2.1 * once
    # By hand for 1,000 tokens of Llama: 32 layers of 8 n D^2 + 4 n^2 D + 16 n D^2
    expected = 32 * (24 * 1000 * 4096**2 + 4 * 1000**2 * 4096)
    assert attending.prefill_flops(1000) == expected


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_the_kind_of_states_is_known_where_there_are_any(geometry):
    assert (geometry.state_kind in ("mamba-1", "mamba-2", "gdn")) == (geometry.state_layers > 0)
