"""The first minutes on a GPU: `python -m benchmarks.gpu.first_run all`, or `quick`, then `rest`.

*all* has what is worth most first: graphs, tests that need a GPU, whole models, checks. *quick*
checks the environment, each backend of each op, each config of autotuned kernels, and memory
accesses. *rest* measures ops, and whole models in the engine. None needs a network.

Each part is a process of its own with a time limit. Rows are printed as they are known, and a table
of all rows is written again and again, so that the end of the time loses nothing. This file imports
nothing but Python's own library: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = "ROW "
"""Begins a line of a part's output that is a row; JSON follows."""
POISONED = 75
"""A part's exit code where the device does nothing any more for its process."""
COMMAND = (sys.executable, "-m", "benchmarks.gpu.parts")
"""Runs a part: its name and arguments follow."""
BUDGETS = {"all": 840, "quick": 240, "rest": 300}
"""Seconds of a whole call."""
RESERVE = 6
"""Seconds of it to end processes, write the table and pack the logs."""
RESUMED = 5
"""How often checks go on after one that the device did not survive."""
AT_ONCE = 16
"""Processes that check or compile side by side on one GPU, at most."""
COLUMNS = 80
OPS = (
    "paged_attention",
    "ssd_scan",
    "gated_delta_rule",
    "kimi_delta_attention",
    "selective_scan",
    "causal_conv1d",
    "gated_rms_norm",
    "expert_mlps",
    "packed_linear",
)
AUTOTUNED = ("ssd_scan", "gated_delta_rule", "kimi_delta_attention")
"""Those of them that run kernels of libraries, which are tuned."""
TESTS = ("test_gpu", "test_adapters_on_gpu", "test_gpu_ops")
"""Files of tests that need a GPU."""
MODELS = ("nemotron_h_8b", "qwen3_5_4b")
"""Measured unless others are named."""
OTHER_MODELS = ("qwen3_next_80b_a3b", "jamba_1_5_mini", "gemma_3_4b")
LIBRARIES = ("torch", "triton", "numpy", "transformers", "megatron-core", "fla-core")

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A process."""

    name: str
    arguments: tuple[str, ...]
    """Of `benchmarks.gpu.parts`."""
    seconds: float
    """Its limit."""

    @property
    def title(self) -> str:
        """Title of a table and of a log."""
        words = [word for word in self.arguments if not word.startswith("-")]
        return " ".join(dict.fromkeys([self.name, *words]))


def phases(call: str, models: Sequence[str] = MODELS) -> list[list[Part]]:
    """List what a call may run: phases one after the other, the parts of each side by side. What is
    timed has a phase of its own; the most telling parts come first."""
    environment = [Part("environment", ("environment",), 45)]
    checks = [Part("configs", ("configs", op), 125) for op in AUTOTUNED]
    for op in OPS:
        checks += [Part("check", ("check", op, dtype), 110) for dtype in ("bf16", "fp32")]
    serving = [("serving", model) for model in models]
    if call == "all":
        return [
            environment,
            *([Part("graphs", ("graphs", model), 120)] for model in models[:1]),
            [Part("tests", ("tests", file), 150) for file in TESTS],
            *([Part("serving", arguments, 135)] for arguments in serving),
            [Part("ops", ("ops", "packed_linear"), 45)],
            checks,
        ]
    if call == "quick":
        return [environment, checks, [Part("sanitizer", ("sanitizer",), 90)]]
    compiled = [*serving, *(("ops", op) for op in OPS)]
    return [
        [Part("compile", (*arguments, "--once"), 75) for arguments in compiled],
        [Part("ops", ("ops",), 90)],
        *([Part("serving", arguments, 75)] for arguments in serving),
    ]


def main(arguments: list[str] | None = None, command: Sequence[str] = COMMAND) -> int:
    """Run a call. Returns how many rows tell of a fault, at most 1.

    Args:
        command: see `COMMAND`.
    """
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = sorted({part.name for call in BUDGETS for phase in phases(call) for part in phase})
    parser.add_argument("call", choices=BUDGETS)
    parser.add_argument(
        "--parts", nargs="+", choices=names, metavar="PART", help=f"Run these parts, of {names}."
    )
    known = (*MODELS, *OTHER_MODELS)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=known,
        metavar="MODEL",
        default=MODELS,
        help=f"Measure these models, of {known}.",
    )
    parser.add_argument("--toy", action="store_true", help="Run all parts on the CPU, at toy size.")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"Limit the call to this time, in place of {BUDGETS}. Limits of the parts change in "
        "proportion.",
    )
    for name, default, what in (
        ("logs", "runs/first_run", "folder for the archive of the parts' logs"),
        ("results", "benchmarks/results", "folder for the table and the rows"),
        ("wheels", "wheels/gpu", "folder with wheels of what is not installed"),
    ):
        parser.add_argument(f"--{name}", type=Path, default=ROOT / default, help=what)
    options = parser.parse_args(arguments)
    wanted = options.parts or names
    seconds = options.seconds or BUDGETS[options.call]
    stretch = seconds / BUDGETS[options.call]
    chosen = [
        [replace(part, seconds=part.seconds * stretch) for part in phase if part.name in wanted]
        for phase in phases(options.call, options.models)
    ]
    extra = ("--toy",) if options.toy else ()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the table is written
    with tempfile.TemporaryDirectory() as site:
        report = Report(options.call, options.results, options.logs, site)
        try:
            if not options.toy and (fault := install(options.wheels, site)) is not None:
                report.add("install", fault_row("wheels", fault))
            runner = Runner(report, (*command,), extra, began + seconds - RESERVE, site)
            for phase in chosen:
                runner.run(phase)
        finally:
            report.close(time.monotonic() - began)
    return min(1, len(report.faults))


def install(wheels: Path, site: str) -> str | None:
    """Install wheels into a folder, unless what they hold is installed. Returns what went wrong."""
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("fla"):
        return None
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return f"megatron-core or fla-core is missing, and no wheel is in {wheels}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--target", site]
    done = subprocess.run([*pip, *files], capture_output=True, text=True)
    return None if done.returncode == 0 else _last_line(done.stderr)


def versions(site: str | None = None) -> dict[str, str]:
    """Read versions of Python and of what is installed of `LIBRARIES`, in a folder or in
    `sys.path`."""
    found = {"python": platform.python_version()}
    path = [*([] if site is None else [site]), *sys.path]
    for library in LIBRARIES:
        matching = importlib.metadata.distributions(name=library, path=path)
        for distribution in itertools.islice(matching, 1):
            found[library] = distribution.version
    return found


def fault_row(what: str, fault: str) -> Row:
    """A row of this file's own."""
    return {"what": what, "fault": fault, "cells": [what, f"FAULT: {fault}", "", ""]}


