"""New weights, and what was cached with the old ones: never used again, in any tier."""

import gc
import logging
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from reference import copy_of, finish, fresh_model, greedy, random_tokens, tiny_engine
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrize import register_parametrization

from megatron_hybrid.inference import weight_epochs as epochs
from megatron_hybrid.inference.memory import budget
from megatron_hybrid.inference.weights import change_detector
from megatron_hybrid.offload.disk_store import CacheFolderError
from megatron_hybrid.ops.linear import can_reorder
from megatron_hybrid.training.lora import (
    LoraFields,
    adapters_of,
    add_adapters,
    load_adapters,
    save_adapters,
)

PROMPT = random_tokens(130)


def write_in_place(model):
    with torch.no_grad():
        model.decoder.layers[0].mixer.in_proj.weight.mul_(0.5)


def write_in_inference_mode(model):
    with torch.inference_mode():
        next(model.parameters()).mul_(0.5)


def load_state_dict(model):
    model.load_state_dict(fresh_weights(model))


def replace_a_parameter_twice(model):
    """The second one may lie where the first one was, under the same id."""
    layer = model.output_layer
    old = layer.weight.detach().clone()
    for factor in (2.0, 0.5):
        del layer.weight
        layer.weight = nn.Parameter(old * factor)


def assign_data(model):
    layer = model.output_layer
    layer.weight.data = layer.weight.data * 0.5


def half_output(module, inputs, output):
    return output[0] * 0.5, output[1]


def add_a_module(model):
    """To one that had none, which its own `forward` may look for."""
    model.decoder.layers[0].mixer.in_proj.more = nn.Identity()


def add_a_hook(model):
    model.decoder.layers[0].mixer.in_proj.register_forward_hook(half_output)


def add_a_pre_hook(model):
    projection = model.decoder.layers[0].mixer.in_proj
    projection.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5, *inputs[1:]))


def add_a_parametrization(model):
    class Half(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    register_parametrization(model.decoder.layers[0].mixer.out_proj, "weight", Half())


def set_forward(model):
    """As libraries do that wrap modules in place."""
    projection = model.decoder.layers[0].mixer.in_proj
    forward = projection.forward
    projection.forward = lambda *inputs: half_output(projection, inputs, forward(*inputs))


def load_saved_adapters(model):
    tuned = copy_of(model)
    add_adapters(tuned, LoraFields(rank=2))
    for projection in adapters_of(tuned).values():
        projection.lora.b.data.normal_()
    with TemporaryDirectory() as folder:
        save_adapters(tuned, folder)
        load_adapters(model, folder)


class Fused(torch.optim.Optimizer):
    """Writes the parameters of a model as it likes; its step is seen all the same."""

    def __init__(self, model, tensors):
        super().__init__(tensors, {})
        self.model = model

    def step(self):
        for parameter in self.model.parameters():
            parameter.data.mul_(0.5)


def optimizer_step_over_views(model):
    """Of parts of the parameters' memory, as core's distributed one."""
    Fused(model, [parameter.detach().view(-1)[:1] for parameter in model.parameters()]).step()


def optimizer_step(model):
    Fused(model, list(model.parameters())).step()


def fresh_weights(model):
    return {
        name: value * 0.5 if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }


def train_through_data(model):
    """As megatron-core's bf16 optimizer ends: model.train(), and a write through `.data`."""
    model.train()
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    model.eval()


def optimizer_step_over_main_params(model):
    """The fp32 copies that megatron-core's distributed optimizer keeps, and their way back."""
    for parameter in model.parameters():
        parameter.main_param = parameter.detach().clone().float()
        parameter.main_param.grad = torch.ones_like(parameter.main_param)
    torch.optim.SGD([p.main_param for p in model.parameters()], lr=0.1).step()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.main_param)


