"""The runner of a first run, with small scripts in place of its parts."""

import json
import subprocess
import sys
import tarfile
import textwrap
import time
from types import SimpleNamespace

import pytest
from waiting import is_running, wait_until

from benchmarks.gpu import first_run
from benchmarks.gpu.first_run import BUDGETS, MARK, POISONED, Part, Report, Runner, phases
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.ops import FAMILIES
from benchmarks.gpu.parts import PARTS

ROWS = """
    import json, os, signal, subprocess, sys, time
    MARK = "ROW "
    def tell(what, fault=""):
        row = {"what": what, "fault": fault, "cells": [what, "ok", "", ""]}
        print(MARK + json.dumps(row | {"device": "NVIDIA Made-up"}), flush=True)
"""


@pytest.fixture
def script(tmp_path):
    """Write a script that may `tell` rows, and return the command that runs it."""

    def write(text):
        path = tmp_path / "part.py"
        path.write_text(textwrap.dedent(ROWS) + textwrap.dedent(text))
        return sys.executable, "-I", "-S", str(path)  # which starts sooner

    return write


@pytest.fixture
def report(tmp_path):
    return Report("quick", tmp_path / "results", tmp_path / "logs", str(tmp_path))


def run(report, command, parts, seconds=60.0):
    Runner(report, command, (), time.monotonic() + seconds, str(report.site)).run(parts)


def told(report):
    """What each part told of, and what was wrong with it."""
    return {(title, row["what"]): row["fault"] for title, row in report.rows}


def called(call, command, folder, *arguments):
    """A whole call; returns its table and its rows."""
    places = ["--results", str(folder), "--logs", str(folder / "logs")]
    first_run.main([call, "--toy", *arguments, *places], command)
    (table,) = folder.glob("*.md")
    lines = table.with_suffix(".jsonl").read_text().splitlines()
    return table.read_text(), [json.loads(line) for line in lines]


def test_a_part_that_dies_or_hangs_costs_only_itself(report, script, tmp_path):
    command = script(
        f"""
        tell("first")
        match sys.argv[1]:
            case "exits":
                print("why it ends"); sys.exit(1)
            case "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "tells":
                tell("second", "no room"); sys.exit(1)
            case "hangs":
                child = subprocess.Popen(["sleep", "1000"])
                open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
                child.wait()
        """
    )
    names = ["exits", "crashes", "hangs", "tells", "works"]
    run(report, command, [Part(name, (name,), 60 - 59 * (name == "hangs")) for name in names])
    faults = {key: fault for key, fault in told(report).items() if fault}
    assert faults.pop(("exits", "exits")).endswith("why it ends")
    assert "killed by SIGSEGV" in faults.pop(("crashes", "crashes"))
    assert "over its limit after 1 s" in faults.pop(("hangs", "hangs"))
    assert faults == {("tells", "second"): "no room"}  # its own row says what was wrong
    assert {title for title, row in report.rows if row["what"] == "first"} == {*names}
    ends = {title: how for title, _, how in report.ends}
    assert ends["works"] == "well" and ends["hangs"] == "over its limit"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_running(child))  # what it started has ended, too


def test_checks_go_on_behind_one_that_the_device_did_not_survive(report, script):
    command = script(
        f"""
        skip = int(sys.argv[sys.argv.index("--skip") + 1]) if "--skip" in sys.argv else 0
        for number in range(skip, 7):
            tell(f"check {{number}}", "illegal access" * (number in (1, 4)))
            if number in (1, 4):
                sys.exit({POISONED})
        """
    )
    run(report, command, [Part("check", ("check", "op"), 60)])
    assert [row["what"] for _, row in report.rows] == [f"check {n}" for n in range(7)]
    assert [how for *_, how in report.ends] == ["the device failed; goes on"] * 2 + ["well"]


def test_a_device_that_never_works_ends_its_part(report, script):
    run(report, script(f"sys.exit({POISONED})"), [Part("check", ("check", "op"), 60)])
    assert len(report.ends) == first_run.RESUMED + 1 and len(report.faults) == 1


def test_the_table_is_written_behind_each_part(script, tmp_path, monkeypatch):
    tables = []
    write = Report.write

    def kept(self):
        write(self)
        tables.append(self.table())

    monkeypatch.setattr(Report, "write", kept)
    called("rest", script("tell(sys.argv[1])"), tmp_path, "--parts", "ops", "serving")
    ended = [table.count("| well |") for table in tables]
    assert ended == sorted(ended) and {1, 2, 3} <= {*ended}


