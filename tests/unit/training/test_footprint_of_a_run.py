"""The memory of a run before there is one, against real steps on a CPU."""

import json
import re
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from megatron.core import parallel_state
from saved_tensors import Saved
from small_models import EVERY_KIND, FIELDS_OF_EVERY_KIND, random_tokens, small_config
from small_recipes import SIZES, small_recipe, write_small_text

from megatron_hybrid.cli import main
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.models.saved_bytes import count_saved_bytes, planned_model
from megatron_hybrid.ops import dispatch, expert_mlps
from megatron_hybrid.training import trainer as trainer_module
from megatron_hybrid.training.footprint import footprint
from megatron_hybrid.training.recipe import RECIPES
from megatron_hybrid.training.trainer import Trainer, training_device

RECOMPUTE = {
    "nothing": {},
    "parts": dict(
        recompute_granularity="selective", recompute_modules=["core_attn", "mamba", "moe", "mlp"]
    ),
    "layers": dict(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    ),
}


def saved_by_a_step(config, rows, length):
    """Bytes that a real forward pass keeps: of all, and of each layer."""
    model = build_hybrid_model(config).train()
    saved, layers = Saved(model), []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda *_: layers.append(-saved.bytes()))
        layer.register_forward_hook(lambda *_: layers.append(layers.pop() + saved.bytes()))
    tokens = random_tokens(rows, length + 1)
    with saved.counted():
        loss = model(tokens[:, :-1], labels=tokens[:, 1:])
    num_bytes = saved.bytes()
    loss.mean().backward()
    return num_bytes, layers[: len(model.decoder.layers)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("nothing", torch.bfloat16), ("parts", torch.float32), ("layers", torch.bfloat16)],
)
def test_layers_keep_what_a_real_step_keeps(kind, dtype, monkeypatch):
    backends = [replace(backend, device_type=None) for backend in expert_mlps.backends]
    monkeypatch.setattr(expert_mlps, "backends", backends)
    config = small_config(EVERY_KIND, params_dtype=dtype, **FIELDS_OF_EVERY_KIND, **RECOMPUTE[kind])
    expected, layers = saved_by_a_step(config, 2, 150)
    found = count_saved_bytes(planned_model(config, 1, 0), 2, 150, "cpu")
    assert found.total == pytest.approx(expected, rel=0.05)
    assert found.layers == pytest.approx(layers, rel=0.05)
    assert len(found.layers) == len(EVERY_KIND) and (kind != "nothing" or min(found.layers) > 0)


def run_fields(tmp_path, optimizer, **model):
    fields = {"layer_pattern": "M*-E", **SIZES, "num_moe_experts": 4, "moe_ffn_hidden_size": 24}
    return dict(
        model={**fields, **model},
        data={"blend": [write_small_text(tmp_path / "text")], "split": "1", "sequence_length": 64},
        optimizer={"name": optimizer},
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adam", "muon", "sgd"])
def test_weights_gradients_and_states_are_those_of_a_run(optimizer, dtype, tmp_path):
    recipe = small_recipe(**run_fields(tmp_path, optimizer, params_dtype=dtype))
    parallel_state.destroy_model_parallel()
    with training_device() as device, closing(Trainer(recipe, tmp_path / "run", device)) as run:
        found = footprint(recipe, run.model.config, 1, "cpu")
        run.step(run.batches())
        weights = [parameter.nbytes for parameter in run.model.parameters()]
        buffers = [*run.chunk.buffers, *run.chunk.expert_parallel_buffers]
        states = 0
        for each in run.optimizer.chained_optimizers:
            own = each.optimizer
            for group in own.param_groups:
                for main in group["params"]:
                    tensors = [x for x in own.state[main].values() if torch.is_tensor(x)]
                    states += sum(x.nbytes for x in tensors if x.dim())
                    is_copy = not any(main is one for one in run.model.parameters())
                    states += main.nbytes * is_copy
    assert found.weights == sum(weights)
    assert found.gradients == pytest.approx(
        sum(buffer.grad_data.nbytes for buffer in buffers), rel=0.01
    )
    assert found.optimizer == states


def test_a_run_that_does_not_fit_is_refused_with_its_table(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_module, "device_memory", lambda device: 10**6)
    recipe = small_recipe(**run_fields(tmp_path, "adam"))
    parallel_state.destroy_model_parallel()
    with training_device() as device, pytest.raises(ValueError, match="does not fit") as refused:
        Trainer(recipe, tmp_path / "run", device)
    assert re.search(r"optimizer +\S+ [kM]B", str(refused.value)), refused.value
    assert re.search(r"Mamba-2 +1 .* plain torch", str(refused.value))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["nemotron_h_8b", "qwen3_next_80b_a3b", "jamba_mini"])
def test_shipped_recipes_fit_the_gpus_that_they_name(name, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "forced", "reference")  # of plain torch, which needs most
    named = re.search(r"# (\d+) GPUs(?: of (\d+) GB)?", (RECIPES / f"{name}.yaml").read_text())
    memory = named[2] or "80"
    options = ["plan", "--train", name, "--memory", memory, "--device", "h100"]
    assert main([*options, "--num-gpus", named[1], "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["total"] + values["freed"] > int(memory) * 10**9 > values["total"]
    assert 10**5 < values["tokens_per_second"] < 10**7
    assert main([*options, "--num-gpus", "3"]) != 0
    assert "needs a multiple of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "rows", "said"),
    [
        ({"pipeline_model_parallel_size": 2}, 8, ""),
        ({"vocab_size": 5000}, 8, ""),
        ({}, 12, "no multiple of the 8 rows"),
        ({"pipeline_model_parallel_size": 0}, 8, "must be a whole number from 1"),
        ({"expert_model_parallel_size": 0}, 8, "must be a whole number from 1"),
        ({"expert_tensor_parallel_size": 0}, 8, "does not divide"),
    ],
)
def test_a_run_of_adapters_is_planned_where_it_would_start(model, rows, said, tmp_path, capsys):
    data, path = {"sequence_length": 64, "blend": ["x"]}, tmp_path / "run.yaml"
    recipe = {"model": {"pretrained": "demo", **model}, "tokenizer": "demo", "data": data}
    path.write_text(json.dumps({**recipe, "lora": {}, "run": {"global_batch_size": rows}}))
    assert main(["plan", "--train", str(path), "--device", "h100"]) == (2 if said else 0)
    assert said in capsys.readouterr().err
