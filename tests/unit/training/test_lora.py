"""LoRA: adapters alone learn, merge into the weights, and are saved alone."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import ONE_OF_EACH, fill_adapters, random_tokens, small_model

from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.training.lora import (
    LoraFields,
    adapters_of,
    add_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
)

EXPERTS = {"num_moe_experts": 5, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
FIELDS = {"L": {"attention_chunk_size": 6}, "B": EXPERTS}
ADAPTED = [pattern for pattern in ONE_OF_EACH if pattern not in "PE"]  # which project nothing


@pytest.mark.parametrize("pattern", ADAPTED)
def test_every_layer_kind_is_adapted_and_merges(pattern):
    model = small_model(pattern, **FIELDS.get(pattern, {}))
    tokens = random_tokens(1, 20)
    base = model(tokens)
    names = add_adapters(model, LoraFields(rank=3, alpha=6.0))
    assert names and torch.equal(model(tokens), base)  # B is 0
    fill_adapters(model)
    adapted = model(tokens)
    assert (adapted - base).abs().max() > 1e-2
    for projection in adapters_of(model).values():  # each of them counts
        kept = projection.lora.b.detach().clone()
        projection.lora.b.data.zero_()
        assert not torch.equal(model(tokens), adapted)
        projection.lora.b.data.copy_(kept)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    changes = model.num_weight_changes
    merge_adapters(model)
    assert not adapters_of(model) and model.num_weight_changes > changes
    torch.testing.assert_close(model(tokens), adapted, atol=1e-5, rtol=1e-5)
    after = dict(model.named_parameters())
    for name in names:
        a, b = before[f"{name}.lora.a"], before[f"{name}.lora.b"]
        expected = before[f"{name}.weight"] + b @ a * 2.0
        torch.testing.assert_close(after[f"{name}.weight"], expected, atol=1e-6, rtol=1e-6)


def test_adapters_alone_learn():
    model = small_model("M*-")
    names = add_adapters(model, LoraFields(rank=4, targets=["in_proj", "2.*.linear_*"]))
    assert names == [
        "decoder.layers.0.mixer.in_proj",
        "decoder.layers.2.mlp.linear_fc1",
        "decoder.layers.2.mlp.linear_fc2",
    ]
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {f"{name}.lora.{which}" for name in names for which in "ab"}


def test_first_values_depend_on_seed_and_name_alone():
    def first(seed, scramble):
        torch.manual_seed(scramble)
        model = small_model("MM")
        add_adapters(model, LoraFields(rank=4, seed=seed))
        return [projection.lora.a for projection in adapters_of(model).values()]

    one, same, other = first(1, 0), first(1, 9), first(2, 0)
    assert all(torch.equal(a, b) for a, b in zip(one, same))
    assert not any(torch.equal(a, b) for a, b in zip(one, other))
    assert not torch.equal(one[0], one[2])  # of equal projections
    assert one[0].abs().max() <= 48**-0.5


def test_dropout_is_for_training():
    model = small_model("M")
    add_adapters(model, LoraFields(dropout=0.5))
    fill_adapters(model)
    tokens = random_tokens(1, 20)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_adapters_of_another_model_are_refused(tmp_path):
    model = small_model("M")
    with pytest.raises(ValueError, match="the model has no adapters to save"):
        save_adapters(model, tmp_path)
    with pytest.raises(CheckpointError, match="has no adapters to read: "):
        load_adapters(model, tmp_path)
    add_adapters(model, LoraFields(rank=4))
    save_adapters(model, tmp_path)
    for other, match in (
        (
            small_model("M", hidden_size=64),
            r"the adapter of .*0.mixer.in_proj has the shapes .*'A': \(4, 48\).*rank, 64\]",
        ),
        (small_model("*"), r"holds an adapter of decoder.layers.0.mixer.in_proj, which is no"),
    ):
        tokens = random_tokens(1, 20)
        before = other(tokens)
        with pytest.raises(CheckpointError, match=match):
            load_adapters(other, tmp_path)
        # It is as it was.
        assert not adapters_of(other) and torch.equal(other(tokens), before)
        assert all(parameter.requires_grad for parameter in other.parameters())
        add_adapters(other, LoraFields(rank=4))
    state = load_file(tmp_path / "adapter_model.safetensors")
    kinds = (torch.Tensor.long, torch.Tensor.cfloat, torch.Tensor.sum)
    for change in (*kinds, lambda t: t * math.nan, lambda t: t.double() * 1e300):
        changed = {name: change(t + 1) for name, t in state.items()}
        save_file(changed, tmp_path / "adapter_model.safetensors")
        other = small_model("M")
        with pytest.raises(CheckpointError, match=r"lora.* is torch\..* \[.*\], or has NaN"):
            load_adapters(other, tmp_path)
        assert not adapters_of(other)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"adapter_config.json is no file there"):
        load_adapters(small_model("M"), tmp_path / "pipe")
    config = tmp_path / "adapter_config.json"
    fields = json.loads(config.read_text())
    for change, match in (
        ({"r": "many"}, "has no adapters to read: .*many"),
        ({"r": 0}, "r is 0; it must be"),
        ({"lora_alpha": 1e400}, "lora_alpha is inf; it must be"),
        ({"use_rslora": "false"}, "use_rslora is 'false'; it must be"),
        ({"alpha_pattern": {"(": 1.0}}, "has no adapters to read: missing"),
        ({"alpha_pattern": {"in_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": {"((.)+)+$x": 1.0}}, "whose matching may not end: repeat no group"),
        ({"alpha_pattern": {".*.*.*.*x": 1.0}}, "whose matching may not end"),
        ({"use_dora": True}, "has use_dora=True, which is not supported: merge the adapter"),
        ({"bias": "all"}, "has bias='all', which is not supported"),
        ({"init_lora_weights": "OLoRA"}, "has init_lora_weights='OLoRA', which"),
        ({"peft_type": "IA3", "r": None}, "has peft_type='IA3', which is not supported"),
    ):
        config.write_text(json.dumps({**fields, **change}))
        with pytest.raises(CheckpointError, match=match):
            load_adapters(small_model("M"), tmp_path)


class TELayerNormColumnParallelLinear(torch.nn.Linear):
    """Named as Transformer Engine's."""


