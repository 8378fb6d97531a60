"""A plugin of pytest that prints a row for each test, beside pytest's own report.

Kernels run in their simplest configs: tuning would compile each of them some 40 times in each
worker, and each config is checked by itself.
"""

import json
import os
from collections.abc import Generator

import pytest
import torch

from benchmarks.gpu.autotuned import chosen
from benchmarks.gpu.bench import Row
from benchmarks.gpu.first_run import MARK

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def _tell(row: Row) -> None:
    # In a line of its own: pytest may have begun one of dots.
    print(f"\n{MARK}{json.dumps(row.values())}", flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """One test."""
    with chosen():
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """End a worker whose device does nothing any more: another one goes on behind this test."""
    if IS_WORKER and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if IS_WORKER or (report.passed and report.when != "call"):
        return
    name = report.nodeid.rpartition("/")[2]
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        _tell(Row(name, note=str(reason)))
    elif report.passed:
        _tell(Row(name, report.duration))
    else:
        print(report.longreprtext, flush=True)
        _tell(Row(name, report.duration, fault=_why(report.longreprtext)))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed and not IS_WORKER:
        print(report.longreprtext, flush=True)
        _tell(Row(report.nodeid, fault=_why(report.longreprtext)))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        _tell(Row("collected", numbers={"tests": len(session.items)}))


def _why(text: str) -> str:
    """The error in a traceback of pytest's: its first line that is marked as one."""
    lines = text.strip().splitlines()
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines[-1:] or ["no message"])[0][:100]
