"""Rows, timing and the device's limits, on a CPU and with a CUDA device that is made up; parts of a
first run, their rows, and how they end."""

import contextlib
import itertools
import json

import pytest
import torch

from benchmarks.gpu import parts
from benchmarks.gpu.bench import Bench, Row, first_line, measured_limits
from benchmarks.gpu.checks import Check
from benchmarks.gpu.first_run import MARK, POISONED

CPU = Bench(torch.device("cpu"), True, None)
GPU = Bench(torch.device("cuda"), False, None)


@pytest.fixture
def cuda(monkeypatch):
    """The calls of torch.cuda that a timing makes, without a device: each replay takes 8 ms."""
    clock = itertools.count()
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def elapsed_time(self, other):
            return 8.0 * (other.at - self.at)

    class Graph:
        def replay(self):
            calls.append("replay")

    @contextlib.contextmanager
    def capture(graph):
        calls.append("capture")
        yield

    fakes = {"Event": Event, "CUDAGraph": Graph, "graph": capture}
    fakes |= {"synchronize": lambda: None, "empty_cache": lambda: None}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return calls


def test_a_gpu_is_timed_by_replays_of_a_graph(cuda):
    made = []
    timing = GPU.timing(lambda: made.append(0), lambda: made.append(1))
    assert timing.by_graph and timing.seconds == 4e-3  # of a replay of two calls
    assert made[-2:] == [0, 1] and cuda.count("capture") == 1
    assert 3 <= cuda.count("replay") - 2 <= GPU.rounds
    assert timing.numbers().keys() == {"host us"}


def test_what_a_graph_cannot_hold_is_timed_by_events(cuda, monkeypatch, capsys):
    def no_capture(graph):
        raise RuntimeError("operation not permitted")

    told = []
    for by_graph in (True, False):  # a call that reads host memory is not even tried
        monkeypatch.setattr(torch.cuda, "graph", no_capture)
        timing = GPU.timing(lambda: None, by_graph=by_graph)
        assert not timing.by_graph and timing.seconds == 8e-3
        assert timing.numbers()["graph"] == "none" and "replay" not in cuda
        told.append("not permitted" in capsys.readouterr().err)
    assert told == [True, False]


def test_each_call_is_made_once_where_kernels_are_compiled():
    made = []
    bench = Bench(torch.device("cpu"), False, None, once=True)
    timing = bench.timing(lambda: made.append(0), lambda: made.append(1))
    assert made == [0, 1] and timing.seconds > 0 and bench.rounds == 1


def test_what_a_device_did_in_a_call():
    x = torch.ones(8, 8)
    activity = CPU.activity(lambda: x @ x @ x)
    (_, count, seconds), *_ = [one for one in activity.most if "mm" in one[0]]
    assert count == 2 and 0 < seconds <= activity.busy_seconds and activity.launches >= 2


def test_cells_of_a_row():
    row = Row("x", 2e-3, 1e-3, {"a": 4e-3, "b": "needs b"}, {"launches": 3}, "<= 1", "triton")
    more = "triton; launches 3; a 2.00x; b: needs b; goal <= 1"
    assert row.cells() == ("x", "2.00 ms", "50%", more)
    assert Row("x", numbers={"error": 0.001234}).cells() == ("x", "ok", "", "error 0.00123")
    assert Row("x", fault="wrong").cells() == ("x", "FAULT: wrong", "", "")
    assert row.values()["share"] == 0.5 and row.values()["cells"] == row.cells()
    assert first_line(ValueError()) == "ValueError" and first_line(ValueError("a\nb")) == "a"


def test_on_a_gpu_what_fails_is_a_row(capsys, cuda, monkeypatch):
    def rows():
        yield Row("first", 1.0)
        raise ValueError("no room\nfor it")

    first, second = GPU.guarded("second", rows())
    assert (first.what, second.what, second.fault) == ("first", "second", "no room")
    assert "ValueError" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no room"):
        list(CPU.guarded("second", rows()))

    def dead():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    found = []
    with pytest.raises(ValueError, match="no room"):
        found += GPU.guarded("second", rows())
    assert GPU.is_poisoned() and not CPU.is_poisoned()


def test_limits_are_measured():
    limits = measured_limits(CPU)
    assert limits.bandwidth > 0 and limits.flops > 0


def test_without_a_device_toy_sizes_have_to_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="--toy"):
        Bench.start(toy=False)
    assert Bench.start(toy=True).name == "CPU, toy size"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "made up")
    bench = Bench.start(toy=False, once=True)
    assert bench.is_cuda and bench.once and bench.name == "made up" and bench.limits is None


