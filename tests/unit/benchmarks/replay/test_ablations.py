"""Each part can be taken out of the cache, which then decides otherwise, and is put back."""

from functools import partial

import pytest

from benchmarks.replay.ablations import GEOMETRY, PARTS, Part, constant, main, taken_out
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.sweep import GB
from benchmarks.replay.workloads import WORKLOADS, Workload, agent, chat, code
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.runner import replay


@pytest.fixture(scope="module")
def traces():
    """Requests, GB and how many in flight: something to do for every part."""
    return [
        (list(chat(seed=1, sessions=30)), 0.4, 1),
        (list(code(seed=1, limit=200)), 0.6, 4),
        (list(agent(seed=1, sessions=6)), 2.0, 1),
    ]


def digest(requests, budget_gb, in_flight):
    """Of all decisions of the cache."""
    engine = Ours(GEOMETRIES[GEOMETRY].spec("exact"), budget_gb * GB)
    replay(requests, engine, in_flight)
    return engine.cache.digest()


@pytest.fixture(scope="module")
def whole(traces):
    return [digest(*each) for each in traces]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_taken_out_changes_decisions(name, traces, whole):
    with taken_out(name):
        assert any(digest(*each) != decisions for each, decisions in zip(traces, whole))


def test_parts_are_put_back(traces, whole):
    for name in PARTS:
        with pytest.raises(KeyError), taken_out(name):
            raise KeyError
    assert digest(*traces[0]) == whole[0]


def test_the_table_says_what_each_part_brings(monkeypatch, capsys):
    """The larger loss first: all if no state is ever saved, nothing if all is there."""
    for name, sessions in (("chat", 12), ("agent", 2)):
        small = partial(WORKLOADS[name].generate, sessions=sessions)
        monkeypatch.setitem(WORKLOADS, name, Workload(small, (0.4, 1.2, 4)))
    nothing = {"prefix_cache.PrefixCache._make_room_for_state": constant(False)}
    monkeypatch.setitem(PARTS, "rungs", Part("all states", nothing))
    monkeypatch.setitem(PARTS, "fading", Part("nothing", {}))
    main(["--parts", "fading", "rungs", "--workloads", "chat", "agent", "--seeds", "1", "2"])
    head, rule, whole, first, second = capsys.readouterr().out.splitlines()
    assert head == "| without | chat | agent | mean |"
    assert rule == "| --- | ---: | ---: | ---: |"
    skipped, lost = ([float(column) for column in row.split("|")[2:5]] for row in (whole, first))
    assert first.startswith("| rungs: all states | ") and lost == [-column for column in skipped]
    assert skipped[0] > 50 and skipped[2] == pytest.approx(sum(skipped[:2]) / 2, abs=0.1)
    assert second == "| fading: nothing | +0.0 | +0.0 | +0.0 |"


def test_constant():
    assert constant(3)(1, key=2) == 3
