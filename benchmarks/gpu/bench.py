"""What the benchmarks for a GPU share: rows, timing, the device's measured limits.

All that only a CUDA device has (events, graphs, streams, its profile and memory) is called here.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_hybrid.tools.rates import duration
from megatron_hybrid.tools.roofline import Device, Work

T = TypeVar("T")

WARM_UPS = 3
"""Calls that are not counted: kernels are compiled and tuned in them."""
REPLAY_SECONDS = 0.3
"""Of the counted replays of a graph together, where that is more than 3 of them."""
CACHE_BYTES = 256 << 20
"""Several times the second-level cache of any GPU."""


@dataclass(frozen=True)
class Row:
    """One measurement or one check."""

    what: str
    seconds: float | None = None
    """None: nothing was timed."""
    bound: float | None = None
    """Least seconds by the measured limits of the device; None: on a CPU, or it has none."""
    others: dict[str, float | str] = field(default_factory=dict)
    """Name of another way to do the same -> its seconds, or why it did not run."""
    numbers: dict[str, float | str] = field(default_factory=dict)
    """What else was found: name, with a unit where it has one -> value."""
    goal: str = ""
    note: str = ""
    fault: str = ""
    """What is wrong; empty: nothing is."""

    @property
    def share(self) -> float | None:
        """Share of the roofline: 1 is the best possible."""
        return self.bound / self.seconds if self.bound and self.seconds else None

    def values(self) -> dict[str, Any]:
        """Return values for JSON."""
        return {**asdict(self), "share": self.share, "cells": self.cells()}

    def cells(self) -> tuple[str, str, str, str]:
        """Return what it is, its result, its share of the roofline, and all else. Others' times are
        in units of its own."""
        result = "ok" if self.seconds is None else duration(self.seconds)
        if self.fault:
            result = f"FAULT: {self.fault}"
        share = "" if self.share is None else f"{self.share:.0%}"
        more = [self.note] if self.note else []
        more += [f"{name} {_short(value)}" for name, value in self.numbers.items()]
        more += [
            f"{name} {cost / self.seconds:.2f}x" if isinstance(cost, float) else f"{name}: {cost}"
            for name, cost in self.others.items()
        ]
        if self.goal:
            more.append(f"goal {self.goal}")
        return self.what, result, share, "; ".join(more)


def _short(value: float | str) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class Timing(NamedTuple):
    """Times of one call."""

    seconds: float
    """On the device."""
    host_seconds: float
    """Until the host has queued it."""
    by_graph: bool
    """Whether no part of the host's time can be in the first number."""

    def numbers(self) -> dict[str, float | str]:
        """Numbers of a row, in addition to the time on the device."""
        return {"host us": self.host_seconds * 1e6, **({} if self.by_graph else {"graph": "none"})}


class Activity(NamedTuple):
    """The device's work in one call."""

    busy_seconds: float
    launches: int
    most: list[tuple[str, int, float]]
    """Those kernels that took the most time together: name, launches, seconds."""


