"""`python -m benchmarks.replay`, and its driver: who runs when, what is timed, what counts as
lost."""

import gc
import json
import sys
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from benchmarks.replay.__main__ import main
from benchmarks.replay.engines import ENGINES
from benchmarks.replay.runner import TURN, replay, side_by_side, timed
from benchmarks.replay.table import BEGIN, END
from megatron_hybrid.tools.replay.protocol import Attempts, Engine, Request

ARGUMENTS = ["--workloads", "rl-group", "--limit", "32", "--budgets", "1", "4"]


def test_command_line(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN.format('results')}\nold\n{END.format('results')}\nafter\n")
    path = tmp_path / "out" / "replay.json"
    files = ["--json", str(path), "--markdown", str(page)]
    main([*ARGUMENTS, "--engines", "ours", "lru-16", "ceiling", *files])
    results = json.loads(path.read_text())
    cells = {(cell["engine"], cell["budget_gb"]): cell for cell in results["cells"]}
    assert list(cells) == [
        ("ours", 1), ("ours", 4), ("lru-16", 1), ("lru-16", 4),
        ("ceiling", None),
    ]  # fmt: skip
    assert cells["ceiling", None]["skipped_percent"] == pytest.approx(93.75)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "| ceiling | 93.8 |" in text
    assert "rl-group, nemotron-h-8b, 1 in flight: 32 requests" in capsys.readouterr().out


def test_several_numbers_in_flight(tmp_path):
    path = tmp_path / "replay.json"
    main([*ARGUMENTS, "--in-flight", "2", "1", "--engines", "ours", "--json", str(path)])
    cells = json.loads(path.read_text())["cells"]
    assert [cell["in_flight"] for cell in cells] == [2, 2, 1, 1]


def test_every_number_fits_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    budgets = ["1", "2", "4.5", "8", "16"]
    path = tmp_path / "replay.json"
    engines = ["--engines", "lru-16", "ours"]
    main([*ARGUMENTS[:4], "--budgets", *budgets, *engines, "--json", str(path)])
    out = capsys.readouterr().out
    assert "\u2026" not in out and all(f" {budget} GB, % " in out for budget in budgets)
    for cell in json.loads(path.read_text())["cells"]:
        assert f" {cell['skipped_percent']:.1f} " in out
        assert f"{cell['micros_median']:.0f} / {cell['micros_p95']:.0f} " in out


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(SystemExit, match="results: begin"):
        main([*ARGUMENTS, "--engines", "ceiling", "--markdown", str(page)])
    assert page.read_text() == "nothing here"


def test_a_page_does_not_lose_the_rows_of_engines_that_are_not_installed(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        results := f"{BEGIN.format('results')}\n| vllm | 50.0 |\n{END.format('results')}\n"
    )
    monkeypatch.setitem(ENGINES, "vllm", replace(ENGINES["vllm"], module="nowhere"))
    with pytest.raises(SystemExit, match="would lose its rows of vllm, for which nowhere is not"):
        main([*ARGUMENTS, "--engines", "ceiling", "vllm", "--markdown", str(page)])
    assert page.read_text() == results


