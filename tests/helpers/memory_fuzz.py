"""Engine steps of which every other one meets failing allocations, of numpy or torch: one, 5 or 40.

`python tests/helpers/memory_fuzz.py --steps 100000` (`make soak`) prints what was lost: nothing.
"""

import argparse
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from failing_allocator import FailingAllocator
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.utils.out_of_memory import is_lack_of_memory

CONFIGURATIONS = {
    "hybrid, host memory and disk": (
        "MG*-W-",
        {"cache_bytes": 200 << 10, "host_cache_bytes": 300 << 10, "cache_dir": "disk"},
    ),
    "hybrid, int8, host memory": (
        "MG*-",
        {"cache_bytes": 120 << 10, "host_cache_bytes": 1 << 20, "state_encoding": "int8"},
    ),
    "hybrid, short of pages": ("M*-", {"cache_bytes": 60 << 10}),
    "hybrid, preempting": ("M*-", {"cache_bytes": 40 << 10}),
    "full attention, host memory": (
        "*-",
        {"cache_bytes": 60 << 10, "host_cache_bytes": 200 << 10},
    ),
    "memory only": ("MG*-", {"cache_bytes": 120 << 10, "prefix_caching": "memory_only"}),
}
NUM_PROMPTS, MAX_ANSWER = 24, 12


@dataclass
class Counts:
    """What a run met, and what it lost."""

    steps: int = 0
    failures: int = 0
    requests: int = 0
    leaks: int = 0
    """Broken invariants, and pages that are held after all requests have ended."""
    lost: int = 0
    """Requests without an answer."""
    wrong: int = 0
    """Answers with other tokens than those without a cache; with int8 states they are not compared:
    rounding may tell them apart."""
    where: Counter = field(default_factory=Counter)
    """Failures by line or operator."""


def fuzz(name: str, steps: int, seed: int, folder: Path) -> Counts:
    """Runs so many steps of one of `CONFIGURATIONS`. folder: for its disk tier, empty."""
    pattern, fields = CONFIGURATIONS[name]
    fields = dict(fields)
    if "cache_dir" in fields:
        fields |= {"cache_dir": folder / "disk", "disk_cache_bytes": 2 << 20}
    model = tiny_model(pattern)
    prompts = some_prompts(seed)
    plain = tiny_engine(model, prefix_caching="off", cache_bytes=8 << 20)
    expected = [r.token_ids for r in plain.generate(prompts, greedy(MAX_ANSWER))]
    is_exact = fields.get("state_encoding", "exact") == "exact"
    random, counts = np.random.default_rng(seed), Counts()
    failing = FailingAllocator()
    with tiny_engine(model, max_requests=4, max_tokens=64, **fields) as engine:
        requests = []
        for _ in range(steps):
            if len(engine.scheduler.waiting) < 3:
                which, length = int(random.integers(NUM_PROMPTS)), 1 + int(random.geometric(0.3))
                n = 1 + 2 * int(random.integers(6) == 0)
                request = engine.add_request(
                    prompts[which], greedy(min(length, MAX_ANSWER)), RequestOptions(n=n)
                )
                requests.append((which, request))
            one_step(engine, requests, random, failing, counts)
            counts.steps += 1
        while engine.has_work:
            engine.step()
        check(engine, counts)
        counts.leaks += int(engine.cache.allocator.ref_counts.any())
        counts.requests = len(requests)
        for which, request in requests:
            for sample in request.samples:
                count_answer(sample, expected[which] if is_exact else None, counts)
    return counts


def some_prompts(seed: int) -> list[list[int]]:
    """Prompts that share beginnings of all lengths."""
    random, prompts = np.random.default_rng(seed), [random_tokens(70, seed=seed)]
    while len(prompts) < NUM_PROMPTS:
        base = prompts[int(random.integers(len(prompts)))]
        new = random_tokens(1 + int(random.integers(60)), seed=seed + len(prompts))
        prompts.append((base[: int(random.integers(len(base) + 1))] + new)[:140])
    return prompts


def one_step(engine, requests, random, failing: FailingAllocator, counts: Counts) -> None:
    """A step, or now and then a cancellation, in which an allocation may fail."""
    cancelled = None
    if random.integers(20) == 0 and requests:
        cancelled = requests[-1 - int(random.integers(min(4, len(requests))))][1]
    failing.arm(int(random.geometric(0.01)), times=int(random.choice([1, 1, 5, 40])))
    with failing if random.integers(2) else nullcontext():
        try:
            if cancelled is not None:
                engine.cancel(cancelled)
            else:
                engine.step()
        except (MemoryError, RuntimeError) as error:
            if not is_lack_of_memory(error):
                raise
    if cancelled is not None and not cancelled.closed:
        counts.lost += 1
    if failing.has_failed:
        counts.failures += 1
        where = failing.failed
        where = f"{where[0].co_qualname}:{where[1]}" if isinstance(where, tuple) else str(where)
        counts.where[where] += 1
        check(engine, counts)


def check(engine, counts: Counts) -> None:
    try:
        engine.check_integrity()
    except RuntimeError as error:
        print(error, flush=True)
        counts.leaks += 1


def count_answer(sample, expected: list[int] | None, counts: Counts) -> None:
    if not sample.closed:
        counts.lost += 1
        return
    tokens, reason = sample.token_ids, sample.finish_reason
    counts.lost += reason not in ("length", "cancelled")
    counts.wrong += expected is not None and tokens != expected[: len(tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="of all configurations together")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    part = arguments.steps // len(CONFIGURATIONS)
    lost = 0
    for name in CONFIGURATIONS:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            counts = fuzz(name, part, arguments.seed, Path(folder))
        print(
            f"{name}: {counts.steps} steps, {counts.failures} failed allocations in "
            f"{len(counts.where)} places, {counts.requests} requests; {counts.leaks} leaks, "
            f"{counts.lost} lost, {counts.wrong} wrong; {time.monotonic() - start:.0f} s",
            flush=True,
        )
        lost += counts.leaks + counts.lost + counts.wrong
    raise SystemExit(min(lost, 1))


if __name__ == "__main__":
    main()