@dataclass(frozen=True)
class Bench:
    """The device under test, and the size of what runs on it."""

    device: torch.device
    toy: bool
    limits: Device | None
    """Measured; None: of no time a share of the roofline is claimed."""
    once: bool = False
    """Whether each call is made once, so that kernels are compiled and nothing is measured."""

    @classmethod
    def start(cls, toy: bool, once: bool = False) -> Bench:
        """The CUDA device, with its limits measured unless all is called once; for toy sizes the
        CPU.

        Raises:
            RuntimeError: there is no CUDA device.
        """
        if toy:
            torch.set_num_threads(1)  # at this size more only wait for each other
            return cls(torch.device("cpu"), True, None, once)
        if not torch.cuda.is_available():
            raise RuntimeError("there is no CUDA device; --toy runs all on the CPU at toy size")
        device = torch.device("cuda", torch.cuda.current_device())
        bare = cls(device, False, None, once)
        return bare if once else cls(device, False, measured_limits(bare))

    @property
    def name(self) -> str:
        """Name of the device."""
        return "CPU, toy size" if self.toy else torch.cuda.get_device_name(self.device)

    @property
    def is_cuda(self) -> bool:
        """True where the device queues what it is asked to do."""
        return self.device.type == "cuda"

    def size(self, full: T, toy: T) -> T:
        """Choose what to run with."""
        return toy if self.toy else full

    @property
    def rounds(self) -> int:
        """Counted calls of a timing."""
        return 1 if self.toy or self.once else 20

    def timing(self, *calls: Callable[[], object], by_graph: bool = True) -> Timing:
        """Median time of a call, of several that differ in their tensors alone: together these
        should be larger than the device's cache.

        On a GPU it is the replay of a graph of all calls. What cannot be captured is queued and
        timed by events: there the host shows, where it takes longer than the device.

        Args:
            by_graph: false for calls that read host memory, which a replay would find changed.
        """
        if self.toy or self.once or not self.is_cuda:
            times = [_wall_time(call) for call in calls]
            self.wait()
            return Timing(statistics.median(times), statistics.median(times), False)
        for call in (*calls[:1] * WARM_UPS, *calls):
            call()
        self.wait()
        queued = []
        for _ in range(WARM_UPS):
            self.wait()  # for an empty queue
            queued.append(_wall_time(lambda: [call() for call in calls]) / len(calls))
        host_seconds = min(queued)
        self.wait()
        replay = _captured(calls) if by_graph else None
        if replay is None:
            self.wait()
            return Timing(self._by_events(list(calls) * self.rounds, 1), host_seconds, False)
        one = self._by_events([replay], len(calls))
        rounds = min(self.rounds, max(3, int(REPLAY_SECONDS / (one * len(calls)))))
        return Timing(self._by_events([replay] * rounds, len(calls)), host_seconds, True)

    def _by_events(self, actions: list[Callable[[], object]], count: int) -> float:
        """Median time of one of `count` calls that each action makes; they are queued."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in actions]
        for (before, after), action in zip(events, actions):
            before.record()
            action()
            after.record()
        self.wait()
        return statistics.median(a.elapsed_time(b) / 1e3 for a, b in events) / count

    def seconds(self, *calls: Callable[[], object]) -> float:
        """See `timing`."""
        return self.timing(*calls).seconds

    def sets(self, work: Work) -> int:
        """Count the sets of tensors that a timing of some work needs: see `timing`."""
        if self.toy or self.once:
            return 1
        return min(16, 1 + int(CACHE_BYTES / work.num_bytes))

    def wall_seconds(self, call: Callable[[], object]) -> float:
        """Time of one call with the device's work, as a caller sees it."""
        self.wait()
        return _wall_time(lambda: (call(), self.wait()))

    def activity(self, call: Callable[[], object], most: int = 6) -> Activity:
        """Profile one call; on a CPU torch's operators are what is counted."""
        kind = ProfilerActivity.CUDA if self.is_cuda else ProfilerActivity.CPU
        with profile(activities=[kind]) as found:
            call()
            self.wait()
        side = "device" if self.is_cuda else "cpu"
        totals = [
            (event.key, event.count, getattr(event, f"self_{side}_time_total") / 1e6)
            for event in found.key_averages()
            if event.device_type.name == ("CUDA" if self.is_cuda else "CPU")
        ]
        totals.sort(key=lambda total: -total[2])
        busy, launches = sum(t[2] for t in totals), sum(t[1] for t in totals)
        return Activity(busy, launches, totals[:most])

    def wait(self) -> None:
        """Wait until the device has done all."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def bound(self, works: Work | Iterable[Work]) -> float | None:
        """The least seconds of some work, or of several one after the other."""
        if self.limits is None:
            return None
        return sum(map(self.limits.seconds, [works] if isinstance(works, Work) else works))

    def guarded(self, what: str, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows; what fails takes a row, and not the rest of the run with it. At toy size it is
        raised. So it is where the device cannot go on."""
        try:
            yield from rows
        except Exception as error:
            if self.toy:
                raise
            traceback.print_exc()
            yield Row(what, fault=first_line(error))
            if self.is_poisoned():
                raise

    def is_poisoned(self) -> bool:
        """Return whether the device does nothing any more for this process, as after an illegal
        access."""
        try:
            self.wait()
        except Exception:
            return True
        return False

    def used_bytes(self) -> tuple[int, int]:
        """Device memory of this process's tensors, and of all processes."""
        self.free()
        free, total = torch.cuda.mem_get_info(self.device) if self.is_cuda else (0, 0)
        return torch.cuda.memory_allocated(self.device) if self.is_cuda else 0, total - free

    def free(self) -> None:
        """Give back the device memory that nobody uses any more."""
        if self.is_cuda:
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


def _captured(calls: tuple[Callable[[], object], ...]) -> Callable[[], None] | None:
    """The replay of a graph of all calls, which have been made before; None: there can be none."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:  # of whatever kind: a call waits for the device, or allocates pinned memory
        traceback.print_exc()
        return None
    graph.replay()
    return graph.replay


def first_line(error: Exception, width: int = 100) -> str:
    """Say what is wrong, in short."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:width]


def _wall_time(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measured_limits(bench: Bench) -> Device:
    """Measure what a kernel that reads and writes, and a product of large matrices, reach: better
    than what is in a data sheet to judge kernels by."""
    count = bench.size(1 << 28, 1 << 16)
    source = torch.randint(256, (count,), dtype=torch.int32, device=bench.device)
    target = torch.empty_like(source)
    # By a kernel: in a graph a plain copy is one of the copy engine, which moved 2.8 TB/s where
    # kernels of an H200 move 4.
    bandwidth = 2 * 4 * count / bench.seconds(lambda: torch.bitwise_not(source, out=target))
    n = bench.size(8192, 64)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    flops = 2 * n**3 / bench.seconds(lambda: a @ b)
    if bench.is_cuda:
        memory, name = torch.cuda.mem_get_info(bench.device)[1], torch.cuda.get_device_name()
    else:
        memory, name = 0, "CPU"
    return Device(name, flops, bandwidth, memory, "a kernel and a product, measured")
