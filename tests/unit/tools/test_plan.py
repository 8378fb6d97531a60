"""What a model costs, against arithmetic by hand and against a real engine."""

import itertools
from functools import cache
from pathlib import Path

import pytest
from matrix import matrix_rows
from reference import random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.config import STATE_ENCODINGS
from megatron_hybrid.inference.memory.budget import LARGEST_STEP
from megatron_hybrid.tools.plan import parse_count, plan, read_model_config, render
from megatron_hybrid.utils.tables import size

HUB = Path(__file__).parents[2] / "functional" / "huggingface" / "hub_configs"
NEMOTRON_H_8B = read_model_config(HUB / "nemotron_h_8b.json")
"""24 Mamba-2, 4 attention and 24 MLP layers (arXiv 2504.03624)."""


@cache
def planned(gigabytes=80, encoding="exact"):
    """Nemotron-H-8B's plan for contexts of 100,000 tokens."""
    return plan(NEMOTRON_H_8B, gigabytes * 10**9, 100_000, encoding)


def test_nemotron_h_8b():
    result = planned()
    ours = result.model
    assert result.parameters == pytest.approx(8.1e9, rel=0.01)
    assert result.weight_bytes == pytest.approx(2 * result.parameters, rel=1e-4)
    assert ours.kv_bytes_per_token == 4 * 2 * 8 * 128 * 2 == 16 << 10
    channels = 128 * 64 + 2 * 8 * 128
    assert ours.state_bytes == 24 * (128 * 64 * 128 * 4 + channels * 3 * 2)  # 102 MB
    assert ours.window_bytes == 0
    assert ours.checkpoint_bytes == ours.state_bytes + 4096 * 2
    assert ours.break_even_tokens == -(-ours.checkpoint_bytes // (16 << 10))
    left = 80 * 10**9 - result.weight_bytes - sum(result.parts.values())
    assert result.cache_bytes == int(0.9 * left)
    request = 100_000 * (16 << 10) + ours.state_bytes + 4096 * 2
    assert ours.largest_batch == result.cache_bytes // request
    step = 2048 * 131072 * (2 + 4 + 4) + 64 * ours.state_bytes  # logits, captured states
    assert result.parts[LARGEST_STEP] == pytest.approx(step, rel=0.1)
    assert result.pure_attention.kv_bytes_per_token == 28 * 2 * 8 * 128 * 2
    assert result.pure_attention.state_bytes == 0
    assert result.settings["block_size_tokens"] == 64  # 100k / 64 columns
    assert result.settings["max_requests"] == ours.largest_batch // 2


@pytest.mark.parametrize(
    ("pattern", "encoding"),
    matrix_rows(
        itertools.product(["MG*-W-", "W-", "*-", "M-", "G*"], STATE_ENCODINGS),
        *(("MG*-W-", encoding) for encoding in STATE_ENCODINGS),
        *((pattern, "exact") for pattern in ("W-", "*-", "M-")),
    ),
)
def test_the_engine_agrees(pattern, encoding):
    """The recommended settings run, and an engine holds what was planned besides a step."""
    model = tiny_model(pattern)
    result = plan(model.config, 128 << 20, 512, encoding)
    assert abs(result.settings["max_requests"] - min(result.model.largest_batch // 2, 1024)) <= 1
    engine = tiny_engine(model, **{**result.settings, "max_tokens": 2048})
    spec, memory, context = engine.cache.spec, engine.memory, engine.context
    held = memory.pool, memory.slots, context._buffer._device, context._step_tables
    planned = result.settings["cache_bytes"] + engine.config.max_requests * spec.slot_bytes
    planned += sum(result.parts.values()) - result.parts[LARGEST_STEP]
    assert 0 <= planned - sum(tensor.nbytes for tensor in held) < spec.page_bytes
    assert spec.state_bytes == result.model.state_bytes
    if spec.needs_state:
        window = result.model.window_bytes
        assert spec.checkpoint_bytes == result.model.checkpoint_bytes - window
    prompt = random_tokens(300)
    engine.generate([prompt])
    assert engine.generate([prompt])[0].prefix.skipped_tokens == 300
    pages = spec.num_blocks(512) * spec.kv_pages_per_block * spec.page_bytes
    assert pages == pytest.approx(512 * result.model.kv_bytes_per_token, rel=0.1)


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_states_of_drafts_and_graphs_are_counted(cuda_graphs):
    """As a real engine asks for them, and the recommended settings run."""
    plain, drafting = (
        plan(NEMOTRON_H_8B, 80 * 10**9, 8000, num_speculative_tokens=k, cuda_graphs=cuda_graphs)
        for k in (0, 3)
    )
    slot_bytes = plain.model.state_bytes + 4096 * 2
    assert drafting.model.request_bytes == plain.model.request_bytes + 3 * slot_bytes
    assert drafting.model.largest_batch < plain.model.largest_batch
    assert (plain.parts["a slot of no request"] > 0) is cuda_graphs
    if cuda_graphs:  # requests with the states before three drafts each
        graphs = drafting.parts["CUDA graphs"]
        assert graphs > drafting.settings["max_requests"] * 3 * slot_bytes
        assert f"{size(graphs)} for CUDA graphs" in render(drafting)
    assert max(map(len, render(drafting).splitlines())) <= 80
    settings = plan(
        *(tiny_model("M*").config, 1 << 30, 512),
        num_speculative_tokens=3,
        cuda_graphs=cuda_graphs,
    ).settings
    assert settings["num_speculative_tokens"] == 3
    assert settings.get("cuda_graphs", False) is cuda_graphs
    engine = tiny_engine(tiny_model("M*"), **{**settings, "max_requests": 2})
    assert engine.scheduler.draft_planner.drafts.most == 3
    with pytest.raises(ValueError, match="num_speculative_tokens is -1"):
        plan(NEMOTRON_H_8B, 80 * 10**9, 8000, num_speculative_tokens=-1)


def test_windows_are_counted_up_to_the_context():
    config = tiny_model("W-").config
    short, long = (plan(config, 64 << 20, context).model for context in (16, 5000))
    assert short.kv_bytes_per_token == long.kv_bytes_per_token == 0
    assert long.window_bytes == 2 * short.window_bytes  # window 24, blocks of 16
    assert long.break_even_tokens is None
    cache_bytes = plan(config, 64 << 20, 5000).cache_bytes
    engine = tiny_engine(tiny_model("W-"), cache_bytes=cache_bytes)
    assert long.checkpoints == pytest.approx(engine.stats()["pool_states"], abs=1)


@pytest.mark.parametrize(("encoding", "bytes_per_element"), [("bf16", 2), ("int8", 1)])
def test_encoded_states(encoding, bytes_per_element):
    exact, encoded = (planned(encoding=name).model for name in ("exact", encoding))
    elements = 24 * 128 * 64 * 128
    saved = exact.checkpoint_bytes - encoded.checkpoint_bytes
    assert saved == pytest.approx(elements * (4 - bytes_per_element), rel=1e-3)
    assert encoded.state_bytes == exact.state_bytes  # live ones stay as they are
    assert encoded.checkpoints > exact.checkpoints * 4 // bytes_per_element * 0.9


def test_no_room():
    """What a token and a state cost is told all the same."""
    room, none, not_even_weights = (planned(gigabytes) for gigabytes in (80, 17, 10))
    for result in (none, not_even_weights):
        assert result.settings is None and result.model.largest_batch == 0
        assert result.model.kv_bytes_per_token == room.model.kv_bytes_per_token
        assert "16.38 kB" in render(result) and "InferenceConfig" not in render(result)
    assert "no room: the weights take 16.2 GB of 17 GB" in render(none)
    assert not_even_weights.cache_bytes == 0


@pytest.mark.parametrize("gigabytes", [80, 17])
def test_the_table_fits_80_columns_and_its_settings_can_be_pasted(gigabytes):
    result = planned(gigabytes)
    text = render(result)
    assert "KV per token" in text and "16.38 kB" in text and "pure attention" in text
    assert max(map(len, text.splitlines())) <= 80
    if result.settings is not None:
        call = text[text.index("InferenceConfig(") :]
        assert eval(call, {"InferenceConfig": dict}) == result.settings


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("100k", 100_000), ("1.001k", 1001), (" 8K ", 8000)]
)
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "1e5", "ten", "1.2.3k", "4096.5", "0.0001k"])
def test_no_counts(text):
    with pytest.raises(ValueError, match="is no number of tokens"):
        parse_count(text)
