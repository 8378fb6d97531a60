"""The model that ships in the package: what it is made of, and that it learned English.

The sample is a chapter of Alice's Adventures in Wonderland (1865, public domain) that the training
script keeps out of the training text. The bounds leave some room above what
docs/guides/demo_training.md measured, so that a retrained model passes; an untrained one is
at log(vocabulary) = 8.03.
"""

import itertools
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import megatron_hybrid as mh

FOLDER = Path(mh.__file__).parent / "demo_model"
DATA = Path(__file__).parent / "data"
SAMPLE = DATA / "alice_chapter_5.txt"

LARGEST_BYTES = 12_000_000
LARGEST_LOSS = 3.3
LARGEST_BITS_PER_BYTE = 1.45


@pytest.fixture(scope="module")
def demo():
    return mh.load_pretrained("demo", dtype=torch.float32)


@pytest.fixture(scope="module")
def sample_ids(demo):
    return torch.tensor(demo[1].tokenize(SAMPLE.read_text()))


@pytest.fixture(scope="module")
def sample_log_probs(demo, sample_ids):
    return log_probs(demo[0], sample_ids)


def log_probs(model, ids):
    """[tokens - 1, vocabulary]: what the model expects behind each token but the last."""
    with torch.no_grad():
        return model(ids[None, :-1])[0].log_softmax(-1)


def losses(log_probs, ids):
    """[tokens - 1]: negative log-likelihood of each token but the first."""
    return -log_probs.gather(1, ids[1:, None])[:, 0]


def test_files_are_small_and_complete():
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(sizes)
    assert sum(sizes.values()) <= LARGEST_BYTES


def test_tokenizer_takes_any_text_and_gives_it_back(demo):
    _, tokenizer = demo
    for text in (SAMPLE.read_text(), "naïve 東京 \t\n <x>", " leading space"):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.tokenize("<|endoftext|>") == [tokenizer.eod]


def test_held_out_loss(sample_log_probs, sample_ids):
    loss = losses(sample_log_probs, sample_ids)
    assert loss.mean() < LARGEST_LOSS
    assert loss.sum() / math.log(2) / len(SAMPLE.read_bytes()) < LARGEST_BITS_PER_BYTE


def test_long_past_is_used_and_does_no_harm(demo, sample_log_probs, sample_ids):
    """Behind the longest sequence of the training (2,048), compared with a past of 512 tokens.

    That the past changes the output is what makes this model fit to test prefix sharing with.
    """
    start, kept = 2048, 512
    with_all = sample_log_probs[start:]
    with_last = log_probs(demo[0], sample_ids[start - kept :])[kept:]
    ids = sample_ids[start:]
    assert losses(with_all, ids).mean() < losses(with_last, ids).mean() + 0.05
    assert (with_all - with_last).abs().max() > 0.5


def test_writes_recognisable_english(demo):
    """Most of what it writes are words of English, and it does not repeat itself."""
    params = mh.SamplingParams(temperature=0.8, top_k=40, num_tokens_to_generate=120)
    engine = mh.DynamicInferenceEngine(*demo, mh.InferenceConfig(cache_bytes=32 << 20))
    (result,) = engine.generate(["Once upon a time there was a little boy who"], params)
    words = re.findall(r"[a-z]+", result.text.lower())
    assert len(words) > 60
    # These hundred words make up about half of English prose (0.56 of the sample).
    frequent_words = set((DATA / "frequent_words.txt").read_text().split())
    frequent = sum(word in frequent_words for word in words)
    assert frequent / len(words) > 0.35, words
    pairs = Counter(itertools.pairwise(words))
    assert pairs.most_common(1)[0][1] < len(words) / 10, words
