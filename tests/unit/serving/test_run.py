"""The logs of a server."""

import io
import json
import logging
import threading

import pytest

from megatron_hybrid.serving.door import access
from megatron_hybrid.serving.run import log_json_lines


class SlowStream(io.StringIO):
    """A stderr that nobody reads, until `reads` is set."""

    def __init__(self):
        super().__init__()
        self.reads, self.num_lines = threading.Event(), threading.Semaphore(0)

    def write(self, text: str) -> int:
        self.reads.wait()
        written = super().write(text)
        for _ in range(text.count("\n")):
            self.num_lines.release()
        return written


@pytest.fixture
def stream(monkeypatch):
    """A slow stderr, to which the loggers of this program write."""
    stream, ends = SlowStream(), []
    loggers = [logging.getLogger(name) for name in ("megatron_hybrid", "uvicorn")]
    before = [(own.handlers, own.propagate, own.level) for own in loggers]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("atexit.register", ends.append)
    log_json_lines()
    yield stream
    stream.reads.set()
    for end in ends:
        end()
    for own, (handlers, propagates, level) in zip(loggers, before):
        own.handlers, own.propagate = handlers, propagates
        own.setLevel(level)


def test_lines_are_json_however_late_they_are_read(stream):
    logger = logging.getLogger("megatron_hybrid.some.part")
    logger.info("%d requests", 3)
    access.info("%s", {"path": "/metrics", "status": 200})
    try:
        raise ValueError("no room")
    except ValueError:
        logger.exception("it failed")
    assert stream.getvalue() == ""  # nothing has waited for the reader
    stream.reads.set()
    for _ in range(3):
        assert stream.num_lines.acquire(timeout=120)
    plain, request, failed = map(json.loads, stream.getvalue().splitlines())
    assert (plain["message"], plain["level"]) == ("3 requests", "info")
    assert plain["logger"] == "megatron_hybrid.some.part" and plain["time"].endswith("Z")
    assert (request["path"], request["status"]) == ("/metrics", 200) and "message" not in request
    assert "ValueError: no room" in failed["error"]
