"""A model that was trained here from scratch, in transformers."""

import pytest
import torch
from huggingface import Reference, build
from transformers import AutoModelForCausalLM

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.checkpoint import read_config
from megatron_hybrid.tools.convert import convert

STEPS = 3


def train(model):
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = torch.randint(3, model.vocab_size, (2, 41), generator=generator)
        optimizer.zero_grad()
        model(rows[:, :-1], labels=rows[:, 1:].contiguous()).mean().backward()
        optimizer.step()
    model.eval()


@pytest.mark.parametrize("name", ["nemotron_h", "jamba"])
def test_trained_from_fields_alone(name, tmp_path):
    """As by a recipe; its checkpoint is converted by a config.json that says the same."""
    build(name).config.save_pretrained(tmp_path)
    fields = read_config(tmp_path).to_dict() | {"huggingface_config": None}
    model = mh.build_hybrid_model(mh.HybridConfig.from_dict(fields))
    train(model)
    mh.save_checkpoint(model, tmp_path / "ours")
    with pytest.raises(mh.CheckpointError, match="has no huggingface_config"):
        convert(tmp_path / "ours", tmp_path / "none", "huggingface")
    convert(tmp_path / "ours", tmp_path / "hf", "huggingface", huggingface_config=tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    tokens = torch.randint(3, model.vocab_size, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model(tokens), Reference(theirs.eval()).logits(tokens)
    assert (ours - theirs).abs().max() < 2e-5 * ours.std()
