"""Folders that packages of quantization wrote: answered as the packages' own weights answer, cold,
warm and over two ranks, or refused with a text that says what is missing.

`make test-quantizers` installs the packages (requirements.txt), and runs this. A package that does
not run on a CPU writes by its functions of packing; see `write_folders.py`.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import write_folders
from rank_processes import on_ranks
from reference import greedy, tiny_engine
from safetensors.torch import load_file

import megatron_hybrid as mh
from megatron_hybrid.models.packed_weight import PackedWeight

TESTS = Path(__file__).parents[1]
BOUND = 1e-5
"""Of logits that are equal: their largest difference, over the largest logit."""


@dataclass(frozen=True)
class Broken:
    """The package itself fails to write the folder, with this error."""

    error: str


STACKED = r"in one tensor of torch.float8_e4m3fn in .*, with its scale in .*down_proj_weight_scale"
UNEXPECTED = Broken("WQLinear_GEMM.__init__() got an unexpected keyword")
TURNED_DOWN: dict[tuple[str, str], str | Broken] = {
    ("gptqmodel", "gptq-gpt_oss"): "GPTQModel packs each half of them as one",
    ("gptqmodel", "gptq-llama4"): Broken(
        "layer module item `feed_forward.experts.0.gate_proj` not found"
    ),
    ("gptqmodel", "gptq-granitemoehybrid"): Broken("has no attribute 'torch_forward'"),
    ("modelopt", "fp8-gpt_oss"): STACKED,
    ("modelopt", "fp8-llama4"): STACKED,
    ("auto_round", "auto_round-asymmetric"): UNEXPECTED,
    ("auto_round", "auto_round-auto_awq"): UNEXPECTED,
    ("torchao", "int8"): "quant_method='torchao'",
}
"""By package and row of `write_folders.py`: why a folder is refused here, or was not written. All
others are equal."""
ROWS = [(package, row) for package, rows in write_folders.ROWS.items() for row in rows]
PROMPT = list(range(3, 43))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Where a package has written a row, with all others of the same model."""
    root = tmp_path_factory.mktemp("written")
    paths = (TESTS.parent, TESTS / "helpers", TESTS / "functional" / "huggingface")

    def place(package: str, row: str) -> Path:
        folder = root / package
        if not (folder / row).exists():
            done = subprocess.run(
                [sys.executable, write_folders.__file__, package, str(folder), row],
                cwd=root,  # where they leave logs and more
                env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert done.returncode == 0, done.stdout[-3000:]
            print(json.loads((folder / "version.json").read_text()))
        return folder / row

    return place


def loaded(folder: Path, **sizes) -> mh.HybridModel:
    return mh.load_pretrained(folder / "model", dtype=torch.float32, **sizes)[0]


def answers(model: mh.HybridModel) -> list:
    """Tokens and log-probs, cold, and once more from the cache."""
    params = greedy(6, return_log_probs=True, skip_prompt_log_probs=True)
    with tiny_engine(model, cache_bytes=16 << 20, max_sequence_length=128) as engine:
        found = []
        for skipped in (False, True):
            (result,) = engine.generate([PROMPT], params)
            assert (result.prefix.skipped_tokens > 0) == skipped
            found.append((result.token_ids, result.log_probs[-6:]))
        return found


def answers_on_rank(folder: Path, size: str) -> list:
    sizes = {f"{size}_model_parallel_size": 2}
    if size == "tensor" and "gpt_oss" in folder.name:
        sizes["expert_tensor_parallel_size"] = 1  # experts with biases stay whole
    return answers(loaded(folder, **sizes))


@pytest.mark.parametrize(("package", "row"), ROWS, ids=map("-".join, ROWS))
def test_a_folder_of_a_package_is_equal_or_refused(folder_of, package, row):
    folder, refusal = folder_of(package, row), TURNED_DOWN.get((package, row))
    error = (folder / "error.txt").read_text() if (folder / "error.txt").exists() else ""
    if isinstance(refusal, Broken):
        assert refusal.error in error, "the package writes this row now: change the table"
        return
    assert not error, error
    if refusal is not None:
        with pytest.raises(ValueError, match=refusal):
            loaded(folder)
        return
    model = loaded(folder)
    assert any(isinstance(module, PackedWeight) for module in model.modules())
    expected = load_file(folder / "logits.safetensors")["logits"]
    with torch.no_grad():
        found = model(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], None)[0]
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    print(f"{package} {row}: {difference:.1e}")
    assert difference < BOUND
    cold, warm = answers(model)
    assert cold[0] == warm[0]
    assert cold[0][0] == expected[-1].argmax()
    for size in ("tensor", "pipeline"):
        first, _ = on_ranks(answers_on_rank, 2, folder / size, folder, size)
        for ranks, alone in zip(first, (cold, warm), strict=True):
            assert ranks[0] == alone[0]
            assert ranks[1] == pytest.approx(alone[1], abs=1e-4)
