"""Two replicas behind routers, against one cache with the memory of both."""

from functools import cache

import pytest
from matrix import matrix_rows

from benchmarks.replay import replicas
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.replicas import Clock, Result, hot_prefix, serve
from benchmarks.replay.routers import RULES
from benchmarks.replay.sweep import GB
from benchmarks.replay.workloads import WORKLOADS, Workload
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.runner import replay

SMALL = {"chat": (4, {"limit": 600, "seed": 1}), "agent": (16, {"limit": 300, "seed": 1})}
"""Workload -> GB, arguments."""


@cache
def small(name: str) -> list:
    return list(WORKLOADS[name].generate(**SMALL[name][1]))


@cache
def split(name: str, rule: str) -> Result:
    return serve(small(name), SMALL[name][0], 2, RULES[rule])


@pytest.mark.parametrize("name", matrix_rows(SMALL, "chat"))
def test_one_replica_without_a_clock_is_the_plain_replay(name):
    requests, budget = small(name)[:150], SMALL[name][0]
    engine = Ours(GEOMETRIES[replicas.GEOMETRY].spec("exact"), budget * GB)
    plain, found = replay(requests, engine), serve(requests, budget, 1)
    assert found.skipped_tokens == sum(plain.skipped_tokens)
    assert found.prompt_tokens == sum(plain.prompt_tokens)
    assert found.computed_tokens == [found.prompt_tokens - found.skipped_tokens]


@pytest.mark.parametrize("name", matrix_rows(SMALL, "chat"))
def test_two_replicas_skip_within_three_points_of_one_cache(name):
    one = serve(small(name), SMALL[name][0], 1).skipped_percent
    assert split(name, "chains and load").skipped_percent >= one - 3
    assert split(name, "round robin").skipped_percent < one - 8


@pytest.mark.parametrize(
    "speed", [replicas.HOT_CLOCK, Clock(10_000, 50)], ids=["prompts alone", "with answers"]
)
def test_with_a_hot_prefix_no_replica_waits_while_the_other_is_idle(speed):
    requests = hot_prefix(per_second=50, limit=300)
    found = serve(requests, replicas.HOT_GB, 2, clock=speed)
    assert found.unfair_seconds < 0.03 * found.seconds
    assert found.imbalance < 1.1


def test_the_table(capsys, monkeypatch):
    few = Workload(lambda seed: iter(small("chat")[:40]), (4,))
    monkeypatch.setitem(WORKLOADS, "chat", few)
    monkeypatch.setattr(replicas, "hot_prefix", lambda per_second: hot_prefix(per_second, 5))
    replicas.main(["--workloads", "chat", "--seeds", "1", "--replicas", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| chat, 4, 1 | ") and lines[3] == ""
    assert {line.count("|") for line in lines[:3]} == {9}
    assert {line.count("|") for line in lines[4:]} == {5} and len(lines) == 6 + 3
