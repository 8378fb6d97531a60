"""Every adapter against transformers: same weights, same tokens (logits: `test_precision.py`).

Each file of `configs/` is a tiny model. transformers builds it with random weights and saves it;
what is compared is always its full forward pass, the one path of it that is right for all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface import Reference, build, config_names, kept_names, read_values
from matrix import matrix_rows
from models_table import TABLE, Row, merge_rows, read_rows
from reference import greedy, tiny_engine
from safetensors.torch import load_file

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.huggingface import ADAPTERS
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.distributed.ranks import ONE_RANK
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.weights.updates import WeightUpdate, what_is_given

LONG = 110
FILE = "model.safetensors"
CACHES = (
    "llama",
    "gemma3",  # windows
    "gpt_oss",  # sinks
    "deepseek_v3",  # latent attention
    "mamba2",
    "falcon_mamba",
    "nemotron_h",
    "zamba2",  # shared blocks
    "qwen3_next",
    "kimi_linear",
    "lfm2",
)
"""One model of each kind of cache."""


def kept(names: Iterable[str]) -> pytest.MarkDecorator:
    """The models of a test, of which `make test` tries these."""
    return pytest.mark.parametrize("pair", matrix_rows(config_names(), *names), indirect=True)


@dataclass
class Pair:
    """One model on both sides."""

    name: str
    folder: str
    reference: Reference
    model: mh.HybridModel
    random: np.random.Generator

    def tokens(self, length: int) -> list[int]:
        return self.random.integers(3, self.model.vocab_size, length).tolist()

    def engine(self, **fields):
        return tiny_engine(self.model, **{"cache_bytes": 16 << 20, "max_tokens": 48, **fields})

    def ask(self, engine, prompt: list[int], count: int = 16, **options):
        """Answers a prompt greedily, checks each token, returns the prefix report."""
        result = engine.generate([prompt], greedy(count), RequestOptions(**options))[0]
        assert len(result.token_ids) == count
        assert self.reference.is_greedy(prompt, result.token_ids)
        engine.check_integrity()
        return result.prefix


@pytest.fixture(scope="module", params=config_names())
def pair(request, tmp_path_factory) -> Pair:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    theirs = build(name)
    theirs.save_pretrained(folder)
    model, tokenizer = mh.load_pretrained(folder)
    assert tokenizer is None
    return Pair(name, str(folder), Reference(theirs), model, np.random.default_rng(0))


@kept(kept_names())
def test_its_row_in_the_docs(pair):
    row = next(row for row in read_rows(TABLE) if row.name == pair.name)
    assert Row.of(pair.name, pair.model, (row.largest_error, row.error_of_transformers)) == row


@kept(CACHES)
def test_restore_at_random_positions(pair):
    engine = pair.engine()
    prompt = pair.tokens(LONG)
    positions = sorted(pair.random.choice(np.arange(2, LONG), 4, replace=False).tolist())
    pair.ask(engine, prompt, 1, cache_breakpoints=positions)
    for position in positions:
        report = pair.ask(engine, prompt[:position] + pair.tokens(20))
        assert report.skipped_tokens == position
    assert pair.ask(engine, prompt).skipped_tokens == LONG


@kept(kept_names())
def test_new_weights_come_under_its_names_in_any_order(pair):
    tensors = load_file(Path(pair.folder) / FILE)
    other = mh.build_hybrid_model(replace(pair.model.config))
    names = pair.random.permutation(sorted(tensors)).tolist()
    pairs = ((name, tensors[name]) for name in names)
    WeightUpdate(other, ONE_RANK).take(what_is_given(pairs, False, ONE_RANK))
    expected = own_tensors(pair.model)
    for name, tensor in own_tensors(other).items():
        assert torch.equal(tensor, expected[name]), name


def test_every_adapter_is_tried():
    tried = {read_values(name)["model_type"] for name in config_names()}
    assert {adapter.model_types[0] for adapter in ADAPTERS.values()} <= tried


def test_a_run_of_some_models_keeps_the_rows_of_the_others(tmp_path):
    page = tmp_path / "models.md"
    page.write_text(TABLE.read_text())
    before, names = read_rows(page), config_names()
    new = replace(before[3], largest_error="1.0e+00")
    merge_rows(page, [new], [name for name in names if name != names[1]])
    assert read_rows(page) == [before[0], before[2], new, *before[4:]]


def test_the_table_in_the_docs_is_of_these_models():
    assert [row.name for row in read_rows(TABLE)] == config_names()