@dataclass
class Report:
    """Prints what was found, and writes it to files."""

    call: str
    results: Path
    logs: Path
    site: str
    device: str = "no device"
    rows: list[tuple[str, Row]] = field(default_factory=list)
    """Title of the part, and the row."""
    ends: list[tuple[str, float, str]] = field(default_factory=list)
    """Title of a part that ended, seconds, how."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)
        self._is_written = True

    @property
    def folder(self) -> Path:
        """Folder of the logs, until they are packed."""
        return self.logs / self.call

    @property
    def faults(self) -> list[tuple[str, Row]]:
        """The rows that tell of one."""
        return [(title, row) for title, row in self.rows if row["fault"]]

    @property
    def stem(self) -> str:
        """Stem of the files' names."""
        device = re.sub(r"[^a-z0-9]+", "_", self.device.lower()).strip("_")
        return f"first_run_{device}_{self.call}"

    def add(self, title: str, row: Row) -> None:
        """Take a row, and print it."""
        self.device = row.get("device") or self.device
        self.rows.append((title, row))
        self._is_written = False
        what, result, share, more = row["cells"]
        head = " ".join(f"{title.split()[0]}: {what}: {result} {share}".split())
        if more and len(head) + 2 + len(more) <= COLUMNS:
            head, more = f"{head}  {more}", ""
        lines = [head, *textwrap.wrap(more, COLUMNS - 2)[:3]]
        print("\n  ".join(lines), flush=True)

    def end(self, title: str, seconds: float, how: str) -> None:
        """Take the end of a part."""
        self.ends.append((title, seconds, how))
        self._is_written = False
        self.write()

    def write(self) -> None:
        """Write the table and the rows, if there is something new."""
        if self._is_written:
            return
        lines = [json.dumps({"part": title, **row}) + "\n" for title, row in self.rows]
        for suffix, text in (("md", self.table()), ("jsonl", "".join(lines))):
            target = self.results / f"{self.stem}.{suffix}"
            partial = target.with_suffix(".part")
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        self._is_written = True

    def table(self) -> str:
        """Format all rows in Markdown: faults, parts, and the rows of each kind of part."""
        named = ", ".join(f"{name} {version}" for name, version in versions(self.site).items())
        text = [f"# First run, {self.call}: {self.device}\n\n{named}\n"]
        text += _section("Faults", ("part", "what", "fault"), [
            (title, row["what"], row["fault"]) for title, row in self.faults
        ])  # fmt: skip
        text += _section("Parts", ("part", "seconds", "end"), [
            (title, f"{seconds:.0f}", how) for title, seconds, how in self.ends
        ])  # fmt: skip
        for name in dict.fromkeys(title.split()[0] for title, _ in self.rows):
            found = [row["cells"] for title, row in self.rows if title.split()[0] == name]
            text += _section(name, ("what", "result", "of the roofline", "more"), found)
        return "".join(text)

    def close(self, seconds: float) -> None:
        """Write all, pack the logs, and say what was found."""
        self._is_written = False
        self.write()
        with tarfile.open(self.logs / f"{self.call}.tgz", "w:gz") as archive:
            archive.add(self.folder, self.call)
        shutil.rmtree(self.folder)
        print(f"\n{len(self.rows)} rows, {len(self.faults)} faults, {seconds:.0f} s")
        for title, row in self.faults:
            print(f"{title}: {row['what']}: {row['fault']}")
        print(f"{self.results / self.stem}.md", flush=True)


