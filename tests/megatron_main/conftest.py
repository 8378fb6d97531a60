"""Prints the tables of docs/reference/megatron_tests.md, with what came of each row's tests."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "megatron_tests.md"


def pytest_terminal_summary(terminalreporter):
    outcomes: dict[str, set[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            if hasattr(report, "location"):
                name = report.location[2].partition("[")[0]
                outcomes.setdefault(name, set()).add(outcome)
    terminalreporter.section("Megatron-LM's behaviours and scripts")
    counts: dict[str, int] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        tests = re.findall(r"`(test_\w+)`", line)
        if line.startswith("|") and tests:
            *what, here, _, _ = (cell.strip() for cell in line.strip("| ").split(" | "))
            found = {outcome for test in tests for outcome in outcomes.get(test, {"not run"})}
            verdict = (
                here if found == {"passed"} else f"{', '.join(sorted(found)).upper()} ({here})"
            )
            kind = re.match(r"[\w ]+", verdict)[0].strip()
            counts[kind] = counts.get(kind, 0) + 1
            terminalreporter.write_line(f"{verdict:<12} | {' | '.join(what)}")
    terminalreporter.write_line(", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
