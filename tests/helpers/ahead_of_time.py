"""Compiles Triton kernels for GPUs that are not there, and tells what each needs of one.

python tests/helpers/ahead_of_time.py      # a line of JSON for each kernel and GPU
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_hybrid.ops.attention import triton as attention
from megatron_hybrid.ops.conv import triton as conv
from megatron_hybrid.ops.delta_rule import triton as delta_rule
from megatron_hybrid.ops.gated_norm import triton as gated_norm
from megatron_hybrid.ops.selective_scan import triton as selective_scan
from megatron_hybrid.ops.ssd import triton as ssd

GPUS = {90: "sm_90a", 100: "sm_100a"}
"""Compute capability -> name of it for the assembler."""


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its pointers and its compile-time constants."""

    kernel: Any
    constants: dict[str, Any]
    dtype: str = "bf16"
    """Of the pointers that are not listed."""
    pointers: dict[str, str] | None = None
    """Types of the others."""
    num_warps: int = 4
    num_stages: int = 3

    @property
    def name(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.constants.items())
        return f"{self.kernel.__name__}({self.dtype}, {values})"


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs."""

    kernel: str
    gpu: str
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread, to memory."""
    shared_bytes: int


INDEX_POINTERS = (
    *("boundaries_ptr", "sequences_ptr", "chunks_ptr", "lengths_ptr", "table_ptr", "starts_ptr"),
    *("captures_ptr", "ends_ptr", "owners_ptr", "places_ptr", "firsts_ptr"),
    *("tile_sequences_ptr", "tile_firsts_ptr", "offsets_ptr", "rows_ptr", "positions_ptr"),
)
INDEX = {"slots_ptr": "i64", **dict.fromkeys(INDEX_POINTERS, "i32")}


def cases() -> Iterator[Case]:
    """Each kernel in the dtypes and shapes of published models, and of odd ones."""
    yield from ssd_cases()
    yield from attention_cases()
    yield from selective_scan_cases()
    yield from conv_cases()
    yield from delta_rule_cases()
    yield from norm_cases()


