"""LoRA on two ranks learns what it learns on one, by core's data parallelism and optimizer."""

import re
from dataclasses import replace

import pytest
import torch
from core_training import adam_of, data_parallel, ignore_warnings_of_core, set_up_groups
from megatron.core.distributed import finalize_model_grads
from rank_processes import train_on_ranks
from safetensors.torch import load_file
from small_models import fill_adapters, small_config
from split_models import assert_all_close, load, main_gradients

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.training.lora import (
    LoraFields,
    adapters_of,
    add_adapters,
    load_adapters,
    merge_adapters,
    save_adapters,
)

pytestmark = [pytest.mark.matrix, ignore_warnings_of_core]
RANKS = 2
PATTERN = "MGKS*+W-H"
MORE = {"num_query_groups": 1}  # which both ranks hold
LAYOUTS = {
    "tensor parallel": {"tensor_model_parallel_size": RANKS},
    "sequence parallel": {"tensor_model_parallel_size": RANKS, "sequence_parallel": True},
    "data parallel": {},
    "alone": {},
}
TOKENS = torch.randint(0, 61, (1, 33), generator=torch.Generator().manual_seed(3))


def core_model(model):
    """The model under core's data parallelism, and its optimizer."""
    ddp = data_parallel(model)
    # With an epsilon of 1e-8, gradients of rounding alone move as far as the others; and in the
    # norm core counts the rows that both ranks hold twice.
    return ddp, adam_of(ddp, lr=1e-2, weight_decay=0.1, adam_eps=1e-5, clip_grad=0.0)


def step(ddp, optimizer):
    """One step of training. Returns the loss and the whole gradients by name."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    loss = ddp(TOKENS[:, :-1], labels=TOKENS[:, 1:].contiguous()).mean()
    loss.backward()
    ddp.finish_grad_sync()
    finalize_model_grads([ddp])
    gradients = main_gradients(ddp.module)
    optimizer.step()
    return loss.item(), gradients


def run(model):
    """Losses of four steps, and the gradients of the first."""
    ddp, optimizer = core_model(model.train())
    losses, first = [], None
    for _ in range(4):
        loss, gradients = step(ddp, optimizer)
        losses.append(loss)
        first = first or gradients
    return losses, first


def merged(model):
    with torch.no_grad():
        before = model(TOKENS, runtime_gather_output=True)
        merge_adapters(model)
        return before, model(TOKENS, runtime_gather_output=True)


def train(folder, layouts):
    results = {}
    for layout in layouts:
        sizes = LAYOUTS[layout]
        set_up_groups(sizes)
        model = load(folder / "base", **sizes)
        load_adapters(model, folder / "adapters")
        losses, gradients = run(model)
        save_adapters(model, folder / layout)
        save_checkpoint(model, folder / f"{layout} adapted")
        results[layout] = losses, gradients, merged(model)
        save_checkpoint(model, folder / f"{layout} merged")
    return results


def save_from_stages(folder):
    """Load and save the adapters on two pipeline stages; the error of a target that neither has."""
    set_up_groups({"pipeline_model_parallel_size": RANKS})
    stages = {"pipeline_model_parallel_size": RANKS, "pipeline_dtype": torch.float32}
    model = build_hybrid_model(small_config(f"{PATTERN[:4]}|{PATTERN[4:]}", **MORE, **stages))
    load_checkpoint(model, folder / "base")
    load_adapters(model, folder / "adapters")
    save_adapters(model, folder / "stages")
    names = list(adapters_of(model))
    try:  # where a stage has others
        fields, rank = model.lora_fields, torch.distributed.get_rank()
        model.lora_fields = replace(fields, alpha=9.0 + rank)
        merge_adapters(model)
    except ValueError as raised:
        assert re.search("the adapters' fields differs .* rank 1 on .* has .*alpha=10", str(raised))
        assert list(adapters_of(model)) == names
        model.lora_fields = fields
    merge_adapters(model)
    try:
        add_adapters(model, LoraFields(targets=["linear_qkv", "q_proj"]))
    except ValueError as error:
        return names, str(error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora")
    torch.manual_seed(5)
    model = build_hybrid_model(small_config(PATTERN, **MORE))
    save_checkpoint(model, path / "base")
    add_adapters(model, LoraFields(rank=4, alpha=8))
    fill_adapters(model)
    save_adapters(model, path / "adapters")
    return path


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    (results,) = train_on_ranks(train, 1, tmp_path_factory.mktemp("one"), folder, ["alone"])
    return results["alone"]


@pytest.fixture(scope="module")
def outcomes(folder, alone, tmp_path_factory):
    layouts = [layout for layout in LAYOUTS if layout != "alone"]
    return train_on_ranks(train, RANKS, tmp_path_factory.mktemp("two"), folder, layouts)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "alone"])
def test_two_ranks_learn_what_one_learns(outcomes, alone, folder, layout):
    losses, gradients, logits = alone
    assert losses[-1] < losses[0] - 0.1
    assert all(".lora." in name for name in gradients)
    saved = load_file(folder / "alone" / "adapter_model.safetensors")
    for outcome in outcomes:
        found_losses, found, found_logits = outcome[layout]
        assert found_losses == pytest.approx(losses, abs=1e-4)  # Adam amplifies rounding
        assert_all_close(found, gradients)
        for each in found_logits:  # before and after the merge
            torch.testing.assert_close(each, logits[0], atol=1e-3, rtol=0)
    for name, value in load_file(folder / layout / "adapter_model.safetensors").items():
        torch.testing.assert_close(value, saved[name], atol=1e-3, rtol=0)


def test_merging_changes_rounding_alone(outcomes, alone, folder):
    for layout in LAYOUTS:
        files = (
            folder / f"{layout} {kind}" / "model.safetensors" for kind in ("adapted", "merged")
        )
        adapted, written = map(load_file, files)
        assert adapted.keys() == written.keys()
        assert all(torch.equal(adapted[name], written[name]) for name in written)
    for before, after in (alone[2], *(each[2] for each in outcomes[0].values())):
        torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-5)


def test_pipeline_stages_have_the_adapters_of_their_layers(folder, tmp_path):
    (first, error), (last, _) = train_on_ranks(save_from_stages, RANKS, tmp_path, folder)
    assert not set(first) & set(last)
    assert "targets ['q_proj'] name no projection of the model" in error
    saved, expected = (
        load_file(folder / f / "adapter_model.safetensors") for f in ("stages", "adapters")
    )
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in expected}
    assert modules == {*first, *last}
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