CHANGES = [
    write_in_place,
    write_in_inference_mode,
    load_state_dict,
    train_through_data,
    optimizer_step,
    optimizer_step_over_main_params,
    optimizer_step_over_views,
    replace_a_parameter_twice,
    assign_data,
    add_a_module,
    add_a_hook,
    add_a_pre_hook,
    add_a_parametrization,
    set_forward,
    load_saved_adapters,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_noticed_before_the_next_request_starts(change, caplog):
    model = fresh_model()
    engine = tiny_engine(model)
    assert engine.generate([PROMPT], greedy(4)) and engine.generate([PROMPT], greedy(4))
    assert engine.stats()["weight_changes"] == 0
    change(model)
    with caplog.at_level(logging.WARNING):
        results = [engine.generate([PROMPT], greedy(4))[0] for _ in range(2)]
    assert [result.prefix.skipped_tokens for result in results] == [0, 130]
    engine.clear_cache()
    expected = engine.generate([PROMPT], greedy(4))[0].token_ids
    assert [result.token_ids for result in results] == [expected] * 2
    assert engine.stats()["weight_changes"] == 1
    assert [record.message for record in caplog.records if "weights" in record.message] == [
        "the weights have changed: what was cached belongs to the old ones and is dropped, and 0 "
        "requests are computed anew; tokens that they have generated stay"
    ]


@pytest.mark.parametrize(
    "register", [nn.Module.register_forward_hook, register_module_forward_hook]
)
def test_hooks_that_come_and_go_are_noticed(register):
    model = fresh_model()
    layer = model.decoder.layers[0].mixer.in_proj
    engine = tiny_engine(model)

    def ask():
        result = engine.generate([PROMPT], greedy(2))[0]
        return result.prefix.skipped_tokens, engine.epoch

    assert [ask(), ask()] == [(0, 0), (130, 0)]

    def hook(module, inputs, output):
        return half_output(module, inputs, output) if module is layer else output

    arguments = (hook,) if register is register_module_forward_hook else (layer, hook)
    handle = register(*arguments)
    assert [ask(), ask()] == [(0, 1), (130, 1)]
    handle.remove()
    handle = register(*arguments)  # as many as before
    assert [ask(), ask()] == [(0, 2), (130, 2)]
    handle.remove()
    assert [ask(), ask()] == [(0, 3), (130, 3)]


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor, group: dist.broadcast(tensor, 0, group),
        lambda tensor, group: dist.all_reduce(tensor, group=group),
        lambda tensor, group: dist.scatter(tensor, [tensor.detach() * 0.5], 0, group),
        lambda tensor, group: tensor.data.mul_(0.5),
    ],
    ids=["broadcast", "all_reduce", "scatter", "data"],
)
def test_writes_that_torch_does_not_count_need_the_call(write, default_group):
    """docs/guides/rollouts.md lists them. If torch counts one, that list is wrong."""
    model = fresh_model()
    engine = tiny_engine(model)
    engine.generate([PROMPT], greedy(2))
    write(model.decoder.layers[0].mixer.in_proj.weight, default_group)
    assert engine.generate([PROMPT], greedy(2))[0].prefix.skipped_tokens == 130
    engine.update_weights()
    assert engine.generate([PROMPT], greedy(2))[0].prefix.skipped_tokens == 0


def test_what_other_models_train_changes_nothing():
    model, other = fresh_model(), fresh_model()
    engine = tiny_engine(model)
    engine.generate([PROMPT], greedy(2))
    other.train()
    other(torch.tensor([PROMPT])).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert engine.generate([PROMPT], greedy(2))[0].prefix.skipped_tokens == 130
    assert engine.stats()["weight_changes"] == 0


