"""Two replicas that a router sends requests, against one cache with the memory of both."""

import pytest
from matrix import matrix_rows

from benchmarks.replay import replicas
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.replicas import RULES, skipped_percent
from benchmarks.replay.runner import replay
from benchmarks.replay.sweep import GB
from benchmarks.replay.workloads import WORKLOADS, Workload
from megatron_hybrid.tools.replay.ours import Ours

SMALL = {"chat": (4, 400), "agent": (16, 300)}
"""Workload -> GB, requests."""


@pytest.mark.parametrize("name", matrix_rows(SMALL, "chat"))
def test_two_replicas_skip_within_three_points_of_one_cache(name):
    """One replica is the plain replay."""
    budget, limit = SMALL[name]
    requests = list(WORKLOADS[name].generate(limit=limit, seed=1))
    one = skipped_percent(requests, budget)
    engine = Ours(GEOMETRIES[replicas.GEOMETRY].spec("exact"), budget * GB)
    assert one == pytest.approx(100 * replay(requests, engine).skipped_share)
    split = {rule: skipped_percent(requests, budget, 2, run) for rule, run in RULES.items()}
    assert split["block hashes"] >= one - 3
    assert split["round robin"] < one - 8 and split["at random"] < one - 8


def test_the_table(capsys, monkeypatch):
    few = Workload(lambda seed: WORKLOADS["agent"].generate(limit=40, seed=seed), (4,))
    monkeypatch.setitem(WORKLOADS, "chat", few)
    replicas.main(["--workloads", "chat", "--seeds", "1"])
    head, _, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| chat, 4, 1 | ") and row.count("|") == head.count("|") == 6