def delta_rule_cases() -> Iterator[Case]:
    shapes = [  # heads of keys and of values, channels of keys and of values, decays per channel
        (16, 32, 128, 128, False),  # Qwen3-Next
        (32, 32, 128, 128, True),  # Kimi Linear
        (4, 4, 256, 512, False),  # the largest keys
        (2, 6, 24, 20, True),
    ]
    float32 = ("g_ptr", "beta_ptr", "pool_ptr", "cum_ptr", "kept_ptr", "out_ptr")
    pointers = {**dict.fromkeys(float32, "fp32"), **INDEX}
    for H_qk, H, N, P, per_channel in shapes:
        block_n = triton.next_power_of_2(N)
        head = {"HEADS_PER_KEY": H // H_qk, "PER_CHANNEL": per_channel, "N": N, "P": P}
        eps = {"EPS": delta_rule.L2NORM_EPS}
        for dtype in ("bf16", "fp32"):
            block_t = {"BLOCK_T": max(1, delta_rule.UNIT_ELEMENTS // block_n)}
            constants = {"H_QK": H_qk, "N": N, **eps, **block_t, "BLOCK_N": block_n}
            yield Case(delta_rule.unit_kernel, constants, dtype)
            blocks = delta_rule.blocks(N, P, delta_rule.STEP_ELEMENTS)
            constants = {**head, "USE_L2NORM": True, **eps, **blocks}
            yield Case(delta_rule.step_kernel, constants, dtype, pointers)
            if (num_bytes := 2 if dtype == "bf16" else 4) * N <= delta_rule.MAX_KEY_BYTES:
                blocks, stages = delta_rule.recur_configuration(N, P, num_bytes)
                constants = {"H": H, **head, "CHUNK": 64, **blocks}
                yield Case(delta_rule.recur_kernel, constants, dtype, pointers, num_stages=stages)
            blocks = delta_rule.blocks(N, P, delta_rule.CAPTURE_ELEMENTS, least=16)
            constants = {"H": H, **head, **blocks, "ROWS": delta_rule.ROWS}
            yield Case(delta_rule.capture_kernel, constants, dtype, pointers, num_warps=8)


def attention_cases() -> Iterator[Case]:
    plain = (0, 0, False, False)  # window, chunk, soft cap, sinks
    forms = [  # query heads, key/value heads, key width, value width, dtype, bytes, pattern
        (32, 8, 128, 128, "bf16", 2, plain),  # Nemotron-H-8B
        (16, 2, 256, 256, "bf16", 2, plain),  # Qwen3-Next
        (128, 1, 576, 512, "bf16", 2, plain),  # DeepSeek's latents
        (64, 8, 64, 64, "bf16", 2, (128, 0, False, True)),  # GPT-OSS
        (8, 4, 256, 256, "bf16", 2, (4096, 0, True, False)),  # Gemma 2
        (40, 8, 128, 128, "bf16", 2, (0, 8192, False, False)),  # Llama 4
        (4, 2, 64, 64, "fp32", 4, plain),  # the demo model
        (10, 2, 80, 96, "fp32", 4, (0, 30, True, True)),
    ]
    float32 = ("partial_ptr", "maxima_ptr", "sums_ptr")
    pointers = {**dict.fromkeys(float32, "fp32"), **INDEX}
    for H, K, D, P, dtype, num_bytes, (window, chunk, softcap, sinks) in forms:
        shape = {"H": H, "P": P, "WINDOW": window, "CHUNK": chunk, "HAS_SINKS": sinks}
        for few, split in ((True, attention.SPLIT), (False, 0)):
            blocks, num_warps = attention.configuration(D, P, num_bytes, few)
            sizes = {"GROUP": H // K, "D": D, "B": 16, "HAS_SOFTCAP": softcap, "SPLIT_KEYS": split}
            constants = {**shape, **sizes, **blocks}
            yield Case(attention.attention_kernel, constants, dtype, pointers, num_warps)
        joined = {"SPLIT_KEYS": attention.SPLIT, "BLOCK_P": blocks["BLOCK_P"]}
        yield Case(attention.join_kernel, {**shape, **joined}, dtype, pointers)


def selective_scan_cases() -> Iterator[Case]:
    float32 = {"A_ptr": "fp32", "pool_ptr": "fp32", "out_ptr": "fp32"}
    for channels, N in ((8192, 16), (40, 5)):  # Jamba-mini, and an odd one
        block_n = triton.next_power_of_2(N)
        block_c = min(triton.next_power_of_2(channels), selective_scan.ELEMENTS // block_n)
        sizes = {"CHANNELS": channels, "N": N, "BLOCK_C": block_c, "BLOCK_N": block_n}
        for dtype in ("bf16", "fp32"):
            for flag in (True, False):
                constants = {**sizes, "HAS_D": flag, "HAS_CAPTURES": flag}
                yield Case(selective_scan.scan_kernel, constants, dtype, {**float32, **INDEX})


def conv_cases() -> Iterator[Case]:
    for C, K in ((10240, 4), (30, 3)):  # Nemotron-H-8B, and an odd one
        for dtype in ("bf16", "fp32"):
            sizes = {"C": C, "K": K, "BLOCK_C": conv.CHANNELS}
            for flag in (True, False):
                constants = {**sizes, "HAS_BIAS": flag, "SILU": flag, "BLOCK_T": conv.ROWS}
                yield Case(conv.conv_kernel, constants, dtype, INDEX)
            constants = {**sizes, "BLOCK_K": triton.next_power_of_2(K - 1)}
            yield Case(conv.tails_kernel, constants, dtype, INDEX)


def norm_cases() -> Iterator[Case]:
    forms = [  # groups, channels, sigmoid, norm first, weight from 1
        (8, 1280, False, False, False),  # Nemotron-H-8B
        (1, 16384, False, True, False),  # the widest
        (32, 128, False, True, False),  # Qwen3-Next
        (32, 128, True, True, True),  # Kimi-Linear's gate
        (3, 20, True, False, True),
    ]
    for G, C, sigmoid, norm_first, zero_centered in forms:
        blocks, num_warps = gated_norm.configuration(C)
        form = {"SILU": not sigmoid, "NORM_FIRST": norm_first, "ZERO_CENTERED": zero_centered}
        form["ROUNDS_NORM"] = norm_first and G > 1
        for dtype in ("bf16", "fp32"):
            constants = {"G": G, "C": C, "EPS": 1e-5, **form, **blocks}
            yield Case(gated_norm.norm_kernel, constants, dtype, num_warps=num_warps)


def ssd_cases() -> Iterator[Case]:
    shapes = [  # heads, groups, values, states
        (128, 8, 64, 128),  # Nemotron-H-8B
        (8, 1, 64, 64),  # the demo model
        (6, 3, 24, 20),
    ]
    for H, G, P, N in shapes:
        block_n = max(16, triton.next_power_of_2(N))
        for dtype in ("bf16", "fp32"):
            for has_D in (True, False):
                sizes = {"HAS_D": has_D, "HEADS_PER_GROUP": H // G, "P": P, "N": N}
                blocks = {"BLOCK_P": max(1, ssd.STEP_ELEMENTS // block_n), "BLOCK_N": block_n}
                types = {"A_ptr": "fp32", "pool_ptr": "fp32", **INDEX}
                yield Case(ssd.step_kernel, {**sizes, **blocks}, dtype, types)
            for chunk in (128,):
                sizes = {"H": H, "HEADS_PER_GROUP": H // G, "P": P, "N": N, "CHUNK": chunk}
                blocks = {"BLOCK_P": max(16, triton.next_power_of_2(P)), "BLOCK_N": block_n}
                names = ("dt_ptr", "cum_ptr", "ends_ptr", "initial_ptr", "out_ptr")
                types = {**INDEX, **dict.fromkeys(names, "fp32")}
                constants = {**sizes, **blocks, "ROWS": ssd.ROWS}
                yield Case(ssd.capture_kernel, constants, dtype, types, num_warps=8)


def compile_for(case: Case, capability: int) -> Compiled:
    """Compile a kernel down to the machine's code.

    Raises:
        Exception: as the compiler has it.
    """
    signature, attributes = {}, {}
    for place, name in enumerate(inspect.signature(case.kernel.fn).parameters):
        if name in case.constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + (case.pointers or {}).get(name, case.dtype)
            attributes[place,] = [["tt.divisibility", 16]]  # as torch allocates
        else:
            signature[name] = "fp32" if name in ("scale", "softcap") else "i32"
    source = ASTSource(case.kernel, signature, case.constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = _assemble(compiled.asm["ptx"], GPUS[capability])
    shared = compiled.metadata.shared
    return Compiled(case.name, GPUS[capability], registers, spilled, shared)


def _assemble(ptx: str, gpu: str) -> tuple[int, int]:
    """Registers and spilled bytes of a thread."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if gpu.startswith("sm_10"):
        blackwell = assembler.with_name("ptxas-blackwell")
        assembler = blackwell if blackwell.exists() else assembler
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(assembler), "-v", f"--gpu-name={gpu}", "-o", "/dev/null", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", told)[1])
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill stores", told)))


def main() -> None:
    for case in cases():
        for capability in GPUS:
            print(json.dumps(asdict(compile_for(case, capability))), flush=True)


if __name__ == "__main__":
    main()
