"""What models launch compiles for GPUs that are not there, and needs no more than they have."""

import ast
import json

import pytest
from ahead_of_time import FORMS
from compiling_process import HELPERS, ROOT, run_compiling
from matrix import matrix_rows

OPS = ROOT / "megatron_hybrid" / "ops"
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
    for path in OPS.glob("*/triton*.py"):
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
