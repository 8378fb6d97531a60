"""A GPU that is not there, for Triton: kernels are compiled as for a launch on it, and do not run.

`install` sets a Triton driver. From then on a launch with tensors of the CPU goes the way of a
launch on that GPU: strides, pointers and constants are specialised, the kernel is compiled down to
the machine's code, its shared memory and its grid are checked against the GPU's limits. Only the
launch itself does nothing, so outputs keep what was in their memory before.
"""

import contextlib
import dataclasses
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Device:
    """What Triton and kernels' launchers ask of a GPU."""

    name: str
    capability: int
    """Compute capability: 90 is 9.0."""
    num_multiprocessors: int
    memory_bytes: int
    shared_bytes: int = 227 << 10
    """The most that a block may have."""


DEVICES = {
    90: Device("NVIDIA H100 80GB HBM3", 90, 132, 80 << 30),
    100: Device("NVIDIA B200", 100, 148, 180 << 30),
}
"""By compute capability."""

MAX_GRID = (2**31 - 1, 65535, 65535)
"""Blocks of a launch in each dimension."""


@dataclass
class Kernel:
    """A compiled kernel."""

    name: str
    """Module and function."""
    gpu: str
    """Compute capability as the assembler has it: "sm_90"."""
    options: dict[str, int]
    """num_warps and num_stages."""
    constants: dict[str, Any]
    """Compile-time arguments: `constexpr` ones, those that are None, and integers that are 1."""
    divisible: frozenset[str]
    """Other arguments that are known to be multiples of 16."""
    shared_bytes: int
    """Of a block."""
    files: dict[str, Path]
    """What each stage of the compiler left, by extension: ttgir, ptx, cubin, ..."""

    def text(self, stage: str) -> str:
        """What a stage of the compiler left, such as "ttgir" or "ptx"."""
        return self.files[stage].read_text()

    @property
    def registers(self) -> int:
        """Of a thread."""
        return self._usage["REG"]

    @property
    def spilled_bytes(self) -> int:
        """Of a thread's stack. Triton's kernels have one for registers that were spilled alone."""
        return self._usage["STACK"]

    @cached_property
    def num_wgmma(self) -> int:
        """Products of matrices by a warp group, of Hopper."""
        return len(re.findall(r"\bwgmma\.mma_async\b", self.text("ptx")))

    @cached_property
    def _usage(self) -> dict[str, int]:
        """As the file of the machine's code has it, by the tool that Triton brings."""
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(self.files["cubin"])]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", told)}


@dataclass
class Record:
    """What was compiled since `install`."""

    device: Device
    kernels: dict[str, Kernel] = field(default_factory=dict)
    """By Triton's hash of all that the machine's code depends on, in the order of compilation."""


def install(capability: int = 90) -> Record:
    """Set the driver, and answer what launchers ask `torch.cuda`, to the end of the process.

    Call it before fla-core is imported, which asks for its device then, and before the first
    launch.

    Args:
        capability: a key of `DEVICES`.

    Raises:
        RuntimeError: Triton's interpreter is on.
    """
    if knobs.runtime.interpret:
        raise RuntimeError(
            "TRITON_INTERPRET is set, so kernels would be interpreted and not compiled; unset it"
        )
    record = Record(DEVICES[capability])
    triton.runtime.driver.set_active(_Driver(record))
    knobs.compilation.listener = _Listener(record)
    _answer_for_cuda(record.device)
    return record


class NotedCompiles:
    """Compiles nothing from now on: no kernel is launched, and those are noted that a launch would
    have compiled. Make it after `install`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Module and function of each."""
        self.places: list[tuple[dict, Any]] = []
        """Where its launches look for each."""
        noted, nothing = self, SimpleNamespace(function=None, packed_metadata=None)
        nothing.run = nothing.launch_metadata = lambda *_: None

        def note(self: JITFunction, key: Any, signature: Any, device: int, *_: Any) -> Any:
            noted.names.append(f"{self.module}.{self.__name__}")
            kernels = self.device_caches[device][0]
            kernels[key] = nothing
            noted.places.append((kernels, key))
            return nothing

        JITFunction._do_compile = note

    def forget(self) -> None:
        """Begin anew, as if nothing were compiled."""
        for kernels, key in self.places:
            del kernels[key]
        self.names.clear()
        self.places.clear()