def rows_of(printed):
    lines = [line for line in printed.splitlines() if line.startswith(MARK)]
    return [json.loads(line.removeprefix(MARK)) for line in lines]


def given(monkeypatch, name, run):
    monkeypatch.setitem(parts.PARTS, name, run)
    if name in parts.CHECKS:
        monkeypatch.setitem(parts.CHECKS, name, run)


def test_rows_are_printed_as_they_are_known(monkeypatch, capsys):
    def run(bench, model):
        assert bench.toy
        yield Row(model, 2.0)
        (row,) = rows_of(capsys.readouterr().out)
        assert row["what"] == "a model" and row["cells"][:2] == ["a model", "2.00 s"]
        assert row["device"] == "CPU, toy size"
        raise ValueError("no room\nfor it")

    given(monkeypatch, "serving", run)
    assert parts.main(["serving", "a model", "--toy"]) == 1
    (row,) = rows_of(capsys.readouterr().out)
    assert row["what"] == "serving a model" and row["fault"] == "ValueError: no room"


def test_where_kernels_are_compiled_only_faults_are_told(monkeypatch, capsys):
    def run(bench):
        assert bench.once
        yield from (Row("timed", 2.0), Row("wrong", fault="no room"))

    given(monkeypatch, "ops", run)
    assert parts.main(["ops", "--toy", "--once"]) == 0
    wrong, end = rows_of(capsys.readouterr().out)
    assert wrong["what"] == "wrong" and end["note"].startswith("compiled in ")


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_a_check_that_fails_ends_its_process_where_the_device_did(monkeypatch, capsys, is_poisoned):
    def fails():
        raise RuntimeError("illegal access")

    made = [Check("a", lambda: Row("a")), Check("b", fails), Check("c", lambda: Row("c"))]
    given(monkeypatch, "check", lambda bench: made)
    monkeypatch.setattr(Bench, "is_poisoned", lambda self: is_poisoned)
    code = parts.main(["check", "--toy", "--skip", "1"])
    rows = {row["what"]: row["fault"] for row in rows_of(capsys.readouterr().out)}
    assert rows.pop("b") == "RuntimeError: illegal access"
    assert (code, rows) == ((POISONED, {}) if is_poisoned else (0, {"c": ""}))


@pytest.mark.parametrize("skip", [0, 1])
def test_tests_are_told_of_as_far_as_the_device_survives_them(monkeypatch, tmp_path, capsys, skip):
    text = "import pytest\npytestmark = pytest.mark.gpu\n"
    text += "".join(f"def test_{name}():\n    assert {name!r} != 'b'\n" for name in "abc")
    (tmp_path / "tests").mkdir()
    file = f"test_some_{skip}"  # a module of its own
    (tmp_path / "tests" / f"{file}.py").write_text(text)
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(Bench, "is_poisoned", lambda self: skip == 1)
    monkeypatch.setattr(Bench, "name", "a GPU")
    bench = Bench(torch.device("cpu"), False, None)
    monkeypatch.setattr(Bench, "start", lambda *_: bench)
    code = parts.main(["tests", file, "--skip", str(skip)])
    rows = {row["what"]: row["fault"] for row in rows_of(capsys.readouterr().out)}
    assert "AssertionError" in rows.pop(f"{file}.py::test_b")
    assert list(rows) == [f"{file}.py::test_{name}" for name in ("a" if skip else "ac")[skip:]]
    assert code == (POISONED if skip else 0) and not any(rows.values())


def test_the_memory_check_tells_which_op_was_wrong(monkeypatch, tmp_path, capsys):
    """A script in the place of compute-sanitizer."""
    rows = [MARK + json.dumps(Row(name, note="mine").values()) for name in ("first", "second")]
    text = [
        "========= COMPUTE-SANITIZER",
        rows[0],
        "========= Invalid __global__ write of size 4 bytes",
        "=========     at scan_kernel+0x10",
        rows[1],
        "========= ERROR SUMMARY: 1 error",
    ]
    tool = tmp_path / "compute-sanitizer"
    body = "\n".join(text)
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{body}\nEND\necho $PYTORCH_NO_CUDA_MEMORY_CACHING\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    bench = Bench(torch.device("cpu"), True, None)
    first, second, end = parts.sanitizer(bench)
    assert (first.what, first.fault, first.note) == ("memcheck of first", "", "mine")
    assert second.fault == "Invalid __global__ write of size 4 bytes (1 reports)"
    assert end.fault == "errors" and "1 error" in end.note
    assert capsys.readouterr().out.endswith("\n1\n") and not rows_of(capsys.readouterr().out)
    monkeypatch.setenv("PATH", "/nowhere")
    (row,) = parts.sanitizer(bench)
    assert row.note == "is not on PATH" and not row.fault