def test_a_call_whose_time_is_over_has_its_table(script, tmp_path, capsys, monkeypatch):
    told = tmp_path / "told"
    command = script(f"tell('first'); open({str(told)!r}, 'w').close(); time.sleep(1000)")
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + (1000 if told.exists() else 0), sleep=time.sleep
    )
    monkeypatch.setattr(first_run, "time", clock)  # the time is over as soon as a row is told
    monkeypatch.setattr(first_run.os, "cpu_count", lambda: 1)  # one part after the other
    table, rows = called("quick", command, tmp_path, "--seconds", "900")
    assert "# First run, quick: NVIDIA Made-up" in table and "over its limit" in table
    late = [row for row in rows if "time is over" in row["fault"]]
    assert {row["part"].split()[0] for row in late} == {"configs", "check", "sanitizer"}
    printed = capsys.readouterr().out
    assert f"{len(rows)} rows" in printed and "not run: the call's time is over" in printed


def test_rows_logs_and_names_of_files(script, tmp_path):
    command = script("print('a line for the log'); tell('a | b'); print('ROW {broken')")
    table, rows = called("quick", command, tmp_path, "--parts", "environment")
    assert (tmp_path / "first_run_nvidia_made_up_quick.md").exists()
    assert "| a \\| b | ok |  |  |" in table and "python 3." in table
    assert [row["what"] for row in rows] == ["a | b", "a row that cannot be read"]
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["quick.tgz"]
    with tarfile.open(tmp_path / "logs" / "quick.tgz") as archive:
        log = archive.extractfile("quick/environment.log").read().decode()
    assert log.startswith("a line for the log\nROW ") and log.count(MARK) == 2


def test_a_row_is_not_read_before_its_line_is_whole(report, script):
    command = script(
        """
        line = MARK + json.dumps({"what": "whole", "fault": "", "cells": ["whole", "ok", "", ""]})
        for piece in (line[:20], line[20:], "\\n"):
            print(piece, end="", flush=True)
            time.sleep(0.2)
        """
    )
    run(report, command, [Part("part", ("part",), 60)])
    assert told(report) == {("part", "whole"): ""}


def test_lines_of_the_terminal_fit(report, capsys):
    more = "triton; error 0.0123; host us 12.3; launches 807; graph none; fla 1.23x"
    for what, rest in (("short", "triton"), ("decode step, batch 64, context 8,192", more)):
        report.add("serving", {"what": what, "fault": "", "cells": [what, "1.2 ms", "71%", rest]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "serving: short: 1.2 ms 71%  triton" and len(lines) == 3
    assert max(map(len, lines)) <= 80


def test_parts_and_models_can_be_chosen(script, tmp_path):
    command = script("tell(' '.join(sys.argv[1:]))")
    arguments = ["--parts", "serving", "--models", "qwen3_5_4b", "gemma_3_4b"]
    _, rows = called("rest", command, tmp_path, *arguments)
    assert [row["what"] for row in rows] == [
        "serving qwen3_5_4b --toy",
        "serving gemma_3_4b --toy",
    ]
    with pytest.raises(SystemExit):
        called("rest", command, tmp_path, "--models", "gpt_2")


@pytest.mark.parametrize("call", BUDGETS)
def test_a_call_fits_its_names(call):
    """The runner imports nothing of the project, so it has names of its own."""
    assert set(first_run.OPS) == {family.op for family in FAMILIES}
    assert (*first_run.MODELS, *first_run.OTHER_MODELS) == (*SHAPES,)
    parts = [part for phase in phases(call) for part in phase]
    assert {part.arguments[0] for part in parts} <= {*PARTS}
    assert len({part.title for part in parts}) == len(parts)
    assert max(part.seconds for part in parts) < BUDGETS[call]
    checked = {"configs", "check", "sanitizer", "compile", "tests"}
    for phase in phases(call):  # what is timed runs alone
        assert len(phase) == 1 or {part.name for part in phase} <= checked


def test_wheels_are_installed_where_libraries_are_missing(tmp_path, monkeypatch):
    commands = []

    def pip(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, stderr="a warning\nno such platform\n")

    monkeypatch.setattr(first_run.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(first_run.subprocess, "run", pip)
    assert "no wheel is in" in first_run.install(tmp_path, "site") and not commands
    (tmp_path / "one.whl").touch()
    assert first_run.install(tmp_path, "site") == "no such platform"
    (command,) = commands
    assert command[-3:] == ["--target", "site", str(tmp_path / "one.whl")]
    assert {"--no-index", "--no-deps"} <= {*command}
    monkeypatch.setattr(first_run.importlib.util, "find_spec", lambda name: name)
    assert first_run.install(tmp_path, "site") is None and len(commands) == 1
