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
