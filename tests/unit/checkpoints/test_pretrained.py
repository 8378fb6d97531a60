"""load_pretrained: a folder becomes a model and its tokenizer."""

import random

import numpy as np
import pytest
import tokenizers
import torch
from byte_tokenizer import byte_tokenizer
from small_models import small_model

from megatron_hybrid import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_hybrid.checkpoints.checkpoint import CheckpointError, save_checkpoint
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.tools.plan import read_model_config


@pytest.fixture
def folder(tmp_path):
    save_checkpoint(small_model(vocab_size=261), tmp_path)
    byte_tokenizer(261).save(tmp_path)
    return tmp_path


def test_loading_leaves_all_global_generators_as_they_were(tmp_path):
    save_checkpoint(small_model("MSCGKA*HZQU"), tmp_path)
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    load_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


@pytest.mark.parametrize("name", ["nowhere", "model.safetensors"])
def test_no_folder(folder, name):
    with pytest.raises(CheckpointError, match=r"is not a folder\. Give the folder of a checkpoint"):
        load_pretrained(folder / name)


@pytest.mark.parametrize(("name", "is_hub_id"), [("org/some-model.v2", True), ("/a/b/c", False)])
def test_a_hub_id_is_told_from_a_folder(name, is_hub_id):
    advice = f"`hf download {name} --local-dir FOLDER`"
    for call in (load_pretrained, read_model_config):
        with pytest.raises(CheckpointError) as error:
            call(name)
        assert (advice in str(error.value)) == is_hub_id


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device is 'cuda', and torch .* is a build for CPUs: use another device, or "),
        ("cuda:99", "device is 'cuda:99', and torch "),
        ("gpu", "device is 'gpu'; use 'cpu', 'cuda' or 'cuda:1'"),
        ("mps", "device is 'mps'; use 'cpu', 'cuda' or 'cuda:1'"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_read(
    device, message, monkeypatch
):
    with pytest.raises(ValueError, match="dtype is 'half'; use 'float32', 'bfloat16' or 'float16"):
        load_pretrained("nowhere", dtype="half")
    assert load_pretrained("demo", dtype="float16")[0].config.params_dtype == torch.float16
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ValueError, match=message):
        load_pretrained("nowhere", device=device)


def test_tokenizer_of_another_model(folder):
    byte_tokenizer(300).save(folder)
    with pytest.raises(CheckpointError, match="has 299 tokens, but the model's vocab_size is 261"):
        load_pretrained(folder)


def test_added_tokens_beyond_the_vocabulary(folder):
    """As Gemma 3's tokenizer has one for images, which the models of text alone lack."""
    path = folder / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens(["<image>"])
    inner.save(str(path))
    model, tokenizer = load_pretrained(folder)
    assert not model.training
    assert tokenizer.tokenize("a<image>")[1] == tokenizer.vocab_size - 1 == model.vocab_size
    engine = DynamicInferenceEngine(model, tokenizer, InferenceConfig())
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        engine.generate(["a<image>"])
    [result] = engine.generate(["a"], SamplingParams(num_tokens_to_generate=3))
    assert result.token_ids


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
)
def test_a_link_to_nowhere_and_a_pointer_of_git_lfs_are_named(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    path.symlink_to("../blobs/0123")
    with pytest.raises(CheckpointError, match=rf"{name} .*a link to ../blobs/0123, where nothing"):
        load_pretrained(folder)
    path.unlink()
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n")
    with pytest.raises(CheckpointError, match=rf"{name} .*pointer of Git LFS: run `git lfs pull`"):
        load_pretrained(folder)
