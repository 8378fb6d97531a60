"""What the benchmarks for a GPU share: timing, the device's measured limits, results."""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from megatron_hybrid.tools.rates import duration
from megatron_hybrid.tools.roofline import Device, Work

T = TypeVar("T")

WARM_UPS = 3
"""Calls that are not counted: kernels are compiled and tuned in them."""


@dataclass(frozen=True)
class Result:
    """One measurement."""

    what: str
    seconds: float | None
    """None: it did not run; the note says why."""
    bound: float | None = None
    """Least seconds by the measured limits of the device; None: on a CPU, or it has none."""
    others: dict[str, float | str] = field(default_factory=dict)
    """Name of another way to do the same -> its seconds, or why it did not run."""
    goal: str = ""
    note: str = ""

    @property
    def share(self) -> float | None:
        """Of the roofline: 1 is the best possible."""
        return None if None in (self.bound, self.seconds) else self.bound / self.seconds

    def cells(self) -> tuple[str, str, str, str, str]:
        """What it is, time, share of the roofline, others' times in units of its own, goal."""
        time_cell = "-" if self.seconds is None else duration(self.seconds)
        if self.note:
            time_cell += f" ({self.note})"
        others = [
            f"{name} {cost / self.seconds:.2f}x" if isinstance(cost, float) else f"{name}: {cost}"
            for name, cost in self.others.items()
        ]
        share = "" if self.share is None else f"{self.share:.0%}"
        return self.what, time_cell, share, "; ".join(others), self.goal


@dataclass(frozen=True)
class Bench:
    """The device under test, and the size of what runs on it."""

    device: torch.device
    toy: bool
    limits: Device | None
    """Measured; None: on a CPU, of whose times no share of a roofline is claimed."""

    @classmethod
    def start(cls, toy: bool) -> Bench:
        """The CUDA device, after a measurement of its limits; without one, or for toy sizes on
        request, the CPU."""
        if toy or not torch.cuda.is_available():
            torch.set_num_threads(1)  # at this size more only wait for each other
            return cls(torch.device("cpu"), True, None)
        device = torch.device("cuda", torch.cuda.current_device())
        bare = cls(device, False, None)
        return cls(device, False, measured_limits(bare))

    @property
    def name(self) -> str:
        """Of the device."""
        return torch.cuda.get_device_name(self.device) if self.limits else "CPU, toy size"

    def size(self, full: T, toy: T) -> T:
        """What to run with."""
        return toy if self.toy else full

    @property
    def rounds(self) -> int:
        """Counted calls of a timing."""
        return self.size(20, 1)

    def seconds(self, call: Callable[[], object], rounds: int | None = None) -> float:
        """Median time of a call. On a GPU calls are queued one behind the other, so the host's
        part shows only where it takes longer than the device's."""
        rounds = rounds or self.rounds
        for _ in range(self.size(WARM_UPS, 0)):
            call()
        if self.device.type != "cuda":
            return statistics.median(_wall_time(call) for _ in range(rounds))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        torch.cuda.synchronize()
        for before, after in events:
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) / 1e3 for before, after in events)

    def wall_seconds(self, call: Callable[[], object]) -> float:
        """Time of one call with the device's work, as a caller sees it."""
        self.wait()
        return _wall_time(lambda: (call(), self.wait()))

    def wait(self) -> None:
        """Until the device has done all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def bound(self, works: Work | Iterable[Work]) -> float | None:
        """The least seconds of some work, or of several one behind the other."""
        if self.limits is None:
            return None
        return sum(map(self.limits.seconds, [works] if isinstance(works, Work) else works))

    def guarded(self, what: str, results: Iterable[Result]) -> Iterator[Result]:
        """The results; on a GPU what fails takes a row, and not the rest of the run with it."""
        try:
            yield from results
        except Exception as error:
            if self.toy:
                raise
            traceback.print_exc()
            yield Result(what, None, note=first_line(error))

    def free(self) -> None:
        """Give back the device memory that nobody uses any more."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def others(
        self, makers: dict[str, Callable[[], Callable[[], object]]]
    ) -> dict[str, float | str]:
        """Times of other ways to do the same.

        Args:
            makers: name -> a function that imports what it needs and returns the call.
        """
        times: dict[str, float | str] = {}
        for name, make in makers.items():
            try:
                times[name] = self.seconds(make())
            except Exception as error:  # of whatever kind: it is not ours
                times[name] = first_line(error)
        return times


def first_line(error: Exception) -> str:
    """What is wrong, in short."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:60]


def _wall_time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measured_limits(bench: Bench) -> Device:
    """What a copy and a product of large matrices reach: better than what is in a data sheet to
    judge kernels by."""
    source = torch.empty(bench.size(1 << 30, 1 << 16), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / bench.seconds(lambda: target.copy_(source))
    n = bench.size(8192, 64)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    flops = 2 * n**3 / bench.seconds(lambda: a @ b)
    if bench.device.type == "cuda":
        memory, name = torch.cuda.mem_get_info(bench.device)[1], torch.cuda.get_device_name()
    else:
        memory, name = 0, "CPU"
    return Device(name, flops, bandwidth, memory, "a copy and a product, measured")
