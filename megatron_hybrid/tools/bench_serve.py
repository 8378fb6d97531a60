"""`megatron-hybrid bench-serve`: load on a server of OpenAI's API, and what its requests took.

Each request is a stream on a connection of its own, over asyncio's sockets: an HTTP client for all
purposes would take more time for an event than a small model for its token.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from textwrap import wrap
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from megatron_hybrid.tools.replay.jsonl import check_tokens, errors_name, is_chat, read_lines

WIDTH = 80
"""Columns of the printed report."""
PERCENTILES = (50, 90, 99)
NO_MISS = "none"
"""Stands for a miss reason where all was skipped that was ever cached."""
_TOKEN_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls")
"""Fields of a chat's delta that show tokens."""
_PART_BYTES = 1 << 16


# The workload -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One request, ready to be sent."""

    path: str
    body: bytes
    session: int | str
    arrival: float | None
    """Seconds; None: the file has none."""


def read_calls(
    path: str | Path,
    model: str,
    limit: int | None = None,
    output_len: int = 256,
    ignore_eos: bool = False,
    temperature: float = 0.0,
    vocab_size: int | None = None,
) -> list[Call]:
    """Read the requests of a JSONL file: the fields of `replay.jsonl`, `max_tokens`, `cache_salt`.

    Args:
        model: its name at the server.
        limit: most requests.
        output_len: most tokens of an answer, where the line has no `max_tokens` and no answer as
            token ids.
        ignore_eos: answers have all of these tokens.
        vocab_size: token ids are taken modulo this number; None: they are sent as they are.

    Raises:
        ValueError: a line is no request; the message names file, line and remedy.
    """
    shared = {
        "model": model,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:  # not in OpenAI's own API
        shared["ignore_eos"] = True
    calls = []
    for line in read_lines(path, limit):
        prompt, answer, row = line.prompt, line.output, line.row
        known = len(answer) if isinstance(answer, list) else output_len
        body = {
            **shared,
            "max_tokens": known if row.get("max_tokens") is None else row["max_tokens"],
        }
        if row.get("cache_salt") is not None:
            body["cache_salt"] = row["cache_salt"]
        if is_chat(prompt):
            route, body["messages"] = "/v1/chat/completions", prompt
            if row.get("tools"):
                body["tools"] = row["tools"]
        else:
            route, body["prompt"] = "/v1/completions", prompt
            if not isinstance(prompt, str):
                with errors_name(line.place):
                    check_tokens(line.prompt_field, prompt, 1 << 31)
                if vocab_size is not None:
                    body["prompt"] = [token % vocab_size for token in prompt]
        arrival = None if row.get("arrival") is None else line.arrival
        calls.append(Call(route, json.dumps(body).encode(), line.session, arrival))
    return calls


def arrivals(calls: Sequence[Call], rate: float | None, seed: int = 0) -> list[float]:
    """Seconds from the start at which each request may begin.

    Args:
        rate: requests a second of a Poisson process; infinite: all at once; None: as recorded.

    Raises:
        ValueError: as recorded, and a request has no time.
    """
    if rate is not None:
        rng, now = random.Random(seed), 0.0
        return [now := now + rng.expovariate(rate) for _ in calls]
    if missing := sum(call.arrival is None for call in calls):
        raise ValueError(
            f"{missing} of {len(calls)} lines have no `arrival`, which a recorded rate needs: add "
            "it, or give a number of requests a second"
        )
    return [call.arrival - calls[0].arrival for call in calls]


# HTTP -------------------------------------------------------------------------------------------


class Server:
    """The server that requests go to.

    Args:
        url: with or without /v1 at its end.
        api_key: None: none is sent.
    """

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url is {url!r}: give a URL such as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._tls = parts.scheme == "https"
        self._address = parts.hostname, parts.port or (443 if self._tls else 80)
        self._prefix = urlsplit(self.url).path
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key is not None:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    @asynccontextmanager
    async def exchange(
        self, path: str, body: bytes | None = None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Context of a POST, or without a body a GET: the status, and the parts of the answer.

        Raises:
            EOFError: the connection ends too early.
        """
        head = f"{'GET' if body is None else 'POST'} {self._prefix}{path} HTTP/1.1\r\n"
        head += self._headers
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        reader, writer = await asyncio.open_connection(*self._address, ssl=self._tls or None)
        try:
            writer.write(f"{head}\r\n".encode() + (body or b""))
            await writer.drain()
            status = await _line(reader)
            if not status.startswith(b"HTTP/1."):
                raise ValueError(f"the answer begins with {status[:40]!r}, which is no HTTP")
            headers = {}
            while line := (await _line(reader)).strip():
                name, _, value = line.partition(b":")
                headers[name.lower()] = value.strip().lower()
            yield int(status.split()[1]), _parts(reader, headers)
        finally:
            writer.close()

    def first_model(self) -> str:
        """The name of the first model.

        Raises:
            ValueError: the server does not say.
        """

        async def ask() -> tuple[int, bytes]:
            async with self.exchange("/v1/models") as (status, parts):
                return status, b"".join([part async for part in parts])

        try:
            status, body = asyncio.run(ask())
        except (OSError, EOFError) as error:
            raise ValueError(
                f"{self.url} does not answer ({error or 'the connection ended'}): start the server "
                "first, such as `megatron-hybrid serve`, and give its --base-url"
            ) from error
        try:
            return json.loads(body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self.url}/v1/models answers {status}: {_message(body)}; give --model, and "
                "--api-key if the server needs one"
            ) from error


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


async def _parts(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    """The body, as it comes."""
    if headers.get(b"transfer-encoding") == b"chunked":
        while size := int((await _line(reader)).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif b"content-length" in headers:
        yield await reader.readexactly(int(headers[b"content-length"]))
    else:
        while part := await reader.read(_PART_BYTES):
            yield part


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, however they are cut into parts."""
    held = b""
    async for part in parts:
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip()


def _message(body: bytes) -> str:
    """Return the message of an answer with an error."""
    try:
        return _error_text(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200] or "nothing"


def _error_text(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


# The load ---------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """One request that has ended. Times in milliseconds, from before its connection."""

    index: int
    """Index in the file."""
    start_s: float
    """Seconds since the run began."""
    status: int | None = None
    """HTTP status; None: no answer."""
    error: str | None = None
    ttft_ms: float | None = None
    """Milliseconds to the first event that shows tokens."""
    itl_ms: list[float] = field(default_factory=list)
    """Milliseconds between these events."""
    e2e_ms: float = 0.0
    """Milliseconds to the end of the stream."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed."""
    completion_tokens: int = 0
    miss_reason: str | None = None

    @property
    def failure(self) -> str:
        """Kind of the error."""
        if self.status is None:
            return "no answer"
        return "broken stream" if self.status == 200 else str(self.status)


@dataclass
class Run:
    """The measurements of a run."""

    num_calls: int
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes in the order of their ends."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU seconds of this process."""


def run(
    server: Server, calls: Sequence[Call], starts: Sequence[float], max_concurrency: int | None
) -> Run:
    """Send requests, the first of the file first among those that may begin: at its time, and when
    the turn before it in its session has ended.

    Ctrl-C ends the run: what has not ended then is left out.

    Args:
        starts: see `arrivals`.
        max_concurrency: most requests at a time; None: any.
    """
    found = Run(len(calls))
    began, cpu = time.perf_counter(), time.process_time()
    with suppress(KeyboardInterrupt):
        asyncio.run(_send_all(server, calls, starts, max_concurrency, found.outcomes))
    found.seconds, found.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return found


async def _send_all(
    server: Server,
    calls: Sequence[Call],
    starts: Sequence[float],
    max_concurrency: int | None,
    outcomes: list[Outcome],
) -> None:
    began = time.perf_counter()
    latest: dict[int | str, int] = {}
    next_turn: dict[int, int] = {}
    for index, call in enumerate(calls):
        if call.session in latest:
            next_turn[latest[call.session]] = index
        latest[call.session] = index
    waits = Counter([*range(len(calls)), *next_turn.values()])  # for their time, for a turn
    ready: list[int] = []  # a heap
    free = len(calls) if max_concurrency is None else max_concurrency

    def ends_a_wait(index: int) -> None:
        waits[index] -= 1
        if not waits[index]:
            heappush(ready, index)

    def begin() -> None:
        nonlocal free
        while ready and free:
            free -= 1
            group.create_task(send(heappop(ready)))

    async def send(index: int) -> None:
        nonlocal free
        outcomes.append(await _ask(server, calls[index], index, began))
        free += 1
        if index in next_turn:
            ends_a_wait(next_turn[index])
        begin()

    async with asyncio.TaskGroup() as group:
        for index, start in enumerate(starts):
            if (pause := began + start - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            ends_a_wait(index)
            begin()


async def _ask(server: Server, call: Call, index: int, run_began: float) -> Outcome:
    """Read one stream to its end, or to its error."""
    began = last = time.perf_counter()
    found = Outcome(index, began - run_began)
    ended = False
    try:
        async with server.exchange(call.path, call.body) as (found.status, parts):
            if found.status != 200:
                found.error = _message(b"".join([part async for part in parts]))
                return found
            async for event in _events(parts):
                now = time.perf_counter()
                if event == b"[DONE]":
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    found.error = _error_text(chunk["error"])
                    return found
                if usage := chunk.get("usage"):
                    ended = True
                    found.prompt_tokens = usage["prompt_tokens"]
                    found.completion_tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}  # servers may lack it
                    found.cached_tokens = details.get("cached_tokens") or 0
                    found.miss_reason = (usage.get("prefix") or {}).get("miss_reason")
                if any(map(_shows_tokens, chunk.get("choices") or ())):
                    if found.ttft_ms is None:
                        found.ttft_ms = (now - began) * 1e3
                    else:
                        found.itl_ms.append((now - last) * 1e3)
                    last = now
            if not ended:
                found.error = "the stream ended without `usage`"
    except EOFError:
        found.error = "the connection ended before the answer did"
    except Exception as error:  # whatever a server sends, the others go on
        found.error = f"{type(error).__name__}: {error}"
    finally:
        found.e2e_ms = (time.perf_counter() - began) * 1e3
    return found


def _shows_tokens(choice: dict[str, Any]) -> bool:
    """Return whether tokens show; the end of an answer counts, where its last token has no text."""
    if choice.get("text") or choice.get("finish_reason"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in _TOKEN_FIELDS)


# The report -------------------------------------------------------------------------------------


def summarize(found: Run) -> dict[str, Any]:
    """JSON-able values of a run. Tokens, latencies and miss reasons are of requests without an
    error."""
    outcomes, seconds = found.outcomes, found.seconds
    ok = [each for each in outcomes if each.error is None]
    wrong = [each for each in outcomes if each.error is not None]
    prompt, cached, output = (
        sum(getattr(each, name) for each in ok)
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens")
    )
    return {
        "duration_s": seconds,
        "requests": len(outcomes),
        "unfinished": found.num_calls - len(outcomes),
        "ok": len(ok),
        "failed": dict(Counter(each.failure for each in wrong).most_common()),
        "first_error": wrong[0].error if wrong else None,
        "requests_per_s": len(ok) / seconds,
        "prompt_tokens": prompt,
        "prompt_tokens_per_s": prompt / seconds,
        "cached_tokens": cached,
        "skip_rate": cached / max(1, prompt),
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "mean_concurrency": sum(each.e2e_ms for each in outcomes) / 1e3 / seconds,
        "client_cpu": found.cpu_seconds / seconds,
        "ttft_ms": _percentiles([each.ttft_ms for each in ok if each.ttft_ms is not None]),
        "itl_ms": _percentiles([gap for each in ok for gap in each.itl_ms]),
        "e2e_ms": _percentiles([each.e2e_ms for each in ok]),
        "miss_reasons": dict(Counter(each.miss_reason or NO_MISS for each in ok).most_common()),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """None: there are no values."""
    if not values:
        return None
    found = np.percentile(values, PERCENTILES)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, found)}


def to_dict(found: Run) -> dict[str, Any]:
    """The summary, and all requests in the order of the file."""
    rows = sorted(found.outcomes, key=lambda each: each.index)
    return {**summarize(found), "rows": [asdict(row) for row in rows]}


def render(summary: dict[str, Any]) -> str:
    """Format a summary as plain text."""
    failed = sum(summary["failed"].values())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary["failed"].items())
    head = f"{summary['ok']:,} requests ok, {failed:,} failed"
    head += f" ({kinds})" if failed else ""
    head += f", {summary['unfinished']:,} unfinished" if summary["unfinished"] else ""
    lines = wrap(f"{head}; {summary['duration_s']:.2f} s", WIDTH)
    if failed:
        lines += wrap(f"first error: {summary['first_error']}", WIDTH, subsequent_indent="  ")
    if not summary["ok"]:
        return "\n".join(lines)
    lines += ["", _row("", "total", "per second")]
    for name, total, rate in (
        ("requests", "ok", "requests_per_s"),
        ("prompt tokens", "prompt_tokens", "prompt_tokens_per_s"),
        ("output tokens", "output_tokens", "output_tokens_per_s"),
    ):
        lines.append(_row(name, f"{summary[total]:,}", f"{summary[rate]:,.1f}"))
    lines += [
        "",
        _row(
            "prompt tokens skipped",
            f"{summary['cached_tokens']:,}",
            f"{100 * summary['skip_rate']:.1f} %",
        ),
        _row("requests at a time, mean", f"{summary['mean_concurrency']:.1f}"),
        _row("CPU of this client", f"{100 * summary['client_cpu']:.0f} %"),
        "",
        _row("ms", *(f"p{percent}" for percent in PERCENTILES)),
    ]
    for name, key in (
        ("time to first token", "ttft_ms"),
        ("inter-token latency", "itl_ms"),
        ("end-to-end latency", "e2e_ms"),
    ):
        if (values := summary[key]) is not None:
            lines.append(_row(name, *(f"{value:,.1f}" for value in values.values())))
    lines += ["", _row("miss reason", "requests")]
    lines += [_row(reason, f"{count:,}") for reason, count in summary["miss_reasons"].items()]
    return "\n".join(lines)


def _row(name: str, *cells: str) -> str:
    return f"{name:26}" + "".join(f"{cell:>14}" for cell in cells)
