"""The process that reads guides first: what llguidance cannot bound ends it, and no other."""

import os
import shutil
import signal
import sys

import psutil
import pytest

from megatron_hybrid.text.guide import Guide
from megatron_hybrid.text.guide_trial import Trial

GRAMMAR = '{"grammars": [{"lark_grammar": "start: /a/"}]}'


def chain(length):
    """Return a schema whose references lead through so many definitions, two at a time."""
    definitions = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(length)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "object"}}}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: Guide.json_schema(
                {"type": "string", "allOf": [{"pattern": f"a{i}"} for i in range(32)]}
            ),
            marks=pytest.mark.matrix,  # it takes its 3 s
        ),
        lambda: Guide.json_schema(chain(2048)),
    ],
    ids=["minutes of a CPU", "too deep for its stack"],
)
def test_a_guide_that_would_end_the_process_or_hold_a_cpu_is_refused(make):
    with pytest.raises(ValueError, match="3 s of a CPU or 512 MiB to compile, or is too deep"):
        make()
    Guide.json_schema(chain(64))  # the next guide has a process again


def begun() -> tuple[Trial, psutil.Process]:
    """A trial, and its process."""
    trial, before = Trial(), psutil.Process().children()
    assert trial.error_of(GRAMMAR) == ""
    (process,) = set(psutil.Process().children()) - set(before)
    return trial, process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_from_outside_costs_no_guide(number, monkeypatch):
    trial, process = begun()
    process.send_signal(number)
    if number == signal.SIGKILL:  # while it has no guide to read
        process.wait()
    assert trial.error_of(GRAMMAR) == ""
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert "ends with status 1" in Trial().error_of(GRAMMAR)


def test_a_fork_has_a_process_of_its_own():
    trial, _ = begun()
    child = os.fork()
    if child == 0:
        os._exit(0 if trial.error_of(GRAMMAR) == "" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert trial.error_of(GRAMMAR) == ""
