"""The idealised cache for agents, against the infinite one and against what can be told by hand."""

from itertools import pairwise
from statistics import mean

import numpy as np
import pytest

from benchmarks.replay import agents
from benchmarks.replay.agents import TOLD, Step, idealised, skipped_percent, steps_of
from benchmarks.replay.workloads import AGENT_PAUSE, AGENT_STEPS, agent
from megatron_hybrid.tools.replay.lru import Ceiling
from megatron_hybrid.tools.replay.runner import replay


def step(name, number, whole, arrival, last=False, prompt=None):
    """Of an agent behind a tool prompt of 10 tokens."""
    return Step(name, number, last, b"tools", 10, prompt or whole - 1, whole, arrival)


def test_steps():
    requests = list(agent(seed=3, sessions=8))
    steps = list(steps_of(requests))
    assert len(steps) == len(requests)
    assert len({s.tools for s in steps}) == 3
    assert all(6000 <= s.tools_length <= 10000 for s in steps)
    for name in range(8):
        own = [s for s in steps if s.agent == name]
        assert [s.number for s in own] == list(range(1, len(own) + 1)) and len(own) in AGENT_STEPS
        assert [s.last for s in own] == [False] * (len(own) - 1) + [True]
        assert all(a.whole_length < b.prompt_length < b.whole_length for a, b in pairwise(own))


@pytest.mark.parametrize("told", TOLD)
def test_with_memory_for_all_it_is_the_ceiling(told):
    requests = list(agent(seed=3, sessions=8))
    possible = 100 * replay(requests, Ceiling()).skipped_share
    assert idealised(requests, 1000, "exact", told) == pytest.approx(possible, abs=0.01)


def test_what_runs_needs_its_kv_and_its_state_competes():
    """One agent's 110 tokens and state fit beside the tool prompt's. The second one cannot run
    beside that, whatever it is worth; a shorter one can, and does not come in."""
    for other, skipped in ((120, 10 + 10), (15, 10 + 120)):
        steps = [step("a", 1, 120, 0.0), step("b", 1, other, 1.0), step("a", 2, 120, 2.0)]
        found = skipped_percent(steps, 135, 5, lambda step, away: 1.0 - (step.agent == "b"))
        assert found == pytest.approx(100 * skipped / sum(s.prompt_length for s in steps))


def test_what_has_to_go_and_still_fits_stays():
    """The least valuable is not enough, the next one is by itself."""
    steps = [
        step("least", 1, 30, 0.0),
        step("next", 1, 110, 1.0),
        step("new", 1, 110, 2.0),
        step("least", 2, 40, 3.0),
        step("next", 2, 120, 4.0),
    ]
    values = {"least": 0.1, "next": 0.5, "new": 0.9}
    budget = 10 + 5 + (20 + 5) + (100 + 5) + 20
    found = skipped_percent(steps, budget, 5, lambda step, away: values[step.agent])
    assert found == pytest.approx(100 * (10 + 10 + 30 + 10) / sum(s.prompt_length for s in steps))


def test_what_is_known_not_to_come_back_goes_first():
    steps = [
        step("long, ends", 1, 210, 0.0, last=True),
        step("short", 1, 60, 1.0),
        step("new", 1, 60, 2.0),
        step("short", 2, 70, 3.0),
    ]
    asked = sum(s.prompt_length for s in steps)
    # All but one of the three fit.
    for told, skipped in ((TOLD["which agents have ended"], 60), (lambda s, away: 1.0, 10)):
        found = skipped_percent(steps, 10 + 5 + 205 + 2 * 55 - 40, 5, told)
        assert found == pytest.approx(100 * (10 + 10 + skipped) / asked)


def test_probabilities_are_those_of_drawn_agents():
    """Of a million agents, those that are away for as long as that after their k-th step."""
    rng = np.random.default_rng(0)
    steps = rng.integers(AGENT_STEPS.start, AGENT_STEPS.stop, 10**6)
    pauses = rng.exponential(AGENT_PAUSE, 10**6)
    for number in (1, 19, 20, 30, 39, 40):
        for away in (0.0, 5.0, 40.0):
            silent = (steps == number) | ((steps > number) & (pauses > away))
            back = (steps > number)[silent].mean()
            found = agents.told_the_law(step("a", number, 100, 0.0), away)
            assert found == pytest.approx(back, abs=0.01)
    assert agents.told_the_means(step("a", 1, 100, 0.0), 0.0) == 1 - 1 / mean(AGENT_STEPS)


def test_the_table(capsys, monkeypatch):
    whole = agents.agent
    monkeypatch.setattr(agents, "agent", lambda seed: whole(seed=seed, sessions=2))
    monkeypatch.setattr(agents, "BUDGETS_GB", (1, 1000))
    agents.main(["--seeds", "1", "2"])
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "1 GB, seed 1 | 1 GB, mean of all | 1000 GB, seed 1 | 1000 GB, mean of all" in head
    cells = [[cell.split(" / ") for cell in row.strip("| ").split(" | ")[1:]] for row in rows]
    assert len(cells) == 5 and {len(row) for row in cells} == {4}
    traces = [list(whole(seed=seed, sessions=2)) for seed in (1, 2)]
    requests = traces[0]
    possible = 100 * replay(requests, Ceiling()).skipped_share
    for row in cells:
        for little, ample in zip(row[0], row[2]):
            assert float(little) < float(ample) == pytest.approx(possible, abs=0.1)
    found = [idealised(trace, 1, "int8", next(iter(TOLD))) for trace in traces]
    assert [cells[1][0][1], cells[1][1][1]] == [f"{found[0]:.1f}", f"{mean(found):.1f}"]