def one_config() -> None:
    """Cut the configs of autotuned kernels that are defined from now on to the last one: its blocks
    are often the largest, and its programs the fewest."""
    original = Autotuner.__init__

    def init(self, fn, arg_names, configs, *args, **kwargs):
        original(self, fn, arg_names, list(configs)[-1:], *args, **kwargs)

    Autotuner.__init__ = init


def let_backends_serve_the_cpu() -> None:
    """Let the backends of our ops that are for CUDA devices serve tensors of the CPU."""
    from megatron_hybrid.ops import dispatch, kernels

    kernels._on_device_of = lambda inputs: contextlib.nullcontext()
    for op in dispatch.OPS.values():
        op.backends = [dataclasses.replace(own, device_type=None) for own in op.backends]


class _Driver:
    """What Triton asks of a driver."""

    def __init__(self, record: Record) -> None:
        self.utils = _Utils(record.device)
        self.launcher_cls = lambda source, metadata: _Launcher(record.kernels[metadata.hash])
        self._target = GPUTarget("cuda", record.device.capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable:
        """One call of each config, which compiles it; the first that fits is the fastest."""

        def benchmark(call: Callable, quantiles: Sequence[float] = (0.5,), **_: Any) -> list[float]:
            call()
            return [1.0] * len(quantiles)

        return benchmark


class _Utils:
    """What Triton asks of the driver's library."""

    def __init__(self, device: Device) -> None:
        self._properties = {
            "max_shared_mem": device.shared_bytes,
            "multiprocessor_count": device.num_multiprocessors,
        }

    def get_device_properties(self, device: int) -> dict[str, int]:
        return self._properties

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        """Module, function, registers, spills, threads of a block at most."""
        return 1, 1, 0, 0, 1024


class _Launcher:
    """Launches of a kernel, which are checked."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __call__(self, x: int, y: int, z: int, *_: Any) -> None:
        if not all(0 < size <= most for size, most in zip((x, y, z), MAX_GRID)):
            raise ValueError(
                f"{self._kernel.name} is launched in a grid of {(x, y, z)} blocks; it takes from "
                f"1 to {MAX_GRID}. Put more work into a block, or leave an empty launch out"
            )


class _Listener:
    """Triton calls it for each kernel that it compiled, or found compiled on disk."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def __call__(
        self, src: Any, metadata: dict[str, Any], metadata_group: dict[str, str], **_: Any
    ) -> None:
        function, names = src.fn, src.fn.arg_names
        paths = [Path(path) for path in metadata_group.values()]
        divisible = {
            names[place]
            for (place, *_), attributes in src.attrs.items()
            if ["tt.divisibility", 16] in attributes
        }
        kernel = Kernel(
            name=f"{function.__module__}.{function.__name__}",
            gpu=f"sm_{self._record.device.capability}",
            options={name: metadata[name] for name in ("num_warps", "num_stages")},
            constants={names[place]: value for (place, *_), value in src.constants.items()},
            divisible=frozenset(divisible),
            shared_bytes=metadata["shared"],
            files={path.suffix[1:]: path for path in paths},
        )
        self._record.kernels.setdefault(metadata["hash"], kernel)


def _answer_for_cuda(device: Device) -> None:
    """Launchers ask which device is current, and what it is."""
    capability = divmod(device.capability, 10)
    properties = SimpleNamespace(
        name=device.name,
        major=capability[0],
        minor=capability[1],
        total_memory=device.memory_bytes,
        multi_processor_count=device.num_multiprocessors,
        shared_memory_per_block_optin=device.shared_bytes,
        warp_size=32,
    )
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda *_: None
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_name = lambda *_: device.name
    torch.cuda.get_device_properties = lambda *_: properties
