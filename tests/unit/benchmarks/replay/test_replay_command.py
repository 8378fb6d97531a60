"""`python -m benchmarks.replay`."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks.replay.__main__ import main
from benchmarks.replay.engines import ENGINES
from benchmarks.replay.table import BEGIN, END

ARGUMENTS = ["--workloads", "rl-group", "--limit", "32", "--budgets", "1", "4"]


def test_command_line(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN.format('results')}\nold\n{END.format('results')}\nafter\n")
    engines = ["ours", "lru-16", "ceiling"]
    main(
        [
            *ARGUMENTS,
            "--engines",
            *engines,
            "--json",
            str(tmp_path / "out" / "replay.json"),
            "--markdown",
            str(page),
        ]
    )
    results = json.loads((tmp_path / "out" / "replay.json").read_text())
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
