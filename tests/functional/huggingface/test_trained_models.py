"""Models that were trained here, in transformers: by the weights of a folder, or from scratch."""

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


@torch.no_grad()
def logits(model):
    return model(tokens_for(model)).float()


def largest(difference):
    return difference.abs().max()


def tokens_for(model):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.vocab_size, (2, 60), generator=generator)


def logits_in_transformers(model, folder):
    mh.save_huggingface(model, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert theirs.dtype == model.config.params_dtype
    return Reference(theirs.eval()).logits(tokens_for(model)).float()


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
    ours, theirs = logits(model), Reference(theirs.eval()).logits(tokens_for(model))
    assert largest(ours - theirs) < 2e-5 * ours.std()


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h", "olmo_hybrid"])
def test_trained_in_bfloat16(name, tmp_path):
    """What stays in fp32 here is written as it was trained; transformers rounds it."""
    build(name).save_pretrained(tmp_path / "before")
    model, _ = mh.load_pretrained(tmp_path / "before", dtype=torch.bfloat16)
    train(model)
    ours, theirs = logits(model), logits_in_transformers(model, tmp_path / "after")
    again, _ = mh.load_pretrained(tmp_path / "after")
    assert torch.equal(logits(again), ours)
    assert (ours - theirs).abs().median() < 0.02 * ours.std()
