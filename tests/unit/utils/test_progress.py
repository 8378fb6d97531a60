"""Progress: a bar on a terminal, lines without one, and nothing for what ends at once."""

import io

import pytest
from reference import greedy, tiny_engine
from rich.console import Console

from megatron_hybrid.utils import progress as module
from megatron_hybrid.utils.progress import progress


def drawn(monkeypatch, terminal, total, advances=(3,), seconds=20.0, **options):
    """What is written where each `advance` comes so many seconds after the one before it."""
    times = iter(seconds * step for step in range(9))
    monkeypatch.setattr(module, "monotonic", lambda: next(times))
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80)
    monkeypatch.setattr(module, "Console", lambda stderr: console)
    with progress("reading [model]", total, **options) as advance:
        for count in advances:
            advance(count)
    return stream.getvalue()


def test_a_terminal_shows_a_bar(monkeypatch):
    output = drawn(monkeypatch, True, 6 << 30, [2 << 30, 1 << 30])
    assert "reading [model]" in output and "3.0/6.0 GiB" in output
    assert "3/6" in drawn(monkeypatch, True, 6, in_bytes=False)


def test_without_a_terminal_there_is_a_line_from_time_to_time(monkeypatch):
    assert drawn(monkeypatch, False, 6, [3, 3]) == "reading [model]: 50 %\nreading [model]: 100 %\n"
    assert drawn(monkeypatch, False, 6, [3, 3], seconds=6.0) == "reading [model]: 100 %\n"
    assert drawn(monkeypatch, False, None, [3, 3]) == "reading [model]: 3\nreading [model]: 6\n"
    assert drawn(monkeypatch, False, 6, has_lines=False) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_shows_what_ends_at_once_or_on_other_ranks(terminal, monkeypatch):
    assert drawn(monkeypatch, terminal, 6, [3, 3], seconds=0.4) == ""
    assert drawn(monkeypatch, terminal, 6, is_shown=False) == ""


@pytest.mark.parametrize("shows", [True, False])
def test_an_engine_shows_how_many_prompts_are_answered(shows, monkeypatch):
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    monkeypatch.setattr(module, "Console", lambda stderr: console)
    monkeypatch.setattr(module, "BAR_SECONDS", 0.0)
    tiny_engine().generate([[1, 2], [3, 4]], greedy(2), progress=shows)
    assert ("generating" in stream.getvalue() and "2/2" in stream.getvalue()) == shows
