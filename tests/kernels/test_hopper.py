"""Configs that Triton compiles wrongly for Hopper are left out, and `info` says so."""

import json

import pytest
import triton
from compiling_process import run_compiling

from megatron_hybrid.ops import hopper
from megatron_hybrid.ops.hopper import leave_racing_configs_out, without_races
from megatron_hybrid.ops.ssd import mcore
from megatron_hybrid.tools.info import backends


def config(rows, stages, warps):
    return triton.Config({"BLOCK_SIZE_M": rows}, num_stages=stages, num_warps=warps)


RIGHT = [config(64, 1, 4), config(32, 3, 4), config(64, 3, 2)]
FOUR_WARPS, EIGHT_WARPS = config(64, 3, 4), config(128, 2, 8)
"""Four race where the first factor is in registers, eight anywhere."""
RACING = [FOUR_WARPS, EIGHT_WARPS]


def test_configs_that_can_race_are_left_out():
    assert without_races([*RACING, *RIGHT], in_registers=True) == RIGHT
    assert without_races([*RACING, *RIGHT], in_registers=False) == [FOUR_WARPS, *RIGHT]
    # All can in a deterministic mode, which has a single config.
    (one,) = without_races(RACING, in_registers=True)
    assert without_races([one], in_registers=True) == [one]


def racing_kernel():
    @triton.jit
    def racing():
        pass

    tuned = triton.autotune([config(64, 1, 4)], key=[])(racing)
    tuned.configs = [*RACING, *RIGHT]
    return tuned


@pytest.mark.parametrize("is_hopper", [True, False])
def test_configs_are_left_out_on_hopper_alone(monkeypatch, is_hopper):
    monkeypatch.setattr(hopper, "is_hopper", lambda: is_hopper)
    kernel = racing_kernel()
    assert len(leave_racing_configs_out(kernel, in_registers=True)) == is_hopper
    assert kernel.configs == (RIGHT if is_hopper else [*RACING, *RIGHT])
    assert hopper.left_out.pop(kernel, []) == (RACING if is_hopper else [])


def test_info_tells_the_remarks_of_a_backend(monkeypatch):
    monkeypatch.setattr(mcore, "REMARKS", leave_racing_configs_out(racing_kernel(), True))
    assert "mcore: 2 configs of racing left out" in backends()["ssd_scan"]


COMPILE = """
import json

import gpu_stub
import torch
import wgmma

record = gpu_stub.install(90)

from megatron.core.ssm.ops.ssd_bmm import _bmm_chunk_fwd_kernel
from megatron.core.ssm.ops.ssd_chunk_scan import _chunk_scan_fwd_kernel
from megatron.core.ssm.ops.ssd_chunk_state import _chunk_cumsum_fwd_kernel, _chunk_state_fwd_kernel
from megatron.core.ssm.ops.ssd_state_passing import _state_passing_fwd_kernel

from benchmarks.gpu.ops import FAMILIES, prefill_layout
from megatron_hybrid.ops import dispatch
from megatron_hybrid.ops.hopper import left_out
from megatron_hybrid.ops.ssd import mcore

gpu_stub.let_backends_serve_the_cpu()
for kernel in (_chunk_cumsum_fwd_kernel, _state_passing_fwd_kernel):
    kernel.configs = kernel.configs[:1]
for kernel in (_chunk_scan_fwd_kernel, _chunk_state_fwd_kernel, _bmm_chunk_fwd_kernel):
    configs = [*kernel.configs, *left_out[kernel]]
    four_warps = [one for one in configs if one.num_warps == 4 and one.kwargs["BLOCK_SIZE_M"] >= 64]
    kernel.configs = four_warps[-1:]
family = next(family for family in FAMILIES if family.op == "ssd_scan")
inputs = family.inputs(family.sizes, prefill_layout(256), torch.device("cpu"), torch.bfloat16)
mcore.run(*inputs)
races = {
    kernel.name.rpartition(".")[2]: wgmma.races(kernel.text("ttgir"))
    for kernel in record.kernels.values()
    if kernel.num_wgmma
}
print(json.dumps(races))
"""


MAXIMA = """
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_hybrid.ops.activate.triton import activate_kernel
from megatron_hybrid.ops.time_steps.triton import steps_kernel

NUMBERS = ("low", "high", "max_beta")
ACTIVATE = dict(factor_ptr=None, G=1, C=64, KIND="squared_relu", IN_FP32=False)
STEPS = dict(factor_ptr=None, beta_ptr=None, bound=None, C=64, H=0, PER_FACTOR=1, HAS_LIMITS=True)
for kernel, constants in ((activate_kernel, ACTIVATE), (steps_kernel, STEPS)):
    constants = constants | {"BLOCK": 64}
    names = kernel.function.arg_names
    kinds = {name: "fp32" if name in NUMBERS else "i32" for name in names}
    kinds |= {name: "*fp32" for name in names if name.endswith("_ptr")}
    kinds |= dict.fromkeys(constants, "constexpr")
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel.function, kinds, places)
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert set(re.findall(r"(?:max|min)[.\\w]*f32", text)) <= {"max.NaN.f32", "min.NaN.f32"}
"""


@pytest.mark.matrix
def test_a_maximum_of_nan_is_nan_on_a_gpu():
    """The interpreter takes NumPy's maximum, which is NaN in any case."""
    run_compiling("-c", MAXIMA)


@pytest.mark.matrix
def test_what_makes_rows_nan_is_found_in_what_triton_compiled():
    """Four warps: chunk_scan's first factor is in registers, the others' are in shared memory."""
    printed = run_compiling("-c", COMPILE)
    races = json.loads(printed.splitlines()[-1])
    assert races.pop("_chunk_scan_fwd_kernel")
    assert races == {"_chunk_state_fwd_kernel": [], "_bmm_chunk_fwd_kernel": []}
