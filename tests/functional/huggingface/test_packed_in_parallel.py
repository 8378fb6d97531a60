"""Packed folders on several ranks: each takes its pieces of codes and scales. Together they
compute, to the bit, what they do with the numbers that these stand for, and write it back."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from huggingface import build
from model_folders import rewrite
from packed_folders import stored_bytes, write_folders
from rank_processes import on_ranks
from reference import greedy, tiny_engine

import megatron_hybrid as mh
from megatron_hybrid.checkpoints.checkpoint import (
    load_checkpoint,
    save_checkpoint,
    save_huggingface,
)
from megatron_hybrid.checkpoints.model_tensors import own_tensors
from megatron_hybrid.checkpoints.tensor_files import CheckpointError

PROJECTIONS = r"((q|k|v|o|gate|up|down)_proj|in_proj_qkvz|(in|out)_proj|experts\.\d+\.\w+)$"
MODELS = {
    # Blocks of 128 lie across the ranks' columns and rows.
    "qwen3_next": {PROJECTIONS: "fp8-block"},
    "nemotron_h_moe": {r"experts\.\d+\.\w+$": "modelopt-nvfp4", PROJECTIONS: "modelopt-fp8"},
    "llama": {PROJECTIONS: "ct-w4a16-asymmetric"},
}
LAYOUTS = [
    ("qwen3_next", {"tensor_model_parallel_size": 2}),
    ("qwen3_next", {"pipeline_model_parallel_size": 2}),
    ("nemotron_h_moe", {"expert_model_parallel_size": 2}),
    ("nemotron_h_moe", {"tensor_model_parallel_size": 2}),
    ("llama", {"tensor_model_parallel_size": 2}),
]


@torch.no_grad()
def answers(folder: Path, **sizes) -> list:
    """Greedy tokens and their log-probs."""
    model, _ = mh.load_pretrained(folder, **sizes)
    engine = tiny_engine(model, max_requests=2, max_tokens=64, max_sequence_length=128)
    prompts = [[5 + 3 * i + k for k in range(30)] for i in range(2)]
    results = engine.generate(prompts, greedy(6, return_log_probs=True))
    found = [(r.token_ids, r.log_probs[-6:]) for r in results]
    save_huggingface(model, folder.parent / f"{folder.name}-back")
    return found


def assert_same_answers(folder: Path, sizes: dict) -> None:
    assert answers(folder / "packed", **sizes) == answers(folder / "plain", **sizes)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "sizes"), LAYOUTS, ids=str)
def test_ranks_share_packed_weights(tmp_path, name, sizes):
    source = tmp_path / "source"
    build(name).to(torch.bfloat16).save_pretrained(source)
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    folder = tmp_path / "ranks"
    packed, _ = write_folders(
        source, folder, MODELS[name], config if name == "nemotron_h_moe" else None
    )
    on_ranks(assert_same_answers, 2, folder, folder, sizes)
    assert stored_bytes(folder / "packed-back") == stored_bytes(packed)


def held(model: mh.HybridModel) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a rank."""
    return {name: tensor.detach().clone() for name, tensor in own_tensors(model).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def run_failures(folder: Path) -> None:
    sizes, given = {"tensor_model_parallel_size": 2}, ("new", "broken")[dist.get_rank()]
    for kind in ("plain", "packed"):
        model, _ = mh.load_pretrained(folder / "old" / kind, **sizes)
        before = held(model)
        for other in ("packed", "plain"):
            with pytest.raises(CheckpointError, match=r"not in .*, but the model has"):
                load_checkpoint(model, folder / given / other)
            assert_equal(held(model), before)
    new, _ = mh.load_pretrained(folder / "new" / "packed", **sizes)
    with tiny_engine(model) as engine:
        engine.start_weight_update()
        engine.receive_weights({"path": str(folder / "new" / "packed")})
        engine.finish_weight_update()
        assert_equal(held(model), held(new))


@pytest.mark.matrix
def test_a_load_that_fails_on_one_rank_changes_no_rank(tmp_path):
    formats = {PROJECTIONS: "fp8-block"}
    for i, kind in enumerate(("old", "new", "broken")):
        source = tmp_path / f"{kind}-source"
        build("qwen3_next", seed=i).to(torch.bfloat16).save_pretrained(source)
        for folder in write_folders(source, tmp_path / kind, formats):
            if kind == "broken":
                rewrite(folder, lambda t: _without(t, "model.norm.weight"))
    on_ranks(run_failures, 2, tmp_path, tmp_path)


def run_stages(folder: Path, words: dict[str, str]) -> None:
    for name, text in words.items():
        with pytest.raises(CheckpointError, match=text):
            mh.load_pretrained(folder / name, pipeline_model_parallel_size=2)
    model, _ = mh.load_pretrained(folder / "ours", pipeline_model_parallel_size=2)
    before = held(model)
    with pytest.raises(CheckpointError, match=r"in .*ours-extra, but .* not have extra"):
        load_checkpoint(model, folder / "ours-extra")
    assert_equal(held(model), before)


def test_stages_find_what_no_stage_has_and_what_is_nan(tmp_path):
    """A bias that config.json does not announce, a missing tensor of either stage."""
    source = tmp_path / "source"
    build("llama").to(torch.bfloat16).save_pretrained(source)
    save_checkpoint(mh.load_pretrained(source)[0], tmp_path / "ours")
    first, last = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 2))
    vector = torch.ones(2)
    bias = "model.layers.0.self_attn.q_proj.bias"
    faults = {
        "bias": (lambda t: t | {bias: vector}, f"in .*, but the model does not have {bias}"),
        "first": (lambda t: _without(t, first), f"not in .*, but the model has {first}"),
        "last": (lambda t: _without(t, last), f"not in .*, but the model has {last}"),
        "nan": (lambda t: t | {last: t[last] * torch.nan}, f"{last} has numbers that are NaN"),
    }
    for name, (change, _) in faults.items():
        rewrite(source, change, tmp_path / name)
    rewrite(tmp_path / "ours", lambda t: t | {"extra": vector}, tmp_path / "ours-extra")
    words = {name: text for name, (_, text) in faults.items()}
    on_ranks(run_stages, 2, tmp_path, tmp_path, words)


def _without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {each: tensor for each, tensor in tensors.items() if each != name}
