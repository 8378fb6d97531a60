"""What models launch compiles for GPUs that are not there, and needs no more than they have; what a
first run and an engine launch there compiles, and rows come."""

import ast
import json
import re
from types import SimpleNamespace

import pytest
from ahead_of_time import FORMS
from compiling_process import HELPERS, ROOT, run_compiling
from matrix import matrix_rows
from triton.runtime.autotuner import Config
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.autotuned import Chosen, NoFit
from benchmarks.gpu.first_run import AUTOTUNED, MARK, MODELS, OPS, TESTS, main

KERNELS = ROOT / "megatron_hybrid" / "ops"
SHARED_BYTES = 227 << 10
"""Of a block, on all of them."""
MAX_REGISTERS = 255
"""Of a thread, on all of them."""
CHOSEN_BYTES = 32
"""The assembler spills up to so many where that lets one more block run beside the others, with
registers left. More, or any with no register left, are spilled because it needs registers."""
ALL_KINDS = (
    "nemotron_h_8b:bfloat16",  # Mamba-2; heads of 128
    "odd:float32",  # all layers; windows, chunks, soft caps, sinks
)
"""`make compile-kernels` has the rest."""
HOPPER = (
    "kimi_linear_48b_a3b:bfloat16",  # Kimi Delta Attention; latents of 576
    "jamba_1_5_mini:bfloat16",  # Mamba-1
    "qwen3_5_4b:bfloat16",  # heads of 256
)


WIDTHS = ("64x64", "96x96", "160x160", "192x192", "256x256", "320x320", "512x512")
UNEQUAL = ("192x128", "576x512")
HEADS = tuple(f"heads_{widths}:bfloat16" for widths in ("192x192", "256x256", "512x512"))
OTHER_HEADS = tuple(f"{form}_{widths}:bfloat16" for form in FORMS for widths in (*WIDTHS, *UNEQUAL))


