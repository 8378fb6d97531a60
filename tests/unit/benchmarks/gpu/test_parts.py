"""Parts of a first run: their rows, and how they end."""

import json

import pytest
import torch

from benchmarks.gpu import parts
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.checks import Check
from benchmarks.gpu.first_run import MARK, POISONED


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
