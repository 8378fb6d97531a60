"""Every adapter's tiny model end to end on a CUDA device, against the CPU; `pytest -m gpu`."""

import numpy as np
import pytest
import torch
from backends_alone import let_backends_serve_alone
from huggingface import build, config_names, read_values
from reference import full_logits, greedy, tiny_engine

import megatron_hybrid as mh

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LONG = 110
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Typical largest error of a token's logits, in standard deviations of all logits; bf16
gives 0.12 at most on a CPU, but for single tokens that are sent to other experts."""


@pytest.fixture(scope="module", params=config_names())
def folder(request, tmp_path_factory):
    """Widths of experts are rounded up, as their kernel takes rows of multiples of 16 bytes."""
    values = read_values(request.param)
    widths = {
        field: -(-values[field] // 8) * 8
        for field in ("intermediate_size", "moe_intermediate_size")
        if field in values
    }
    path = tmp_path_factory.mktemp(request.param)
    build(request.param, **widths).save_pretrained(path)
    return str(path)


def load(folder, device, dtype=torch.float32):
    return mh.load_pretrained(folder, device=device, dtype=dtype)[0]


def tokens_of(model, length, seed=0):
    return np.random.default_rng(seed).integers(3, model.vocab_size, length).tolist()


def engine_of(model, **fields):
    return tiny_engine(model, **{"cache_bytes": 16 << 20, "max_tokens": 48, **fields})


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_logits_are_near_those_of_the_cpu(folder, dtype):
    expected = full_logits(model := load(folder, "cpu"), tokens := tokens_of(model, LONG))
    found = full_logits(load(folder, DEVICE, dtype), tokens).float()
    errors = (found - expected).abs().amax(-1) / expected.std()
    assert errors.median() <= BOUNDS[dtype]
    if dtype == torch.float32:
        assert errors.max() <= 30 * BOUNDS[dtype]


def test_the_same_tokens_with_a_cache_without_and_on_the_cpu(folder):
    """Prompts that go on from declared positions, a fork, a whole prompt and another turn."""
    model = load(folder, DEVICE)
    base = tokens_of(model, LONG)
    prompts = [base, base, base[:41] + tokens_of(model, 20, 1), base[:67] + tokens_of(model, 9, 2)]
    params = greedy(16, return_log_probs=True, skip_prompt_log_probs=True)
    engines = {
        "restore": engine_of(model),
        "memory_only": engine_of(model, prefix_caching="memory_only"),
        "off": engine_of(model, prefix_caching="off"),
        "cpu": engine_of(load(folder, "cpu"), prefix_caching="off"),
    }
    results = {name: [] for name in engines}
    for name, engine in engines.items():
        for prompt in prompts:
            results[name] += engine.generate(
                [prompt], params, mh.RequestOptions(cache_breakpoints=[41])
            )
            engine.check_integrity()
        turn = base + results["restore"][0].token_ids + tokens_of(model, 5, 3)
        results[name] += engine.generate([turn], params)
        engine.close()
    skipped = [result.prefix.skipped_tokens for result in results["restore"]]
    assert skipped == [0, LONG, 41, skipped[3], LONG + 16]
    assert 41 <= skipped[3] <= 67  # or the nearest interval
    tokens = {name: [each.token_ids for each in found] for name, found in results.items()}
    assert tokens["restore"] == tokens["memory_only"] == tokens["off"] == tokens["cpu"]
    for cached, plain in zip(results["restore"], results["off"]):
        np.testing.assert_allclose(cached.log_probs, plain.log_probs, atol=1e-3)


def test_bf16_answers_are_restored(folder, monkeypatch):
    """By backends alone; a forward over prompt and answer gives near log-probabilities."""
    let_backends_serve_alone(monkeypatch)
    model = load(folder, DEVICE, torch.bfloat16)
    engine = engine_of(model)
    base = tokens_of(model, LONG)
    params = greedy(16, return_log_probs=True, skip_prompt_log_probs=True)
    engine.generate([base], params, mh.RequestOptions(cache_breakpoints=[41]))
    errors = []
    for prompt, skipped in ((base, LONG), (base[:41] + tokens_of(model, 20, 1), 41)):
        (result,) = engine.generate([prompt], params)
        assert result.prefix.skipped_tokens == skipped
        rows = full_logits(model, prompt + result.token_ids).float()[len(prompt) - 1 : -1]
        chosen = torch.tensor(result.token_ids)[:, None]
        expected = rows.log_softmax(-1).gather(1, chosen)[:, 0]
        errors.append((torch.tensor(result.log_probs) - expected).abs())
    assert torch.cat(errors).median() <= 0.02
    engine.check_integrity()
