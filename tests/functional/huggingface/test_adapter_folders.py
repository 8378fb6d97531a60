"""Adapters in PEFT's folders do what their definition adds to transformers' own weights."""

import json
import re

import pytest
import torch
from huggingface import build, config_rows
from safetensors.torch import load_file, save_file
from torch import nn

from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.training.lora import load_adapters, merge_adapters, save_adapters

RANK, ALPHA, WIDER = 3, 5.0, ("q_proj", "up_proj", "out_proj")
"""Modules of WIDER have rank and alpha of their own."""
ELSEWHERE = (
    *("lm_head", ".experts.", "router", ".gate.", "kv_b_proj", "shared_expert_gate"),
    "shared_transf",
)
"""Modules that have no adapters here."""


def linear_modules(theirs):
    return {
        name: module
        for name, module in theirs.named_modules()
        if isinstance(module, nn.Linear) and not any(part in f"{name}." for part in ELSEWHERE)
    }


def write_by_hand(folder, modules):
    """An adapter of each module, as PEFT names it. Returns what each adds to its weight."""
    generator = torch.Generator().manual_seed(7)
    tensors, added = {}, {}
    for name, module in modules.items():
        is_wider = name.rpartition(".")[2] in WIDER
        rank, alpha = (RANK + 2, 2.0) if is_wider else (RANK, ALPHA)
        out, width = module.weight.shape
        a = torch.randn(rank, width, generator=generator) / width**0.5
        b = torch.randn(out, rank, generator=generator) * 0.1
        for which, value in (("A", a), ("B", b)):
            tensors[f"base_model.model.{name}.lora_{which}.weight"] = value
        added[name] = b @ a * (alpha / rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    config["rank_pattern"] = dict.fromkeys(WIDER, RANK + 2)
    config["alpha_pattern"] = dict.fromkeys(WIDER, 2)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.mark.parametrize("name", config_rows())
def test_they_add_what_they_say(name, tmp_path):
    theirs = build(name)
    theirs.save_pretrained(tmp_path / "base")
    modules = linear_modules(theirs)
    added = write_by_hand(tmp_path / "adapters", modules)
    model, _ = load_pretrained(tmp_path / "base", dtype=torch.float32)
    tokens = torch.randint(0, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    base = model(tokens)
    load_adapters(model, tmp_path / "adapters")
    with torch.no_grad():
        for name, module in modules.items():
            module.weight += added[name]
        expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), expected, atol=2e-4, rtol=1e-4)
    assert (expected - base).abs().max() > 1e-3

    save_adapters(model, tmp_path / "again")
    before = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    after = load_file(tmp_path / "again" / "adapter_model.safetensors")
    fields = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert before.keys() == after.keys()
    for name in modules:
        halves = [f"base_model.model.{name}.lora_{which}.weight" for which in "AB"]
        rank = fields["rank_pattern"].get(name, fields["r"])
        scale = fields["alpha_pattern"].get(name, fields["lora_alpha"]) / rank
        a, b = (after[half] for half in halves)
        assert torch.equal(a, before[halves[0]])
        torch.testing.assert_close(b @ a * scale, added[name], atol=1e-6, rtol=1e-5)
    merge_adapters(model)
    torch.testing.assert_close(model(tokens), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3n", "nemotron_h"])
def test_what_peft_does_not_read_is_named(name, tmp_path, caplog):
    """`tests/trl/test_peft.py` has all models, and peft."""
    build(name).save_pretrained(tmp_path / "base")
    write_by_hand(tmp_path / "adapters", linear_modules(build(name)))
    model, _ = load_pretrained(tmp_path / "base", dtype=torch.float32)
    load_adapters(model, tmp_path / "adapters")
    save_adapters(model, tmp_path / "again")
    said = r"read the adapters of out_proj in a nemotron_h. It reads .*=\[down_proj, in_proj, k_"
    assert caplog.text == "" if name == "gemma3n" else re.search(said, caplog.text)
    fields = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert all(re.search("[a-z]", target) for target in fields["target_modules"])  # no "layers.0"
