"""The table that decides between policies: its summary, and its resumption after a kill."""

import pytest

from benchmarks.replay import deciding
from benchmarks.replay.deciding import Case, read, replays, summary, write

CASES = [
    Case("chat", 1, "nemotron-h-8b", 1, 4, "exact"),
    Case("chat", 1, "nemotron-h-8b", 1, 4, "int8"),
    Case("code", None, "llama-3-8b", 8, 4, "exact"),
]
PEER = str(CASES[0].of_peers)


def results(former, today, peer):
    found = {
        str(case): {"former": [a, 500], "today": [b, 300]}
        for case, a, b in zip(CASES, former, today)
    }
    return {**found, PEER: {"marconi": [peer, 60]}}


def verdict(former, today, peer=0.0):
    lines = list(summary(CASES, ["today"], "former", results(former, today, peer), {}))
    return next(line for line in lines if line.startswith("**today")), "\n".join(lines)


def test_a_policy_within_all_bounds_passes():
    found, text = verdict([70, 90, 60], [69, 89, 59], peer=65)
    assert found == "**today: yes**"
    assert "| former | 80.0 | 60.0 | 73.3 | 500 |" in text
    assert "| today | 79.0 | 59.0 | 72.3 | 300 |" in text


@pytest.mark.parametrize(
    ("today", "peer", "reason"),
    [
        ([68, 88, 58], 0, "fails: 2.00 points lost on the mean"),
        ([70, 90, 56.5], 0, "fails: 3.50 on code"),
        ([69, 90, 60], 69.5, "fails: 1 cases below a peer that former beats"),
    ],
)
def test_each_bound_fails_a_policy(today, peer, reason):
    found, text = verdict([70, 90, 60], today, peer)
    assert found == "**today: no**"
    assert reason in text


def test_a_peer_that_beats_the_other_policy_too_counts_for_nothing():
    assert verdict([70, 90, 60], [69, 90, 60], peer=70.5)[0] == "**today: yes**"


def test_what_is_known_is_not_replayed_again(tmp_path, monkeypatch):
    replayed = []

    def run(case, name, trace):
        replayed.append((str(case), name))
        if len(replayed) == 2:
            raise KeyboardInterrupt
        return [50.0, 100]

    monkeypatch.setattr(deciding, "run_policy", run)
    file = tmp_path / "found.json"
    command = ["--only", "chat, seed 1", "1 in flight, 4 GB, exact", "--no-peers"]
    command += ["--results", str(file), "--policies", "today", "--against", "lru"]
    with pytest.raises(KeyboardInterrupt):
        deciding.main(command)
    assert read(file) == {str(CASES[0]): {"lru": [50.0, 100]}}
    deciding.main(command)
    assert replayed[1:] == [(str(CASES[0]), "today")] * 2
    assert read(file)[str(CASES[0])].keys() == {"today", "lru"}


def test_peers_are_replayed_once_for_all_encodings():
    asked = [each[:2] for each in replays(CASES[:2], [], ["marconi"], {})]
    assert set(asked) == {(PEER, "marconi")}
    assert not list(replays(CASES[:2], [], ["marconi"], {PEER: {"marconi": [1.0, 1]}}))


def test_published_results_are_of_peers_alone():
    found = deciding.published()
    names = {name for each in found.values() for name in each}
    assert {"vllm", "marconi", "mcore"} <= names
    assert not any(name.startswith(("ours", "clairvoyant")) for name in names)


def test_results_survive_a_failed_write(tmp_path, monkeypatch):
    file = tmp_path / "found.json"
    write({"a": {"today": [1.0, 2]}}, file)
    monkeypatch.setattr(deciding.os, "replace", lambda *_: (_ for _ in ()).throw(OSError))
    with pytest.raises(OSError):
        write({}, file)
    assert read(file) == {"a": {"today": [1.0, 2]}}


def test_cases_are_distinct_and_the_telling_ones_come_first():
    found = deciding.cases(trace=True)
    assert len(set(map(str, found))) == len(found)
    assert {(case.seed, case.in_flight, case.encoding) for case in found[:12]} == {(1, 1, "exact")}
    assert not any(case.workload == deciding.MOONCAKE for case in deciding.cases(trace=False))
