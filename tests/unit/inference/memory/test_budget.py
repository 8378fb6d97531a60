"""The engine takes no more memory than there is: what is available, what the pool gets of it, and
what is refused, with both numbers, before anything is allocated."""

import re
import resource
import weakref
from itertools import product

import numpy as np
import pytest
import torch
from reference import greedy, random_tokens, tiny_engine, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.memory import budget
from megatron_hybrid.inference.memory.budget import Part, pool_pages, step_bytes
from megatron_hybrid.inference.scheduling.scheduler import max_captures
from megatron_hybrid.inference.worker import warm_up
from megatron_hybrid.inference.worker.warm_up import measured_step_bytes

CPU = torch.device("cpu")


def write_machine(root, available, groups=""):
    """A file system that has so many bytes of memory. groups: of this process."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       24683656 kB\nMemAvailable:   {available >> 10} kB\nHugePages_Total:   0\n"
    )
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/statm").write_text("100 50 10 1 0 60 0\n")


def write_group(folder, limit, used, cached, *, version):
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


V1, V2 = "4:memory:/jobs/a\n2:cpu,cpuacct:/\n0::/\n", "0::/jobs/a\n"
GROUPS = {
    "no group": (V2, {}, 1000),
    "no file of groups in a group": ("0::/\n", {}, 1000),
    "v2": (V2, {"jobs/a": (700, 300, 50)}, 450),
    "v2, its parent has less": (V2, {"jobs/a": (700, 300, 50), "jobs": (600, 500, 0)}, 100),
    "v2, in a container": ("0::/../x\n", {"": (500, 100, 0)}, 400),
    "v2, without a limit": (V2, {"jobs/a": ("max", 300, 50)}, 1000),
    "v2, above the machine": (V2, {"jobs/a": (9000, 300, 50)}, 1000),
    "v2, over its limit": (V2, {"jobs/a": (300, 400, 0)}, 0),
    "v1": (V1, {"jobs/a": (700, 300, 50)}, 450),
    "v1, in a container": (V1, {"": (500, 100, 0)}, 400),
    "v1, without a limit": (V1, {"jobs/a": ((1 << 63) - 4096, 300, 50)}, 1000),
}


@pytest.mark.parametrize(("groups", "files", "expected"), GROUPS.values(), ids=GROUPS)
def test_the_least_of_machine_and_control_groups_is_available(tmp_path, groups, files, expected):
    mib = 1 << 20
    write_machine(tmp_path, 1000 * mib, groups)
    version = 1 if "memory" in groups else 2
    mount = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    for name, (limit, used, cached) in files.items():
        limit = limit * mib if isinstance(limit, int) and limit < 1 << 40 else limit
        write_group(mount / name, limit, used * mib, cached * mib, version=version)
    assert budget.available_on_host(tmp_path) == expected * mib


def test_an_address_space_limit_counts(tmp_path, monkeypatch):
    write_machine(tmp_path, 1000 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (300 << 20, -1))
    used = 100 * resource.getpagesize()
    assert budget.available_on_host(tmp_path) == (300 << 20) - used


class SomeRanks:
    """Ranks of one model, in one thread: `decide` runs the same call on each."""

    def __init__(self, size):
        self.size, self._given = size, []
        self.members = [f"rank {rank} on here" for rank in range(size)]

    def gather(self, value):
        if len(self._given) < self.size:
            self._given.append(value)
            raise InterruptedError
        return self._given

    def decide(self, calls):
        """What each call returns or raises."""
        for call in calls:
            with pytest.raises(InterruptedError):
                call()
        found = []
        for call in calls:
            try:
                found.append(call())
            except MemoryError as error:
                found.append(str(error))
        return found


def decide(monkeypatch, ranks, config, page_bytes):
    """`pool_pages` on ranks, each (bytes available, of the largest step, of slots, of the host
    tier), on one CPU."""
    group = SomeRanks(len(ranks))

    def of_rank(available, step, slots, tier):
        def call():
            monkeypatch.setattr(budget, "available_bytes", lambda device: available)
            parts = [
                Part(slots, "live slots", "max_requests"),
                Part(tier, "the host tier", "host_cache_bytes", on_host=True),
            ]
            return pool_pages(config, CPU, page_bytes, step, parts, group)

        return call

    return group.decide([of_rank(*rank) for rank in ranks])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_invariant_never_more_than_is_left(monkeypatch, num_ranks):
    """Brute force over random machines and configs: ranks decide alike; what they take together
    beside one step of each is at most what there is; a default pool takes its part of the rest."""
    rng = np.random.default_rng(num_ranks)
    outcomes = {"made": 0, "refused": 0}
    for _ in range(400):
        page_bytes = int(rng.integers(1, 200))
        cache_bytes = None if rng.random() < 0.6 else int(rng.integers(2 * page_bytes, 20_000))
        fraction = float(rng.choice([0.01, 0.2, 0.9, 1.0]))
        config = InferenceConfig(cache_bytes=cache_bytes, memory_fraction=fraction)
        ranks = [
            tuple(int(n) for n in (rng.integers(30_000), *rng.integers(3000, size=3)))
            for _ in range(num_ranks)
        ]
        found = decide(monkeypatch, ranks, config, page_bytes)
        assert len(set(found)) == 1
        shares = [available // num_ranks for available, *_ in ranks]
        beside = [sum(parts if cache_bytes is None else parts[1:]) for _, *parts in ranks]
        if isinstance(found[0], int):
            outcomes["made"] += 1
            pool = found[0] * page_bytes
            assert found[0] >= 2
            assert all(own + pool <= share for own, share in zip(beside, shares))
            if cache_bytes is None and found[0] > 2:
                left = min(share - own for own, share in zip(beside, shares))
                assert pool <= left * min(fraction, 0.25) < pool + page_bytes
            elif cache_bytes is not None:
                assert found[0] == cache_bytes // page_bytes
        else:
            outcomes["refused"] += 1
            pages = 2 if cache_bytes is None else cache_bytes // page_bytes
            assert any(own + pages * page_bytes > share for own, share in zip(beside, shares))
            share, asked = re.search(r"has (\d+) bytes .* asks for (\d+) ", found[0]).groups()
            assert int(share) in shares and int(asked) > int(share)
    assert min(outcomes.values()) > 20


def test_processes_of_one_machine_share_its_memory(monkeypatch):
    """torchrun tells how many there are, also those of other models."""
    rank, config = (100_000, 0, 0, 0), InferenceConfig()
    (alone,) = decide(monkeypatch, [rank], config, 10)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    (shared,) = decide(monkeypatch, [rank], config, 10)
    assert (alone, shared) == (2500, 625)


REFUSALS = {
    "pool": (dict(cache_bytes=1 << 50), "Lower cache_bytes"),
    "slots": (dict(max_requests=1 << 40), "Lower max_requests"),
    "host tier": (dict(host_cache_bytes=1 << 50), "Lower host_cache_bytes"),
    "tables": (dict(max_sequence_length=10**12), "Lower max_sequence_length or max_requests"),
    "tables beyond numpy": (dict(max_sequence_length=1 << 62), "Lower max_sequence_length or"),
    "inputs": (dict(max_tokens=1 << 40, max_requests=1 << 30), "Lower max_"),
    "pool and host tier": (dict(cache_bytes=6 << 20, host_cache_bytes=8 << 20), "Lower host_"),
    "step": (dict(cache_bytes=None, max_tokens=8000, max_sequence_length=8000), "Lower max_tokens"),
}


@pytest.mark.parametrize(("fields", "remedy"), REFUSALS.values(), ids=REFUSALS)
def test_more_than_there_is_is_refused_before_anything_is_allocated(monkeypatch, fields, remedy):
    available = 12 << 20
    monkeypatch.setattr(budget, "available_bytes", lambda device: available)
    monkeypatch.setattr("megatron_hybrid.inference.worker.allocation.CachePool", None)
    with pytest.raises(MemoryError, match=remedy) as caught:
        tiny_engine(**fields)
    message = str(caught.value)
    asked = int(re.search(rf"cpu has {available} bytes .* asks for (\d+) ", message)[1])
    assert asked > available
    parts = [int(n) for n in re.findall(r"(\d+) for ", message.split("asks for", 1)[1])]
    assert sum(parts) == asked


@pytest.mark.parametrize("pattern", ["MG*-W-", "*-", "M-", "W-"])
def test_stats_and_the_log_tell_what_fits(pattern, caplog):
    """As many blocks, or as many states, can be allocated."""
    with caplog.at_level("INFO", logger="megatron_hybrid"):
        engine = tiny_engine(tiny_model(pattern), cache_bytes=1 << 20)
    stats, spec = engine.stats(), engine.cache.spec
    tokens, states = stats["pool_tokens"], stats["pool_states"]
    assert f"holds {tokens} tokens, or {states} states" in caplog.text
    assert (tokens > 0) == ("*" in pattern) and (states > 0) == (pattern != "*-")
    for count, pages in (
        (tokens // spec.block_size_tokens, spec.kv_pages_per_block),
        (
            states,
            spec.checkpoint_pages + 2 * sum(spec.pages_per_block[g] for g in spec.local_groups),
        ),
    ):
        assert not count or count * pages <= stats["pages"] < (count + 1) * pages


class Peak(TorchDispatchMode):
    """The most bytes of new tensors that live at a time."""

    def __init__(self):
        super().__init__()
        self.bytes = self._now = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in self._storages((args, kwargs))}
        for storage in self._storages(out):
            key = storage._cdata
            if key not in given and key not in self._known:
                self._known.add(key)
                self._now += storage.nbytes()
                self.bytes = max(self.bytes, self._now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return out

    def _storages(self, tree):
        return [t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]

    def _gone(self, key, num_bytes):
        self._known.discard(key)
        self._now -= num_bytes


STEPS = list(product(["M-", "G-", "S-", "*-", "W-", "E", "MG*-W-"], [64, 256]))


@pytest.mark.parametrize(("pattern", "max_tokens"), STEPS)
def test_no_step_takes_more_than_the_estimate(monkeypatch, pattern, max_tokens):
    model = tiny_model(pattern, hidden_size=128, vocab_size=500)
    engine = tiny_engine(model, max_tokens=max_tokens, max_requests=2)
    sizes = 2, max_tokens, engine.config.max_sequence_length
    captures = max_captures(engine.cache.spec, *sizes[:2])
    estimate = step_bytes(model, engine.cache.spec, captures, *sizes)

    def peak_bytes(device, run):
        with Peak() as peak:
            run()
        return peak.bytes

    monkeypatch.setattr(warm_up, "peak_bytes", peak_bytes)
    args = model, engine.context, captures, max_tokens, engine.ranks
    measured = measured_step_bytes(*args)
    blocks = budget._BLOCKS
    if pattern == "S-":  # the others need no such blocks for a prompt
        assert measured <= estimate
    else:
        assert measured <= estimate - blocks <= 4 * measured


def test_running_the_largest_step_changes_no_answer(monkeypatch):
    """It runs before the engine's own memory is made; the model is as before."""
    monkeypatch.setattr(warm_up, "peak_bytes", lambda device, run: run() or 0)
    engine, prompt = tiny_engine(), random_tokens(40)
    expected = tiny_engine().generate([prompt], greedy(5))[0].token_ids
    captures = max_captures(engine.cache.spec, 8, 512)
    measured_step_bytes(engine.model, tiny_engine().context, captures, 512, engine.ranks)
    assert engine.generate([prompt], greedy(5))[0].token_ids == expected
