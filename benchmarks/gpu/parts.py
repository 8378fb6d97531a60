"""The parts of a first run: `python -m benchmarks.gpu.parts NAME [ARGUMENT ...]`.

Each is for a process of its own. A row is a line of standard output: `MARK`, and JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

from benchmarks.gpu import checks, ops, serving
from benchmarks.gpu.autotuned import chosen
from benchmarks.gpu.bench import Bench, Row, first_line
from benchmarks.gpu.first_run import MARK, POISONED, ROOT, versions
from megatron_hybrid.ops import dispatch


def main(arguments: list[str] | None = None) -> int:
    """Run a part and print its rows. Returns the exit code."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.parts")
    parser.add_argument("name", choices=PARTS)
    parser.add_argument(
        "arguments", nargs="*", help="Give the part these arguments: an op and a dtype, or a model."
    )
    parser.add_argument("--toy", action="store_true", help="Run on the CPU, at toy size.")
    parser.add_argument(
        "--once", action="store_true", help="Make each call once, to compile kernels."
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="Skip this many checks at the beginning."
    )
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="megatron")
    bench, what = None, " ".join([options.name, *options.arguments])
    began = time.perf_counter()

    def tell(row: Row) -> None:
        line = json.dumps({"device": bench and bench.name, **row.values()})
        print(f"{MARK}{line}", flush=True)

    try:
        is_check = options.name in CHECKS
        bench = Bench.start(options.toy, options.once or is_check)
        with chosen(compiles_all=True) if options.once else nullcontext():
            if options.name == "tests":
                return tests(bench, *options.arguments, options.skip, tell)
            if is_check:
                found = CHECKS[options.name](bench, *options.arguments)
                return _made(bench, itertools.islice(found, options.skip, None), tell)
            for row in PARTS[options.name](bench, *options.arguments):
                if row.fault or not options.once:
                    tell(row)
        if options.once:
            tell(Row(what, note=f"compiled in {time.perf_counter() - began:.0f} s"))
        return 0
    except Exception as error:
        traceback.print_exc()
        tell(Row(what, fault=f"{type(error).__name__}: {first_line(error)}"))
        return 1


def _made(bench: Bench, made: Iterable[checks.Check], tell: Callable[[Row], None]) -> int:
    """Make checks and tell their rows, as far as the device survives them."""
    for check in made:
        try:
            row = check.make()
        except Exception as error:
            traceback.print_exc()
            row = Row(check.what, fault=f"{type(error).__name__}: {first_line(error)}")
        tell(row)
        if row.fault and bench.is_poisoned():
            return POISONED
        bench.free()
    return 0


def environment(bench: Bench) -> Iterator[Row]:
    """Versions, the device and its limits, and which backend would serve each op."""
    yield Row("versions", numbers=versions())
    compilers = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    yield Row(
        "C compiler",
        note=compilers[0] if compilers else "",
        fault="" if compilers else "none on PATH; Triton compiles its launchers with it",
    )
    if bench.limits is not None:
        limits = bench.limits
        numbers = {"TB/s": limits.bandwidth / 1e12, "bf16 TFLOP/s": limits.flops / 1e12}
        yield Row(bench.name, numbers=numbers | {"GB": limits.memory_bytes / 1e9})
    for name, op in dispatch.OPS.items():
        reasons = {backend: reason or "usable" for backend, reason in op.refusals().items()}
        usable = [backend for backend, reason in op.refusals().items() if reason is None]
        is_alone = bench.is_cuda and op.backends and usable == [dispatch.REFERENCE]
        fault = "its reference alone can serve" if is_alone else ""
        yield Row(f"backends of {name}", numbers=reasons, fault=fault)


def tests(bench: Bench, name: str, skip: int, tell: Callable[[Row], None]) -> int:
    """Run a file's tests for a GPU, a row each; at toy size count them. Returns the exit code."""
    import pytest

    class Told:
        fault = ""

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            del session.items[:skip]
            if bench.toy:
                tell(Row(name, note=f"{len(session.items)} tests"))

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                self.fault = str(report.longrepr).strip().splitlines()[-1][-100:]
            if report.when == "teardown":
                print()  # after a dot of pytest
                tell(Row(report.nodeid.rpartition("/")[2], fault=self.fault))
                if self.fault and bench.is_poisoned():
                    pytest.exit("the device does nothing any more", POISONED)
                self.fault = ""

    (path,) = (ROOT / "tests").rglob(f"{name}.py")
    options = ["-m", "gpu", "-q", "-s", "-p", "no:cacheprovider", str(path)]
    code = pytest.main([*options, *["--collect-only"] * bench.toy], [Told()])
    return 0 if code == pytest.ExitCode.TESTS_FAILED else int(code)  # its rows say so


def sanitizer(bench: Bench) -> Iterator[Row]:
    """Each backend once under compute-sanitizer's memory check."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield Row("compute-sanitizer", note="is not on PATH")
        return
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--print-limit", "20"]
    command += [sys.executable, "-m", "benchmarks.gpu.parts", "small"]
    process = subprocess.Popen(
        command + (["--toy"] if bench.toy else []),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Else torch's own cache hides accesses after a tensor's end.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    told: list[str] = []
    for line in process.stdout:
        if line.startswith(MARK):
            found = json.loads(line.removeprefix(MARK))
            fault = f"{told[0]} ({len(told)} reports)" if told else found["fault"]
            yield Row(f"memcheck of {found['what']}", note=found["note"], fault=fault)
            told = []
        else:
            print(line, end="", flush=True)
        if line.startswith("========= ") and line[10:11].strip():
            if "ERROR SUMMARY" in line:
                is_clean = "SUMMARY: 0 errors" in line
                yield Row("memcheck", note=line[10:].strip(), fault="" if is_clean else "errors")
            elif line[10:].startswith(("Invalid", "Misaligned")):
                told.append(line[10:].strip())
    if code := process.wait():
        yield Row("memcheck", fault=told[0] if told else f"exit code {code}")


CHECKS = {"check": checks.ops, "configs": checks.configs, "small": checks.small}
PARTS = {
    **CHECKS,
    "environment": environment,
    "sanitizer": sanitizer,
    "ops": ops.run,
    "serving": serving.run,
    "graphs": serving.graphs,
    "tests": tests,
}

if __name__ == "__main__":
    sys.exit(main())
