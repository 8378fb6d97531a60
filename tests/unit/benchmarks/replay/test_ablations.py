"""Each part can be left out of the policy, which then decides otherwise; two replicas that a router
sends requests, against one cache with the memory of both."""

from dataclasses import fields
from functools import partial

import pytest
from matrix import matrix_rows

from benchmarks.replay import ablations, replicas
from benchmarks.replay.ablations import GEOMETRY, PARTS, main
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.replicas import RULES, skipped_percent
from benchmarks.replay.runner import replay
from benchmarks.replay.sweep import GB
from benchmarks.replay.workloads import WORKLOADS, Workload, agent, chat, code
from megatron_hybrid.cache.policy.hybrid import HybridPolicy
from megatron_hybrid.cache.policy.reuse import PolicyFlags
from megatron_hybrid.tools.replay.ours import Ours


@pytest.fixture(scope="module")
def traces():
    """Requests, GB and how many in flight: something to do for every part."""
    return [
        (list(chat(seed=1, sessions=30)), 0.4, 1),
        (list(code(seed=1, limit=150)), 0.6, 4),
        (list(agent(seed=1, sessions=6)), 2.0, 1),
    ]


def digest(requests, budget_gb, in_flight, **parts):
    """Of all decisions of the cache."""
    spec = GEOMETRIES[GEOMETRY].spec("exact")
    engine = Ours(spec, budget_gb * GB, HybridPolicy(spec, **parts))
    replay(requests, engine, in_flight)
    return engine.cache.digest()


@pytest.fixture(scope="module")
def whole(traces):
    return [digest(*each) for each in traces]


@pytest.mark.parametrize("name", matrix_rows(PARTS, "intervals", "tails", "price"))
def test_a_part_that_is_left_out_changes_decisions(name, traces, whole):
    left_out = {name: False}
    assert any(digest(*each, **left_out) != found for each, found in zip(traces, whole))


def test_all_parts_are_listed_in_order():
    assert list(PARTS) == [field.name for field in fields(PolicyFlags)]


def test_the_default_policy_has_all_parts(traces, whole):
    engine = Ours(GEOMETRIES[GEOMETRY].spec("exact"), traces[0][1] * GB)
    replay(traces[0][0], engine, traces[0][2])
    assert engine.cache.digest() == whole[0]


def test_the_table_says_what_each_part_brings(monkeypatch, capsys):
    """The larger loss first: all if no state is ever saved, nothing if all is there."""
    for name, sessions in (("chat", 12), ("agent", 2)):
        small = partial(WORKLOADS[name].generate, sessions=sessions)
        monkeypatch.setitem(WORKLOADS, name, Workload(small, (0.4, 1.2, 4)))
    of_policy = ablations.skipped_without
    stand_ins = {"intervals": lambda *run: 0.0, "work": lambda *run: of_policy(None, *run)}
    monkeypatch.setattr(
        ablations,
        "skipped_without",
        lambda part, *run: stand_ins.get(part, partial(of_policy, part))(*run),
    )
    main(["--parts", "work", "intervals", "--workloads", "chat", "agent", "--seeds", "1", "2"])
    head, rule, whole, first, second = capsys.readouterr().out.splitlines()
    assert head == "| without | chat | agent | mean |"
    assert rule == "| --- | ---: | ---: | ---: |"
    skipped, lost = ([float(column) for column in row.split("|")[2:5]] for row in (whole, first))
    assert first.startswith(f"| intervals: {PARTS['intervals']} | ") and lost == [
        -column for column in skipped
    ]
    assert skipped[0] > 50 and skipped[2] == pytest.approx(sum(skipped[:2]) / 2, abs=0.1)
    assert second == f"| work: {PARTS['work']} | +0.0 | +0.0 | +0.0 |"


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
