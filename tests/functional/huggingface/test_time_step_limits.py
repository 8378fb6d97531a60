"""The time steps of Mamba-2 where transformers clamps by another field than the model's makers.

The reference is a forward pass from the published definition of Nemotron-H and of Zamba2 (arXiv
2405.21060 for their Mamba-2), token by token in float64: dt is clamped by `time_step_limit`.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from huggingface import build
from safetensors.torch import load_file

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.checkpoint import CheckpointError, save_huggingface
from megatron_hybrid.checkpoints.folder import config_of
from megatron_hybrid.ops.ssd.naive import ssd_scan

LIMITS = [None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}], [0.002, 0.3]]
SMALL, LARGE = -8.0, 1.0
"""Biases of dt: softplus(-8) is 0.0003, below each model's time_step_min, as in trained models."""


class Weights:
    """The tensors of a folder in float64, by a prefix."""

    def __init__(self, folder, prefix=""):
        self.folder, self.prefix = folder, prefix
        self.tensors = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}

    def __call__(self, name):
        return self.tensors[f"{self.prefix}{name}"]

    def of(self, prefix):
        return Weights(self.folder, self.prefix + prefix)


def rms(x, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def mamba2(x_Th, w, heads, groups, states, limits, eps):
    """The scan, then norm(y SiLU(z))."""
    inner = w("out_proj.weight").shape[1]
    group_states = groups * states
    sizes = [inner, inner + 2 * group_states, heads]
    z, xBC, dt = (x_Th @ w("in_proj.weight").T).split(sizes, -1)
    kernel = w("conv1d.weight")[:, 0]
    padded = F.pad(xBC, (0, 0, kernel.shape[1] - 1, 0)).unfold(0, kernel.shape[1], 1)
    xBC = F.silu((padded * kernel).sum(-1) + w("conv1d.bias"))
    x, B, C = xBC.split([inner, group_states, group_states], -1)
    x = x.unflatten(-1, (heads, -1))
    B, C = (m.unflatten(-1, (groups, -1)) for m in (B, C))
    dt = F.softplus(dt + w("dt_bias"))
    if limits is not None:
        dt = dt.clamp(*(math.inf if isinstance(limit, dict) else limit for limit in limits))
    start = x.new_zeros(heads, x.shape[-1], states)
    y, _ = ssd_scan(x, dt, -w("A_log").exp(), B, C, w("D"), start)
    y = y.flatten(1) * F.silu(z)
    y = rms(y.unflatten(-1, (groups, -1)), eps).flatten(-2) * w("norm.weight")
    return y @ w("out_proj.weight").T


def attention(x_Th, w, heads, groups):
    def of_heads(name, number):
        projected = (x_Th @ w(f"{name}_proj.weight").T).unflatten(-1, (number, -1))
        return projected.repeat_interleave(heads // number, 1).transpose(0, 1)

    q, k, v = of_heads("q", heads), of_heads("k", groups), of_heads("v", groups)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    scores += torch.full_like(scores, -math.inf).triu(1)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w("o_proj.weight").T


def mlp(x_Th, w):
    return F.relu(x_Th @ w("up_proj.weight").T).square() @ w("down_proj.weight").T


def nemotron_h(tokens, weights, c, limits):
    """Without RoPE; each layer is one mixer behind a norm."""
    w = weights.of("backbone.")
    x_Th = w("embeddings.weight")[tokens]
    for i, kind in enumerate(c["layers_block_type"]):
        layer = w.of(f"layers.{i}.")
        h, mixer = rms(x_Th, c["layer_norm_epsilon"]) * layer("norm.weight"), layer.of("mixer.")
        if kind in ("mamba", "linear_attention"):
            sizes = (c["mamba_num_heads"], c["n_groups"], c["ssm_state_size"])
            x_Th = x_Th + mamba2(h, mixer, *sizes, limits, c["layer_norm_epsilon"])
        elif kind == "mlp":
            x_Th = x_Th + mlp(h, mixer)
        else:
            heads = (c["num_attention_heads"], c["num_key_value_heads"])
            x_Th = x_Th + attention(h, mixer, *heads)
    x_Th = rms(x_Th, c["layer_norm_epsilon"]) * w("norm_f.weight")
    return x_Th @ weights("lm_head.weight").T


def zamba2(tokens, weights, c, limits):
    """Of Mamba-2 layers alone; its output layer is the embedding."""
    w = weights.of("model.")
    x_Th = w("embed_tokens.weight")[tokens]
    sizes = (c["n_mamba_heads"], c["mamba_ngroups"], c["mamba_d_state"])
    for i in range(c["num_hidden_layers"]):
        layer = w.of(f"layers.{i}.")
        h = rms(x_Th, c["rms_norm_eps"]) * layer("input_layernorm.weight")
        x_Th = x_Th + mamba2(h, layer.of("mamba."), *sizes, limits, 1e-5)
    return rms(x_Th, c["rms_norm_eps"]) * w("final_layernorm.weight") @ w("embed_tokens.weight").T


MODELS = {
    "nemotron_h": (nemotron_h, {}),
    "zamba2": (zamba2, {"layers_block_type": ["linear_attention"] * 3, "num_hidden_layers": 3}),
}


def saved(name, limits, folder):
    """A tiny model of this name in a folder, with these limits in its config.json."""
    model = build(name, **MODELS[name][1])
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("dt_bias"):
                tensor.copy_(torch.tensor([SMALL, LARGE]).repeat(len(tensor) // 2))
    model.save_pretrained(folder)
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), "time_step_limit": limits}
    path.write_text(json.dumps(values))
    return values


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_time_steps_are_clamped_by_time_step_limit(name, limits, tmp_path):
    values = saved(name, limits, tmp_path)
    model, _ = mh.load_pretrained(tmp_path)
    tokens = torch.randint(3, 100, (50,), generator=torch.Generator().manual_seed(0))
    expected = MODELS[name][0](tokens, Weights(tmp_path), values, limits)
    actual = model(tokens[None])[0]
    assert (actual - expected).abs().max() < 1e-5 * expected.std()
    model.config.mamba_dt_min = values["time_step_min"]  # what transformers does
    floored = model(tokens[None])[0]
    assert (floored - expected).abs().max() > 1e-4 * expected.std()


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_time_step_limit_is_written_as_it_was(name, limits, tmp_path):
    saved(name, limits, tmp_path / "theirs")
    model, _ = mh.load_pretrained(tmp_path / "theirs")
    mh.save_checkpoint(model, tmp_path / "ours")
    again, _ = mh.load_pretrained(tmp_path / "ours")
    assert again.config.mamba_dt_min == model.config.mamba_dt_min
    assert again.config.mamba_dt_max == model.config.mamba_dt_max
    save_huggingface(again, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["time_step_limit"] == limits


@pytest.mark.parametrize("limits", [0.001, [0.001], ["0", 1.0], [0.0, None], {"__float__": "inf"}])
def test_limits_that_are_not_two_numbers_are_refused(limits, tmp_path):
    values = saved("nemotron_h", limits, tmp_path)
    with pytest.raises(CheckpointError, match=r"time_step_limit=.*, which must be two numbers"):
        config_of(values, "config.json")


def test_an_older_name_of_time_step_limit(tmp_path):
    values = saved("nemotron_h", [0.01, 0.5], tmp_path)
    values["mamba_dt_limit"] = values.pop("time_step_limit")
    config = config_of(values, "config.json")
    assert (config.mamba_dt_min, config.mamba_dt_max) == (0.01, 0.5)
