"""Model geometries against figures worked out by hand from the published configurations."""

from dataclasses import replace
from math import inf

import pytest
import torch

from benchmarks.gpu.models import CONFIGS
from benchmarks.replay.geometry import GEOMETRIES
from megatron_hybrid.inference.config import STATE_ENCODINGS
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.tools.plan import read_model_config, spec_of

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


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_cache_is_told_what_the_engine_tells_it_of_the_published_model(name):
    file = name.replace("llama-3-", "llama-3.1-").replace("-", "_").replace(".", "_")
    config = read_model_config(CONFIGS / f"{file}.json")
    with torch.device("meta"):
        model = build_hybrid_model(config)
    for encoding in STATE_ENCODINGS:
        by_tokens = replace(spec_of(model, 16, encoding), attention_parity=inf)
        assert GEOMETRIES[name].spec(encoding) == by_tokens


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
