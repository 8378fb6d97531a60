"""Checkpoints: they come back as they went, and broken ones are refused whole."""

import errno
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import small_model
from state_dicts import load_state
from transformers import LlamaConfig

from megatron_hybrid.checkpoints import checkpoint, tensor_files
from megatron_hybrid.checkpoints.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from megatron_hybrid.checkpoints.model_tensors import full_state_dict
from megatron_hybrid.models.hybrid_model import build_hybrid_model


def snapshot(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(model, before):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), before))


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}


def test_fp32_parameters_are_written_in_the_dtype_that_they_were_read_in(tmp_path):
    model = small_model("MGKE", params_dtype=torch.bfloat16, add_bias_linear=True, **EXPERTS)
    save_checkpoint(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    wide = [name for name, tensor in state.items() if tensor.dtype == torch.float32]
    kept = {".".join(name.split(".")[3:]) for name in wide}
    assert {"mlp.router.weight", "mlp.router.bias", "self_attention.dt_bias"} <= kept
    state |= {name: state[name].bfloat16() for name in wide[::2]}
    save_file(state, tmp_path / "model.safetensors")
    again = small_model("MGKE", params_dtype=torch.bfloat16, add_bias_linear=True, **EXPERTS)
    load_checkpoint(again, tmp_path)
    parameters = dict(again.named_parameters())
    assert all(parameters[name].dtype == torch.float32 for name in wide)
    save_checkpoint(again, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert {n: t.dtype for n, t in written.items()} == {n: t.dtype for n, t in state.items()}
    assert all(torch.equal(written[name], state[name]) for name in state)

    with torch.no_grad():
        parameters[wide[0]].add_(1e-5)  # what bfloat16 does not have
    save_checkpoint(again, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written[wide[0]].dtype == torch.float32
    assert torch.equal(written[wide[0]], parameters[wide[0]])
    assert written[wide[2]].dtype == torch.bfloat16


@pytest.mark.parametrize("what", ["_write_file", "write_json"])
def test_a_save_that_fails_leaves_the_old_checkpoint(what, tmp_path, monkeypatch):
    """At the weights, or at the config."""
    old = small_model("M")
    save_checkpoint(old, tmp_path)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(tensor_files if what == "_write_file" else checkpoint, what, full)
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint to .*No space"):
        save_checkpoint(small_model("-"), tmp_path)
    monkeypatch.undo()
    again = build_hybrid_model(read_config(tmp_path))
    load_checkpoint(again, tmp_path)
    assert same(again, snapshot(old))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def rename(state, old, new):
    state[new] = state.pop(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("decoder.layers.0.mixer.D"),
            "but the model has decoder.layers.0.mixer.D. The config does not describe",
        ),
        (lambda state: state.update(extra=torch.zeros(1)), "the model does not have extra. The"),
        (
            lambda state: state.update({"decoder.layers.0.mixer.D": torch.zeros(9)}),
            "decoder.layers.0.mixer.D has shape [9] in {source}, but the model's config gives it "
            "[6]. Config and weights do not belong together",
        ),
        (
            lambda state: state.update({"decoder.layers.0.mixer.D": torch.ones(6).double()}),
            "decoder.layers.0.mixer.D is torch.float64 in {source}, but torch.float32 in the model",
        ),
        (lambda state: rename(state, "output_layer.weight", "lm_head.weight"), "has output_layer"),
        (lambda state: state.clear(), "(and 21 more)"),
    ],
)
def test_mismatches_name_the_tensor_and_load_nothing(tmp_path, change, message):
    state = full_state_dict(small_model("MG-"))
    change(state)
    model, source = small_model("MG-"), str(tmp_path)
    before = snapshot(model)
    save_checkpoint(model, tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(model, tmp_path)
    assert message.format(source=source) in str(error.value)
    assert source in str(error.value)
    assert same(model, before)


def test_a_dtype_of_more_precision_takes_all_values_and_cast_rounds_rather_than_refuses():
    state, model = full_state_dict(small_model(params_dtype=torch.bfloat16)), small_model()
    load_state(model, state)
    assert torch.equal(model.output_layer.weight, state["output_layer.weight"].float())
    state = full_state_dict(small_model())
    model = small_model(params_dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="cast=True of load_checkpoint"):
        load_state(model, state)
    load_state(model, state, cast=True)
    assert torch.equal(model.output_layer.weight, state["output_layer.weight"].bfloat16())


def test_a_folder_with_a_number_that_becomes_infinite_changes_nothing(tmp_path):
    wide, model = small_model("M"), small_model("M", params_dtype=torch.float16)
    wide.output_layer.weight.data[1, 2] = 70000.0
    save_checkpoint(wide, tmp_path)
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=r"output_layer.weight has the number 70000 in"):
        load_checkpoint(model, tmp_path, cast=True)
    assert same(model, before)


def test_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    model = small_model("-")
    save_checkpoint(model, tmp_path / "models--a--b" / "snapshots" / "1f")
    with pytest.raises(CheckpointError, match=r"such as .*/snapshots/1f"):
        read_config(tmp_path / "models--a--b")
    save_checkpoint(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_checkpoint(model, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("\x00\xff", "cannot be read as JSON"),
        ("[1, 2]", "holds a list, not a JSON object"),
        ('{"layer_pattern": "M?"}', "unknown symbol '?' at place 2"),
        ('{"layer_pattern": "M", "hidden": 3}', "unknown key 'hidden'"),
        ('{"layer_pattern": "M", "hidden_size": "wide", "vocab_size": 5}', "hidden_size is 'wide'"),
        ("{}", "neither a layer_pattern, as ours have, nor a model_type"),
    ],
)
def test_unusable_configs(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError) as error:
        read_config(tmp_path)
    assert message in str(error.value)
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("whose", ["ours", "huggingface"])
def test_an_override_that_is_not_possible_is_not_the_fault_of_the_file(tmp_path, whose):
    save_checkpoint(small_model("-"), tmp_path)
    if whose == "huggingface":
        LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="params_dtype is 'fp8'") as error:
        read_config(tmp_path, params_dtype="fp8")
    assert not isinstance(error.value, CheckpointError) and "config.json" not in str(error.value)
    (tmp_path / "config.json").write_text('{"layer_pattern": "M?"}')
    with pytest.raises(CheckpointError, match="unknown symbol"):  # what is wrong with both
        read_config(tmp_path, params_dtype="fp8")
