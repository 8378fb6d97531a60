"""examples/extension: what a package of its own adds, found by the metadata that it is built to."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from reference import full_logits, greedy, is_greedy, random_tokens, tiny_engine, tiny_model
from setuptools import build_meta
from transformers import ArceeConfig, ArceeForCausalLM

import megatron_hybrid as mh
from megatron_hybrid.models.layer_pattern import LayerPattern
from megatron_hybrid.ops import RaggedLayout

FOLDER = Path(__file__).parents[3] / "examples" / "extension"


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """The folder of what an installation writes next to the package."""
    built = tmp_path_factory.mktemp("built")
    source = shutil.copytree(FOLDER, built / "source")
    there = os.getcwd()
    os.chdir(source)
    try:
        build_meta.prepare_metadata_for_build_wheel(str(built))
    finally:
        os.chdir(there)
    return built


@pytest.fixture
def installed(metadata, monkeypatch):
    monkeypatch.syspath_prepend(metadata)


def test_without_the_package_nothing_of_it_is_known():
    with pytest.raises(ValueError, match="unknown symbol 'Y' at place 2"):
        LayerPattern.parse("*Y")
    for name in ("cache_policy", "speculation"):
        with pytest.raises(ValueError, match=f"{name} is 'own'; use one of .*'megatron_hybrid"):
            mh.InferenceConfig(**{name: "own"})


def test_a_moving_average_is_the_weighted_sum_that_it_stands_for():
    from hybrid_extras.moving_average import moving_average  # not before: it registers an op

    torch.manual_seed(0)
    x_TC, decay_C = torch.randn(9, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    y_TC = moving_average(x_TC, decay_C, None, RaggedLayout((9,), (0,)))
    age_TT = torch.arange(9)[:, None] - torch.arange(9)
    weights_TTC = torch.where(age_TT[..., None] >= 0, decay_C ** age_TT[..., None], 0)
    torch.testing.assert_close(y_TC, torch.einsum("tsc,sc->tc", weights_TTC * (1 - decay_C), x_TC))


def test_a_layer_kind_shares_prefixes_is_saved_and_trained(installed, tmp_path):
    model = tiny_model.__wrapped__("X*-X", layer_options={"decay": 0.8})
    base = random_tokens(60)
    with tiny_engine(model) as engine:
        prompts = [base, [*base[:40], *random_tokens(9, 1)], [*base, 5, 6]]
        results = [engine.generate([prompt], greedy(6))[0] for prompt in prompts]
    assert [result.prefix.skipped_tokens for result in results] == [0, 32, 60]
    for prompt, result in zip(prompts, results):
        assert is_greedy(model, prompt, result.token_ids)
    mh.save_checkpoint(model, tmp_path)
    again, _ = mh.load_pretrained(tmp_path)
    assert torch.equal(full_logits(again, base), full_logits(model, base))
    assert again.config.layer_options == {"decay": 0.8}
    model(torch.tensor([base]), labels=torch.tensor([base])).mean().backward()
    assert model.decoder.layers[0].mixer.decay_logit.grad.abs().min() > 0
    with pytest.raises(ValueError, match="decay=2; use a number between 0 and 1"):
        tiny_model.__wrapped__("X*-", layer_options={"decay": 2})


def test_an_architecture_is_loaded_and_written_back(installed, tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    torch.manual_seed(0)
    theirs = ArceeForCausalLM(ArceeConfig(**sizes, **heads, initializer_range=0.3)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = mh.load_pretrained(tmp_path / "theirs")
    tokens = torch.tensor([random_tokens(30, vocab_size=61)])
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-4)
    mh.save_huggingface(ours, tmp_path / "back")
    back = ArceeForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, expected)


def test_a_policy_evicts_what_was_used_longest_ago(installed):
    prompts = [random_tokens(64, seed) for seed in range(3)]
    sizes, skipped = {"cache_bytes": 110_000, "max_sequence_length": 80}, []  # for two of them
    with tiny_engine(tiny_model("M*-"), cache_policy="lru", **sizes) as engine:
        for number in (0, 1, 0, 2, 0, 1):
            result = engine.generate([prompts[number]], greedy(2))[0]
            skipped.append(result.prefix.skipped_tokens)
            engine.cache.check_integrity()
    assert skipped == [0, 0, 64, 0, 64, 0]


def test_a_drafter_saves_steps_and_changes_no_token(installed):
    prompt = [3, 4, 5, 6] * 8
    params = greedy(24, ignore_termination=True)
    with tiny_engine() as plain, tiny_engine(speculation="bigram") as drafted:
        expected, given = (each.generate([prompt], params)[0] for each in (plain, drafted))
        assert given.token_ids == expected.token_ids
        assert drafted.stats()["draft_tokens"] > 0