def kernels_of_ours() -> set[str]:
    """Module and name of each function of a kernel that is launched."""
    found = set()
    for path in KERNELS.glob("*/triton*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(f"{path.parent.name}.{path.stem}.{node.name}")
    return found


def is_short_of_registers(kernel: dict) -> bool:
    allowed = CHOSEN_BYTES if kernel["registers"] < MAX_REGISTERS else 0
    return kernel["spilled_bytes"] > allowed


@pytest.mark.parametrize(
    ("gpu", "models"),
    matrix_rows(
        [(90, ALL_KINDS), (90, HEADS), (90, HOPPER), (90, OTHER_HEADS), (100, ALL_KINDS)],
        (90, ALL_KINDS),
    ),
)
def test_kernels_fit_into_registers_and_shared_memory_and_do_not_race(gpu, models):
    printed = run_compiling(str(HELPERS / "ahead_of_time.py"), *models, "--gpu", str(gpu))
    compiled = [json.loads(line) for line in printed.splitlines()]
    if set(ALL_KINDS) <= set(models):
        assert {one["kernel"] for one in compiled} == kernels_of_ours()
    assert {one["gpu"] for one in compiled} == {f"sm_{gpu}"}

    # A launch knows that neighbours in memory are neighbours, and that rows begin at 16 bytes.
    rows = [one for one in compiled if one["kernel"] == "attention.triton.attention_kernel"]
    assert all(one["constants"]["stride_k_dim"] == 1 for one in rows)
    assert {"k_ptr", "stride_k_row", "stride_k_page"} <= set(rows[0]["divisible"])

    assert [one for one in compiled if one["shared_bytes"] > SHARED_BYTES] == []
    assert [one for one in compiled if is_short_of_registers(one)] == []
    assert [one for one in compiled if one["races"]] == []

    # Prefills of all heads multiply by warp groups, and spill nothing.
    heads = [one for one in compiled if one["model"].partition("_")[0] in FORMS]
    assert {f"{one['model']}:{one['dtype']}" for one in heads} == {*models} & {*HEADS, *OTHER_HEADS}
    assert [one for one in heads if one["num_wgmma"] == 0 or one["spilled_bytes"]] == []

    # One for all calls of a model: else the order of sums would differ between them.
    scans = [one for one in compiled if one["kernel"] == "selective_scan.triton.scan_kernel"]
    assert len(scans) == len({one["model"] for one in scans})


NOT_COMPUTED = re.compile(
    r"(error [^,]+, at most [\d.e-]+|other bits in 3 runs|padding rows are not zero"
    r"|other bits than launched)(, |$)"
)
"""What checks say of kernels that did not run."""


@pytest.mark.parametrize("which", matrix_rows(["kept", "others"], "kept"))
def test_each_part_runs_to_its_end_and_only_values_are_wrong(which):
    rows, ends, found = [], {}, []
    for line in run_compiling(str(HELPERS / "stubbed_parts.py"), which).splitlines():
        if line.startswith(MARK):
            found.append(json.loads(line.removeprefix(MARK)))
        elif line.startswith("END "):
            _, code, title = line.split(maxsplit=2)
            ends[title], rows = (int(code), found), rows + found
            found = []
    wrong = {row["what"]: NOT_COMPUTED.sub("", row["fault"]) for row in rows}
    assert {what: fault for what, fault in wrong.items() if fault} == {}
    assert {title: code for title, (code, _) in ends.items() if code} == {}
    others = {"configs kimi_delta_attention", "check kimi_delta_attention bf16"}
    others |= {f"serving {model}" for model in MODELS[1:]} | {f"compile serving {MODELS[0]}"}
    kept = {f"check {op} bf16" for op in OPS} | {f"configs {op}" for op in AUTOTUNED}
    kept |= {f"serving {MODELS[0]}", f"compile ops {OPS[1]}", "ops", "environment"}
    kept |= {f"graphs {MODELS[0]}", "ops packed_linear", *(f"tests {file}" for file in TESTS)}
    expected = others if which == "others" else kept - others
    assert expected <= {title for title, (_, rows) in ends.items() if rows}
    if which == "others":
        return
    _, replayed, resumed, _ = ends[f"graphs {MODELS[0]}"][1]
    assert min(row["numbers"]["replayed"] for row in (replayed, resumed)) > 0
    configs = [rows for title, (_, rows) in ends.items() if title.startswith("configs ")]
    kernels = {row["what"].split(",")[0] for rows in configs for row in rows}
    assert {"_chunk_scan_fwd_kernel", "_bmm_chunk_fwd_kernel", "chunk_fwd_kernel_o"} <= kernels
    served = {row["note"] for row in ends["ops"][1]}
    assert served == {"triton", "mcore", "fla", "grouped_mm"}


@pytest.mark.matrix
def test_a_call_runs_its_parts_as_processes(monkeypatch, tmp_path):
    monkeypatch.delenv("TRITON_INTERPRET")
    places = ["--results", str(tmp_path), "--logs", str(tmp_path)]
    assert main(["quick", "--toy", "--parts", "environment", "--seconds", "2400", *places]) == 0
    (table,) = tmp_path.glob("*.md")
    assert "| environment | " in table.read_text() and "| well |" in table.read_text()
    assert "backends of ssd_scan" in table.read_text()


def test_the_config_of_least_risk_that_fits_is_the_one_that_runs():
    risky, split, single = (
        Config({"BLOCK": 64}, num_warps=4, num_stages=3),
        Config({"BLOCK": 32}, num_warps=2, num_stages=5),
        Config({"BLOCK": 128}, num_warps=8, num_stages=1),
    )
    configs = [risky, split, single]
    kernel = SimpleNamespace(arg_names=[], configs=configs, prune_configs=lambda _: configs)
    kernel.base_fn = SimpleNamespace(__name__="scan_kernel")

    def run(kernel):
        (config,) = kernel.configs
        if config is single:
            raise OutOfResources(300, 227, "shared memory")
        return config

    choice = Chosen(compiles_all=False)
    assert choice.run(kernel, run, (), {}) is split and kernel.configs is configs
    assert choice.found == {"scan_kernel": [single, split, risky]}
    for config in (split, risky):
        choice.of["scan_kernel"] = config
        assert choice.run(kernel, run, (), {}) is config
    choice.of["scan_kernel"] = single
    with pytest.raises(NoFit, match="shared memory"):
        choice.run(kernel, run, (), {})


PATTERN = "MGKSC*+WLE-"


def test_a_warm_up_compiles_all_that_later_requests_launch():
    found = json.loads(run_compiling(str(HELPERS / "compiles.py"), PATTERN))
    stats = found["stats"]
    assert stats["preemptions"] and stats["fetches"] and stats["checkpoints_evicted"]

    assert len(found["made"]) > 50
    assert {kind: kernels for kind, kernels in found["later"].items() if kernels} == {}
    # Without it the first request waits for the same ones, and the second for none.
    first, *others = found["cold"].values()
    assert sorted(first) == sorted(found["made"]) and others == [[], []]
