"""`megatron-hybrid convert` of a training run: any checkpoint in it is a model."""

import json
import logging

import pytest
import torch
from bars import check_bars
from matrix import matrix_rows
from megatron.core import parallel_state
from small_recipes import SIZES, small_recipe, train_alone, write_small_text

from megatron_hybrid import cli, load_megatron, load_pretrained
from megatron_hybrid.checkpoints import tensor_source
from megatron_hybrid.checkpoints.megatron.torch_dist import DistributedTensors

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::FutureWarning")

MODEL = {
    **SIZES,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "sliding_window": 8,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
}
MODELS = {
    "layers": {"layer_pattern": "M*GK-WE"},
    "prediction": {"layer_pattern": "M*E/*E", "moe_router_score_function": "sigmoid"}
    | {"moe_router_enable_expert_bias": True},
    "shared blocks": {"layer_pattern": "V*-SV", "mamba1_num_heads": 2},
    "bf16": {"layer_pattern": "M*", "params_dtype": "bfloat16"}
    | {"share_embeddings_and_output_weights": True},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Prefix of a dataset."""
    return write_small_text(tmp_path_factory.mktemp("data") / "text")


def train(text, folder, **sections):
    """Two steps with a checkpoint each, then the export."""
    data, checkpoints = {"sequence_length": 32, "train": [text]}, {"every_steps": 1}
    sections |= {"optimizer": {"decay": "constant"}, "checkpoints": checkpoints}
    train_alone(small_recipe(data=data, run={"steps": 2}, **sections), folder, export=True)


def state_of(model):
    return {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}


@pytest.mark.parametrize("name", matrix_rows(MODELS, "shared blocks", "prediction"))
def test_the_newest_checkpoint_is_the_exported_model(text, tmp_path, caplog, monkeypatch, name):
    advanced = check_bars(monkeypatch, tensor_source)
    train(text, tmp_path, model={**MODEL, **MODELS[name]})
    caplog.clear()  # of what the training says, where another test has lowered the level
    with caplog.at_level(logging.WARNING):
        found = state_of(load_megatron(tmp_path))
    exported = state_of(load_pretrained(tmp_path / "exported", mtp=True)[0])
    assert found.keys() == exported.keys() and not caplog.records
    assert all(torch.equal(value, exported[name]) for name, value in found.items())
    main = MODELS[name]["layer_pattern"].partition("/")[0]
    config = DistributedTensors(tmp_path).config(pipeline_model_parallel_size=len(main))
    assert config.layer_pattern == main  # the last stage has no embedding for what is behind /
    without = state_of(load_megatron(tmp_path, layer_pattern=main))
    assert {key for key in found if not key.startswith("mtp.")} == without.keys()
    assert sum(advanced) > 0
    assert ("prediction are left out" in caplog.text) == (name == "prediction")
    before = state_of(load_megatron(tmp_path / "iter_0000001"))
    assert before.keys() == found.keys()
    assert not all(torch.equal(value, found[name]) for name, value in before.items())


@pytest.mark.parametrize("source", matrix_rows(["run", "run/iter_0000001"], "run"))
def test_convert_takes_the_tokenizer_of_the_recipe(text, tmp_path, capsys, source):
    recipe = {"model": {**MODEL, "layer_pattern": "M*-"}, "tokenizer": "demo", "run": {"steps": 1}}
    recipe["data"] = {"sequence_length": 32, "train": [text]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))  # which is YAML
    parallel_state.destroy_model_parallel()
    run = str(tmp_path / "run")
    assert cli.main(["train", str(tmp_path / "recipe.yaml"), "--folder", run]) == 0
    assert cli.main(["convert", str(tmp_path / source), str(tmp_path / "target")]) == 0
    capsys.readouterr()
    model = ["generate", "--model", str(tmp_path / "target"), "--prompt", "Once"]
    assert cli.main([*model, "--tokens", "2", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("Once")
    assert cli.main(["generate", "--model", run, "--prompt", "Once"]) == 2
    assert f"or its config.json, such as {run}/exported" in capsys.readouterr().err


def test_of_adapters_the_exported_model_is_named(text, tmp_path, capsys):
    train(text, tmp_path / "run", model={"pretrained": "demo"}, lora={"rank": 2})
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "target")]) == 2
    assert f"use {tmp_path}/run/exported, or finish it." in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
    assert cli.main(["convert", f"{tmp_path}/run/exported", str(tmp_path / "target")]) == 0
