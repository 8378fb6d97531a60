"""Configs that Triton compiles wrongly for Hopper are left out, and `info` says so."""

import pytest
import triton

from megatron_hybrid.ops import hopper
from megatron_hybrid.ops.hopper import leave_racing_configs_out, without_races
from megatron_hybrid.ops.ssd import mcore
from megatron_hybrid.tools.info import backends


def config(rows, stages, warps):
    return triton.Config({"BLOCK_SIZE_M": rows}, num_stages=stages, num_warps=warps)


RIGHT = [config(64, 1, 4), config(32, 3, 4), config(64, 3, 2)]
RACING = [config(64, 3, 4), config(128, 2, 8)]


def test_configs_that_can_race_are_left_out():
    assert without_races([*RACING, *RIGHT]) == RIGHT
    (one,) = without_races(RACING)  # as in a deterministic mode, which has a single config
    assert without_races([one]) == [one]


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
    assert len(leave_racing_configs_out(kernel)) == is_hopper
    assert kernel.configs == (RIGHT if is_hopper else [*RACING, *RIGHT])
    assert hopper.left_out.pop(kernel, []) == (RACING if is_hopper else [])


def test_info_tells_the_remarks_of_a_backend(monkeypatch):
    monkeypatch.setattr(mcore, "REMARKS", leave_racing_configs_out(racing_kernel()))
    assert "mcore: 2 configs of racing left out" in backends()["ssd_scan"]