def test_projections_with_a_norm_are_refused():
    model = small_model("M")
    model.decoder.layers[0].mixer.in_proj = TELayerNormColumnParallelLinear(48, 80)
    with pytest.raises(ValueError, match="LoRA needs layer_spec='local'"):
        add_adapters(model, LoraFields())


def test_a_model_is_adapted_once():
    model = small_model("M")
    match = r"targets \['q_proj'\] name no projection of the model, which has in_proj, out_proj\."
    with pytest.raises(ValueError, match=match):
        add_adapters(model, LoraFields(targets=["in_proj", "q_proj"]))
    add_adapters(model, LoraFields())
    with pytest.raises(ValueError, match="the model has adapters already: merge them first"):
        add_adapters(model, LoraFields())
    merge_adapters(model)
    add_adapters(model, LoraFields())


def test_numbers_that_the_weights_dtype_lacks_are_refused(tmp_path):
    wide = small_model("M")
    names = add_adapters(wide, LoraFields(rank=2, targets=["in_proj"]))
    fill_adapters(wide)
    model = small_model("M", params_dtype=torch.float16)
    for value, found in ((70000.0, "load"), (60000.0, "merge")):
        adapters_of(wide)[names[0]].lora.b.data[0] = value
        save_adapters(wide, tmp_path)
        if found == "load":
            with pytest.raises(CheckpointError, match=r"in_proj has the number 70000 in"):
                load_adapters(model, tmp_path)
            assert not adapters_of(model)
    load_adapters(model, tmp_path)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"in_proj.weight with its adapter has .*float16, which"):
        merge_adapters(model)
    assert all(map(torch.equal, before, model.parameters()))