def test_plots_without_matplotlib_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        main([*ARGUMENTS, "--plots", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "'0': give a whole number from 1 on"),
        (["--in-flight", "0"], "'0': give a whole number"),
        (["--budgets", "nan"], "'nan': give GB, above 0"),
    ],
)
def test_numbers_that_make_no_replay(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main([*ARGUMENTS, *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plots", "--markdown"])
def test_what_cannot_be_written_is_refused_before_the_replays(option, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("benchmarks.replay.__main__.run_cells", None)
    with pytest.raises(SystemExit, match="file"):
        main([*ARGUMENTS, option, str(tmp_path / "file" / "below")])


class Recorder(Engine):
    """An engine with room for `room` requests that writes down what happens."""

    def __init__(self, room=100):
        self.room, self.running, self.log = room, 0, []

    def begin(self, prompt, message_starts=()):
        if self.running == self.room:
            self.log.append("full")
            return None
        self.running += 1
        self.log.append(f"+{prompt[0]}")
        handle = Recorder()
        handle.skipped_tokens, handle.name = 0, prompt[0]
        return handle

    def finish(self, handle, tokens):
        self.running -= 1
        assert tokens.tolist() == [handle.name, -handle.name]
        self.log.append(f"-{handle.name}")


def requests(*sessions):
    return [
        Request(np.array([i], np.int32), np.array([-i], np.int32), session, 0, float(i))
        for i, session in enumerate(sessions)
    ]


@pytest.mark.parametrize(
    ("sessions", "in_flight", "room", "order"),
    [
        ("abc", 1, 9, "+0 -0 +1 -1 +2 -2"),
        ("abcd", 2, 9, "+0 +1 -0 +2 -1 +3 -2 -3"),
        ("abbc", 3, 9, "+0 +1 -0 -1 +2 +3 -2 -3"),  # the second turn of b waits for the first
        ("abc", 3, 1, "+0 full -0 +1 full -1 +2 -2"),
    ],
)
def test_order(sessions, in_flight, room, order):
    engine = Recorder(room)
    result = replay(requests(*sessions), engine, in_flight)
    assert " ".join(engine.log) == order
    assert len(result.seconds) == len(sessions) and min(result.seconds) > 0


def test_refused_attempts_are_timed_too(monkeypatch):
    clock = count()  # a second for each call
    monkeypatch.setattr("benchmarks.replay.runner.thread_time", lambda: next(clock))
    result = replay(requests(*"abcd"), Recorder(room=2), in_flight=3)
    assert result.seconds == [2, 2, 3, 3]


def test_engines_take_turns():
    """Each sees what it would see alone, a number of requests at a time."""
    sessions, order = range(2 * TURN + 7), []

    class Ordered(Recorder):
        def begin(self, prompt, message_starts=()):
            order.append((self.room, prompt[0]))
            return super().begin(prompt)

    engines, alone = [Ordered(), Ordered(room=2)], [Recorder(), Recorder(room=2)]
    side_by_side(iter(requests(*sessions)), engines, in_flight=3)
    for engine, other in zip(engines, alone):
        replay(requests(*sessions), other, in_flight=3)
        assert engine.log == other.log
    turns = [(room, i // TURN) for room, i in order]
    assert list(dict.fromkeys(turns)) == [(100, 0), (2, 0), (100, 1), (2, 1), (100, 2), (2, 2)]
    assert turns == sorted(turns, key=lambda turn: (turn[1], -turn[0]))


def test_an_engine_that_foresees_gets_all_requests_before_the_first():
    class Foresees(Recorder):
        def foresee(self, requests):
            self.log.append(f"{len(requests)} to come")

    engine = Foresees()
    side_by_side(iter(requests("a", "b")), [Recorder(), engine])
    assert engine.log == ["2 to come", "+0", "-0", "+1", "-1"]


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_the_clock_runs(collects):
    def fail():
        assert not gc.isenabled()
        raise RuntimeError

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        found, seconds = timed(lambda a, b: (a, b, gc.isenabled()), 1, 2)
        assert found == (1, 2, False) and seconds > 0
        with pytest.raises(RuntimeError):
            timed(fail)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_no_room_for_a_request_that_is_alone():
    with pytest.raises(RuntimeError, match="no room for request 0"):
        replay(requests("a"), Recorder(room=0))


def test_what_a_refused_attempt_has_cached_is_not_counted():
    attempts, prompt, other = Attempts(), [1, 2], [1, 2]
    assert attempts.admitted(prompt, 7) == 7
    attempts.refused(prompt, 3)
    attempts.refused(prompt, 5)
    assert (attempts.admitted(prompt, 9), attempts.admitted(prompt, 1)) == (3, 1)
    assert attempts.admitted(other, 9) == 9
