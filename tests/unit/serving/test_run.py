"""The logs of a server, its address, and its end."""

import asyncio
import io
import json
import logging
import re
import socket
import threading

import pytest
from waiting import LIMIT_S

from megatron_hybrid.serving.request_middleware import access
from megatron_hybrid.serving.run import Address, log_lines


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
def stream(monkeypatch, request):
    """A slow stderr, to which the loggers of this program write; param: it is a terminal."""
    stream, ends = SlowStream(), []
    stream.isatty = lambda: getattr(request, "param", False)
    loggers = [logging.getLogger(name) for name in ("megatron_hybrid", "uvicorn")]
    before = [(own.handlers, own.propagate, own.level) for own in loggers]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr("atexit.register", ends.append)
    log_lines()
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
        assert stream.num_lines.acquire(timeout=LIMIT_S)
    plain, request, failed = map(json.loads, stream.getvalue().splitlines())
    assert (plain["message"], plain["level"]) == ("3 requests", "info")
    assert plain["logger"] == "megatron_hybrid.some.part" and plain["time"].endswith("Z")
    assert (request["path"], request["status"]) == ("/metrics", 200) and "message" not in request
    assert "ValueError: no room" in failed["error"]


@pytest.mark.parametrize("stream", [True], indirect=True)
def test_a_terminal_gets_plain_lines(stream):
    line = {"method": "POST", "path": "/v1/completions", "status": 200, "ms": 35.4}
    line |= {"prompt_tokens": 1400, "completion_tokens": 40, "prefix": [{"skipped_tokens": 1200}]}
    access.info("%s", line)
    stream.reads.set()
    assert stream.num_lines.acquire(timeout=LIMIT_S)
    text = stream.getvalue().rstrip()
    assert re.fullmatch(r"\d\d:\d\d:\d\d POST /v1/completions 200 in 35 ms: 1,400 .*", text)
    assert text.endswith("1,400 prompt tokens, 1,200 of them skipped; 40 generated")


def test_cancelled_requests_write_no_traceback(stream):
    logger = logging.getLogger("uvicorn.error")
    for error in (asyncio.CancelledError(), ValueError("shown")):
        logger.error("Exception in ASGI application", exc_info=error)
    stream.reads.set()
    assert stream.num_lines.acquire(timeout=LIMIT_S)
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert "ValueError: shown" in line["error"]


def test_a_busy_port_is_found_when_it_is_bound(tmp_path):
    address = Address(port=0)
    with address.bind() as bound:
        port = bound.getsockname()[1]
        assert address.url(bound) == f"http://127.0.0.1:{port}"
        with pytest.raises(OSError, match=f"--port {port} cannot be used: .*give another --port"):
            Address(port=port).bind()
    Address(port=port).bind().close()  # it is free at once
    path = str(tmp_path / "socket")
    assert Address(uds=path).bind() is None
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(ValueError, match="is in use"):
            Address(uds=path).bind()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (Address(port=70000), "from 0 to 65535"),
        (Address(host="no such host"), "--host no such host"),
        (Address(keyfile="key.pem"), "needs --ssl-certfile"),
        (Address(certfile="/nowhere.pem"), "--ssl-certfile /nowhere.pem is no file"),
        (Address(certfile="/dev/null", keyfile="/no.key"), "--ssl-keyfile /no.key is no file"),
        (Address(certfile="/dev/null"), "--ssl-certfile /dev/null is no certificate"),
        (Address(uds="/nowhere/s"), "--uds /nowhere/s: there is no such folder"),
    ],
)
def test_addresses_that_cannot_be_used(address, message):
    with pytest.raises((OSError, ValueError), match=message):
        address.bind()