def _section(title: str, columns: Sequence[str], rows: list[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return [f"\n## {title}\n\n", *(f"| {' | '.join(line)} |\n" for line in cells)]


@dataclass
class Runner:
    """Runs parts as processes, until the deadline."""

    report: Report
    command: tuple[str, ...]
    extra: tuple[str, ...]
    """Arguments of all parts."""
    deadline: float
    """Of `time.monotonic`."""
    site: str
    """A folder of packages."""

    def run(self, phase: list[Part]) -> None:
        """Run parts side by side, each to its end or its limit."""
        waiting, running = list(phase), []
        slots = min(AT_ONCE, os.cpu_count() or 1)
        wrote = time.monotonic()
        try:
            while waiting or running:
                while waiting and len(running) < slots:
                    if (started := self._start(waiting.pop(0))) is not None:
                        running.append(started)
                running = [kept for process in running if (kept := self._look_at(process))]
                if time.monotonic() - wrote > 2:
                    self.report.write()
                    wrote = time.monotonic()
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()

    def _start(self, part: Part, skip: int = 0, resumed: int = 0) -> Running | None:
        left = self.deadline - time.monotonic()
        if left < 1:
            self.report.add(part.title, fault_row(part.title, "not run: the call's time is over"))
            self.report.end(part.title, 0.0, "not run")
            return None
        command = [*self.command, *part.arguments, *self.extra]
        command += ["--skip", str(skip)] if skip else []
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([self.site, str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }
        log = self.report.folder / f"{part.title.replace(' ', '_')}.log"
        limit = min(part.seconds, left)
        return Running(part, command, environment, log, limit, skip, resumed)

    def _look_at(self, process: Running) -> Running | None:
        """Take a process's rows. Returns what runs in its place: itself, another one, or None."""
        title = process.part.title
        code = process.process.poll()  # before the rows, so that the last ones are there
        for row in process.rows(is_ended=code is not None):
            self.report.add(title, row)
        is_late = code is None and process.seconds > process.limit
        if code is None and not is_late:
            return process
        process.kill()
        if code == POISONED and process.resumed < RESUMED:
            self.report.end(title, process.seconds, "the device failed; goes on")
            return self._start(process.part, process.skip + process.count, process.resumed + 1)
        how = "over its limit" if is_late else _ending(code)
        if how and not (code == 1 and process.told_fault):
            last = _last_line(process.log.read_text(encoding="utf-8", errors="replace"))
            fault = f"{how} after {process.seconds:.0f} s"
            self.report.add(title, fault_row(title, f"{fault}: {last}" if last else fault))
        self.report.end(title, process.seconds, how or "well")
        return None


@dataclass
class Running:
    """A part's process, whose output is its log."""

    part: Part
    command: list[str]
    environment: dict[str, str]
    log: Path
    limit: float
    skip: int
    """Checks left out."""
    resumed: int
    """Processes before this one that ended at a check."""
    count: int = 0
    """Rows so far."""
    told_fault: bool = False
    """Whether the last of them was one."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        with self.log.open("ab") as output:
            self._at = output.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=self.environment,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._began

    def rows(self, is_ended: bool) -> Iterator[Row]:
        """Yield those that are new in the log."""
        with self.log.open("rb") as log:
            log.seek(self._at)
            found = log.read()
        whole = len(found) if is_ended else found.rfind(b"\n") + 1
        self._at += whole
        for line in found[:whole].decode("utf-8", "replace").splitlines():
            if not line.startswith(MARK):
                continue
            try:
                row = json.loads(line.removeprefix(MARK))
            except ValueError:  # its process died while it was printed
                row = fault_row("a row that cannot be read", line[:60])
            self.count += 1
            self.told_fault = bool(row["fault"])
            yield row

    def kill(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _ending(code: int) -> str:
    """Say how a process ended; empty: well."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else ""


def _last_line(text: str) -> str:
    """Return what a log says last, without its rows."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(MARK)]
    return lines[-1].strip()[:100] if lines else ""


if __name__ == "__main__":
    sys.exit(main())
