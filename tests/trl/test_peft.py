"""Adapters beside the package peft: each reads what the other one writes."""

import re

import pytest
import torch
from huggingface import build, config_names
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.training.lora import (
    LoraFields,
    adapters_of,
    add_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
)

GATED = ["q_proj", "k_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]
TARGETS = {
    "llama": "all-linear",
    "qwen3": ["q_proj", "v_proj", "down_proj"],
    "qwen3_next": GATED,
    "nemotron_h": ["in_proj", "q_proj", "up_proj"],
}
NOT_OF_TRANSFORMERS = {"phi4flash", "step3", "step3p5"}
"""Whose code the tests write themselves."""
TOKENS = torch.randint(0, 60, (1, 20), generator=torch.Generator().manual_seed(3))


def logits(theirs):
    with torch.no_grad():
        return theirs.eval()(TOKENS).logits


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", TARGETS)
def test_peft_and_we_read_each_other(name, tmp_path):
    base, theirs = tmp_path / "base", build(name)
    theirs.save_pretrained(base)
    wider = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    fields = LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS[name], use_rslora=name == "llama", **wider
    )
    adapted = get_peft_model(theirs, fields)
    torch.manual_seed(0)
    for part, weight in adapted.named_parameters():
        if "lora_B" in part:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path / "peft")
    expected = logits(adapted)

    model, _ = load_pretrained(base, dtype=torch.float32)
    plain = model(TOKENS)
    assert (plain - expected).abs().max() > 1e-2
    load_adapters(model, tmp_path / "peft")
    assert_close(model(TOKENS), expected)
    save_adapters(model, tmp_path / "again")
    merge_adapters(model)
    assert_close(model(TOKENS), expected)

    own = write_own(base, ["all-linear"] if name == "llama" else TARGETS[name])
    for folder, of_folder in (("again", expected), ("own", own)):
        assert_close(read_by_peft(tmp_path / folder), of_folder)


def write_own(base, targets):
    own, _ = load_pretrained(base, dtype=torch.float32)
    add_adapters(own, LoraFields(rank=3, targets=targets))
    for projection in adapters_of(own).values():
        torch.nn.init.normal_(projection.lora.b, std=0.1)
    save_adapters(own, base.parent / "own", base=str(base))
    return own(TOKENS)


def read_by_peft(folder):
    read = AutoModelForCausalLM.from_pretrained(folder.parent / "base", dtype=torch.float32)
    return logits(PeftModel.from_pretrained(read, folder))


@pytest.mark.parametrize("name", sorted({*config_names()} - NOT_OF_TRANSFORMERS))
def test_peft_reads_adapters_of_all_projections_but_those_that_are_named(name, tmp_path, caplog):
    base = tmp_path / "base"
    build(name).save_pretrained(base)
    expected = write_own(base, ["all-linear"])
    if said := re.search(r"lora.targets=\[(.*?)\]", caplog.text):
        with pytest.raises((ValueError, AssertionError)):
            assert_close(read_by_peft(tmp_path / "own"), expected)
        caplog.clear()
        expected = write_own(base, said[1].split(", "))
        assert "peft does not read" not in caplog.text
    assert_close(read_by_peft(tmp_path / "own"), expected)