def test_what_follows_from_weights_is_worked_out_once_until_they_change():
    model = fresh_model("MGKH*")
    engine, params = tiny_engine(model), greedy(3, return_log_probs=True)
    engine.generate([PROMPT[:20]], params)
    kept = dict(engine.runner.derived)
    assert sum(name == "A" for _, name in kept) == 4 and len(kept) > 8
    engine.generate([PROMPT[:20]], params)
    assert all(engine.runner.derived[key] is value for key, value in kept.items())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "norm.weight")):
                parameter.add_(0.7)
    (given,), (expected,) = (
        own.generate([PROMPT[:20]], params) for own in (engine, tiny_engine(copy_of(model)))
    )
    assert given.token_ids == expected.token_ids
    assert given.log_probs == expected.log_probs


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_weights_are_kept_in_another_layout_where_there_is_room(fraction, monkeypatch):
    monkeypatch.setattr(budget, "CPU_FRACTION", fraction)
    model, params = fresh_model("M*-E"), greedy(6, return_log_probs=True)
    engine = tiny_engine(model)
    for _ in range(2):
        found = engine.generate([PROMPT[:20]], params)[0]
        kept = {name for _, name in engine.runner.derived}
        assert ("reordered" in kept) == (fraction > 0 and can_reorder(model.output_layer.weight))
        logits = copy_of(model)(torch.tensor([PROMPT[:20] + found.token_ids]))[0, 19:]
        right = [float(row[t]) for row, t in zip(logits.log_softmax(-1), found.token_ids)]
        assert found.log_probs == pytest.approx(right, abs=1e-5)
        write_in_place(model)
    engine.suspend()
    assert not engine.runner.derived


def test_steps_inside_autocast_do_without_the_other_layout():
    """torch multiplies there, which cannot read it; before and after, the copies serve."""
    model = fresh_model()
    engine, other = tiny_engine(model), tiny_engine(model)
    expected = engine.generate([PROMPT], greedy(4))[0].token_ids
    for own in (engine, other):
        own.clear_cache()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert len(own.generate([PROMPT], greedy(4))[0].token_ids) == 4
        own.clear_cache()
        assert own.generate([PROMPT], greedy(4))[0].token_ids == expected


def test_prompt_log_probs_are_all_of_the_new_weights():
    model = fresh_model()
    engine = tiny_engine(model, max_tokens=64)
    params = greedy(2, return_log_probs=True)
    request = engine.add_request(PROMPT, params)
    engine.step()
    assert 0 < len(request.prompt_log_probs) < len(PROMPT) - 1
    write_in_place(model)
    other = engine.add_request(PROMPT[:5], greedy(1))
    finish(engine)
    assert other.done
    expected = tiny_engine(copy_of(model), max_tokens=64).generate([PROMPT], params)[0]
    assert request.result().prompt_log_probs == pytest.approx(expected.prompt_log_probs, abs=1e-5)


def test_a_folder_is_not_written_for_new_weights_under_the_name_of_the_old(tmp_path, monkeypatch):
    """Where the fingerprint of the new ones fails, the next step makes it before anything else."""
    model = fresh_model()
    old = copy_of(model)
    engine = tiny_engine(model, cache_dir=tmp_path)
    engine.generate([PROMPT], greedy(2))
    write_in_place(model)
    request = engine.add_request(PROMPT, greedy(2))

    def no_memory(*arguments):
        raise MemoryError("no room")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(epochs, "fingerprint", no_memory)
        engine.step()
    finish(engine, request)
    engine.save_cache()
    engine.close()
    with pytest.raises(CacheFolderError, match="written for another weights"):
        tiny_engine(old, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (add_a_hook, "modules and hooks"),
        (add_a_pre_hook, "modules and hooks"),
        (set_forward, "modules and hooks"),
        (lambda model: add_adapters(model, LoraFields(rank=2, alpha=8.0)), "adapters"),
    ],
)
def test_a_folder_is_of_the_hooks_and_adapters_it_was_written_with(tmp_path, change, name):
    """They are no tensors of the model, and count as much."""
    model = fresh_model()
    other = copy_of(model)
    if name == "adapters":
        add_adapters(other, LoraFields(rank=2, alpha=4.0))
    change(model)
    with tiny_engine(model, cache_dir=tmp_path) as engine:
        engine.generate([PROMPT], greedy(2))
        engine.save_cache()
    with pytest.raises(CacheFolderError, match=f"written for another {name}"):
        tiny_engine(other, cache_dir=tmp_path)
    with tiny_engine(model, cache_dir=tmp_path) as engine:
        assert engine.generate([PROMPT], greedy(2))[0].prefix.skipped_tokens == 130


def test_an_engine_that_is_gone_is_not_watched():
    engine = tiny_engine(fresh_model())
    number = len(change_detector._watches)
    del engine
    gc.collect()
    assert len(change_detector._watches) < number
