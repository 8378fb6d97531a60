"""CheckpointFolder: what one load reads of a folder, and the config that it gives."""

import builtins
import io
import shutil
from collections import Counter
from pathlib import Path

import pytest
from small_models import small_model
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_hybrid.checkpoints import tensor_files
from megatron_hybrid.checkpoints.checkpoint import save_checkpoint
from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER, load_pretrained
from megatron_hybrid.checkpoints.tensor_files import CheckpointError


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"]
)
def test_a_link_to_nowhere_and_a_pointer_of_git_lfs_are_named(tmp_path, name):
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../blobs/0123")
    with pytest.raises(CheckpointError, match=rf"{name} .*a link to ../blobs/0123, where nothing"):
        load_pretrained(folder)
    (folder / name).unlink()
    (folder / name).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 9\n"
    )
    with pytest.raises(CheckpointError, match=rf"{name} .*pointer of Git LFS: run `git lfs pull`"):
        load_pretrained(folder)


@pytest.mark.parametrize("whose", ["ours", "huggingface"])
def test_a_load_opens_config_and_headers_once(tmp_path, monkeypatch, whose):
    if whose == "ours":
        save_checkpoint(small_model("M-", vocab_size=3072), tmp_path)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 3072}
        config = LlamaConfig(num_hidden_layers=1, num_attention_heads=4, **sizes)
        LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(DEMO_FOLDER / "tokenizer.json", tmp_path)
    opened = Counter()

    def counted(original):
        def call(file, *arguments, **options):
            opened[Path(str(file)).name] += 1
            return original(file, *arguments, **options)

        return call

    for module, name in ((builtins, "open"), (io, "open"), (tensor_files, "safe_open")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    load_pretrained(tmp_path)
    weights = [path.name for path in tmp_path.glob("*.safetensors")]
    assert len(weights) == 1 if whose == "ours" else len(weights) > 1
    assert [opened[name] for name in ("config.json", *weights)] == [1] * (1 + len(weights))
