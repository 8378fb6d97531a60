"""What differs too little to show in the logits of random weights, against transformers."""

import json
import math

import pytest
import torch
from huggingface import Reference, build, in_float64, twin_in_float64
from model_folders import rewrite
from transformers import AutoModelForCausalLM

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.checkpoint import CheckpointError, save_huggingface
from megatron_hybrid.checkpoints.folder import config_of


def test_epsilon_of_lfm2s_router(tmp_path):
    """It shows where the chosen experts have scores of its own size."""
    theirs = build("lfm2_moe")
    with torch.no_grad():
        for name, tensor in theirs.state_dict(keep_vars=True).items():
            if name.endswith("feed_forward.gate.weight"):
                tensor.copy_(3.0 * torch.randn(1, tensor.shape[1]).expand_as(tensor))
    theirs.save_pretrained(tmp_path)
    model, _ = mh.load_pretrained(tmp_path)
    tokens = torch.randint(3, 100, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
        for layer in model.decoder.layers:
            layer.config.moe_router_topk_epsilon = 1e-20
        without = model(tokens)
    expected = Reference(theirs).logits(tokens)
    assert (without - expected).abs().max() > 1e-3
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama", {"rope_scaling": YARN}),  # beside the rope_parameters that transformers wrote
        ("llama", {"rope_scaling": LLAMA3}),
        ("qwen3_next", {"rope_scaling": YARN}),
        ("lfm2", {"rope_scaling": YARN}),
        ("gemma3", {"rope_scaling": YARN}),
        ("gpt_oss", {"rope_parameters": None, "rope_theta": 2000.0}),
        ("gpt_oss", {"rope_parameters": {}}),
    ],
)
def test_rotary_fields_that_somebody_added(name, values, tmp_path):
    """To a config.json: what transformers makes of it, and of the same weights, is what we do."""
    build(name).save_pretrained(tmp_path)
    rewrite(tmp_path, **values)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    model, _ = mh.load_pretrained(tmp_path)
    tokens = torch.randint(3, 100, (1, 60), generator=torch.Generator().manual_seed(0))
    expected = Reference(theirs).logits(tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, atol=5e-5, rtol=0)
    before = Reference(build(name)).logits(tokens)
    assert (expected - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4"])
def test_gemmas_embedding_in_bfloat16(name, tmp_path):
    """Its factor is rounded to the dtype of the model; the sums of a layer are not compared."""
    theirs = build(name).bfloat16()
    theirs.save_pretrained(tmp_path)
    model, _ = mh.load_pretrained(tmp_path)
    assert model.config.params_dtype == torch.bfloat16
    seen = []

    def keep(module, arguments):
        seen.append(arguments[0].flatten(0, -2))

    theirs.model.layers[0].register_forward_pre_hook(keep)
    model.decoder.layers[0].register_forward_pre_hook(keep)
    tokens = torch.arange(40).view(1, 40)
    with torch.no_grad():
        theirs(tokens)
        model(tokens)
    expected, ours = seen
    assert torch.equal(ours, expected)
    factor = model.config.embedding_multiplier
    assert torch.tensor(factor, dtype=torch.bfloat16).item() != factor


NO_LIMITS = (0.0, math.inf)
LIMITS = {
    "none": (None, NO_LIMITS),
    "zero to infinity": ([0.0, math.inf], NO_LIMITS),
    "infinity in words": ([0.0, {"__float__": "Infinity"}], NO_LIMITS),
    "zero to a number that fp32 lacks": ([0.0, 1e308], NO_LIMITS),
    "two numbers": ([0.002, 0.3], (0.002, 0.3)),
}
"""What config.json says, and what it means."""
SMALL, LARGE = -8.0, 1.0
"""Biases of dt: softplus(-8) is 0.0003, below each model's time_step_min, as in trained models."""
MODELS = {
    "nemotron_h": {},
    "zamba2": {"layers_block_type": ["linear_attention"] * 3, "num_hidden_layers": 3},
}


def saved(name, limits, folder):
    """A tiny model of this name, and in a folder, with these limits in its config.json."""
    model = build(name, **MODELS[name])
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("dt_bias"):
                tensor.copy_(torch.tensor([SMALL, LARGE]).repeat(len(tensor) // 2))
    model.save_pretrained(folder)
    rewrite(folder, time_step_limit=limits)
    return model, json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("limits", "meant"), LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_time_steps_are_clamped_by_time_step_limit(name, limits, meant, tmp_path):
    """Where transformers clamps by another field than the model's makers: the reference is
    transformers in float64 whose mixers are told to clamp by `time_step_limit`."""
    theirs, values = saved(name, limits, tmp_path / "theirs")
    model, _ = mh.load_pretrained(tmp_path / "theirs")
    tokens = torch.randint(3, 100, (1, 50), generator=torch.Generator().manual_seed(0))
    twin = twin_in_float64(theirs)
    for module in twin.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = meant
    with in_float64():
        expected = Reference(twin).logits(tokens)
    assert (model(tokens) - expected).abs().max() < 1e-5 * expected.std()
    model.config.mamba_dt_min = values["time_step_min"]  # what transformers does
    assert (model(tokens) - expected).abs().max() > 1e-4 * expected.std()
    model.config.mamba_dt_min = meant[0]
    save_huggingface(model, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["time_step_limit"] == limits


@pytest.mark.parametrize("limits", [0.001, [0.001], ["0", 1.0], [0.0, None], {"__float__": "inf"}])
def test_limits_that_are_not_two_numbers_are_refused(limits, tmp_path):
    _, values = saved("nemotron_h", limits, tmp_path)
    with pytest.raises(CheckpointError, match=r"time_step_limit=.*, which must be two numbers"):
        config_of(values, "config.json")


def test_an_older_name_of_time_step_limit(tmp_path):
    _, values = saved("nemotron_h", [0.01, 0.5], tmp_path)
    values["mamba_dt_limit"] = values.pop("time_step_limit")
    config = config_of(values, "config.json")
    assert (config.mamba_dt_min, config.mamba_dt_max) == (0.01, 0.5)
