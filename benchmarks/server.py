"""What the HTTP server costs over `AsyncEngine` in process, and how long its event loop is busy.

The server is a process of its own; the client is raw sockets in this one, where the engine that it
is compared with runs, too, by turns.
"""

import asyncio
import gzip
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from benchmarks.common import Row, median_ratio, paired, seconds
from benchmarks.server_process import CONFIG, demo, tiny
from megatron_hybrid import AsyncEngine, DynamicInferenceEngine, SamplingParams

PROMPT = "Once upon a time there was a king who had three daughters."
REQUESTS, ROUNDS = 100, 9
STREAMS, TOKENS = (1, 16, 64), 50
CLIENTS, ANSWERS, ANSWER_TOKENS = 64, 256, 16
RATE_TOKENS, RATE_ROUNDS = 200, 15
PAGE_PIECES, PAGE_TOKENS, PAGE_ROUNDS = 10_000, 2000, 5
PER_REQUEST, PER_TOKEN, THROUGHPUT, RATE, PAGE_RATE = 1e-3, 100e-6, 0.9, 0.85, 0.97
"""Goals: seconds, seconds, requests/s in those of the engine, and tokens/s in those of it and in
those without a page."""
USAGE = {"include_usage": True}
KEPT_SECONDS = 2
"""An idle connection; the server closes it after 5 s."""


def run() -> Iterator[Row]:
    with server() as process, asyncio.Runner() as runner:
        client = Client(process.port)
        model, tokenizer = demo()
        engine = AsyncEngine(model, tokenizer, CONFIG)
        try:
            yield from compare(Pairs(runner, client, Alone(engine)))
        finally:
            runner.run(engine.close())
        yield from gaps(runner, client)
    with server("tiny") as process, asyncio.Runner() as runner:
        client = Client(process.port)
        yield from rates(runner, client)
        yield from beside_a_page(runner, client)


class Server(subprocess.Popen):
    """A server that answers. Attributes: port."""

    def __init__(self, model: str):
        command = [sys.executable, "-m", "benchmarks.server_process", model]
        super().__init__(command, stderr=subprocess.PIPE, text=True)
        for line in self.stderr:
            if "running on" in (text := json.loads(line).get("message", "")):
                self.port = int(text.split(":")[2].split()[0])
                return
        raise RuntimeError("the server has not started")


@contextmanager
def server(model: str = "demo") -> Iterator[Server]:
    """Context of a server, whose log is read and dropped."""
    process = Server(model)
    drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        drain.wait(60)


class Alone:
    """Asks the engine in this process."""

    def __init__(self, engine: AsyncEngine):
        self._engine = engine

    async def answer(self, tokens: int) -> None:
        """A whole answer."""
        await self._engine.generate(PROMPT, params_of(tokens))

    async def stream(self, tokens: int) -> int:
        """Number of outputs of a stream."""
        return sum([1 async for _ in self._engine.stream(PROMPT, params_of(tokens))])


class Client:
    """Asks the server. Connections are kept."""

    def __init__(self, port: int):
        self._port = port
        self._free: list[tuple[float, asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def answer(self, tokens: int) -> None:
        """A whole answer."""
        await self.ask("/v1/completions", body_of(tokens))

    async def stream(self, tokens: int) -> int:
        """Number of events with tokens."""
        text = await self.ask("/v1/completions", {**body_of(tokens), "stream": True})
        return text.count(b'"token_ids"')

    async def stream_text(self, tokens: int) -> None:
        """A stream of texts alone, as most clients ask for."""
        body = {**body_of(tokens), "return_token_ids": False, "stream": True}
        text = await self.ask("/v1/completions", {**body, "stream_options": USAGE})
        if f'"completion_tokens": {tokens},' not in text.decode():
            raise RuntimeError(f"the stream had not {tokens} tokens: {text[-1000:]!r}")

    async def ask(self, path: str, body: object = None) -> bytes:
        """The body of an answer. body: None gets."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += "Accept-Encoding: gzip\r\n" if path.startswith("/cache/tree") else ""
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        reader, writer = await self._connection()
        writer.write(head.encode() + data)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length: " in answer:
            size = int(answer.split(b"content-length: ")[1].split()[0])
            text = await reader.readexactly(size)
        else:
            text = await reader.readuntil(b"\r\n0\r\n\r\n")
        self._free.append((time.monotonic(), reader, writer))
        if answer.split()[1] != b"200":
            raise RuntimeError(text.decode())
        return text

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._free:
            since, reader, writer = self._free.pop()
            if time.monotonic() - since < KEPT_SECONDS:
                return reader, writer
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)


def params_of(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, ignore_termination=True)


def body_of(tokens: int) -> dict:
    return {
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


class Pairs:
    """The same work over HTTP and by the engine alone, by turns.

    Args:
        runner: of both.
        client: of the server.
        alone: the engine.
    """

    def __init__(self, runner: asyncio.Runner, client: Client, alone: Alone):
        self._runner, self._client, self._alone = runner, client, alone

    def run(self, work: Callable[[Client | Alone], Awaitable], rounds: int) -> list[tuple]:
        """Measure of each round the seconds over HTTP, those of the engine alone, and the CPU time
        of the server's event loop."""
        return [self._round(work) for _ in range(rounds + 1)][1:]

    def _round(self, work: Callable[[Client | Alone], Awaitable]) -> tuple:
        began = self._cpu()
        over = self._timed(work(self._client))
        cpu = self._cpu() - began
        return over, self._timed(work(self._alone)), cpu

    def _timed(self, work: Awaitable) -> float:
        began = time.perf_counter()
        self._runner.run(work)
        return time.perf_counter() - began

    def _cpu(self) -> float:
        return float(self._runner.run(self._client.ask("/cpu")))


def extra(rounds: list[tuple], parts: int, unit: float, name: str) -> str:
    """Say what HTTP adds to each part of a round, and the CPU time of the event loop in it."""
    wall = statistics.median(over - alone for over, alone, _ in rounds) / parts / unit
    cpu = statistics.median(cpu for *_, cpu in rounds) / parts / unit
    return f"{wall:+.4g} {name}; event loop {cpu:.4g} {name}"


def compare(pairs: Pairs) -> Iterator[Row]:
    rounds = pairs.run(lambda asked: asked.answer(1), REQUESTS)
    alone = statistics.median(each[1] for each in rounds)
    yield Row(
        "a request over HTTP, over the engine alone",
        f"{extra(rounds, 1, 1e-3, 'ms')} ({alone * 1e3:.1f} ms alone)",
        f"<= {PER_REQUEST * 1e3:.0f} ms",
    )
    for count in STREAMS:
        counts: list[tuple] = []

        async def stream(asked: Client | Alone, count: int = count, counts: list = counts) -> None:
            found = await asyncio.gather(*(asked.stream(TOKENS) for _ in range(count)))
            counts += [(TOKENS, each) for each in found]

        rounds = pairs.run(stream, ROUNDS)
        step = statistics.median(each[1] for each in rounds) / TOKENS
        yield Row(
            f"a token of one of {count} streams over HTTP, over the engine alone",
            f"{extra(rounds, TOKENS * count, 1e-6, 'us')} (a step {step * 1e3:.1f} ms alone)",
            f"<= {PER_TOKEN * 1e6:.0f} us",
        )
        yield Row(
            f"tokens of {count} streams without an event of their own",
            f"{sum(made - seen for made, seen in counts)} of {sum(made for made, _ in counts)}",
            "0",
        )

    async def saturate(asked: Client | Alone) -> None:
        left = iter(range(ANSWERS))

        async def one() -> None:
            for _ in left:
                await asked.answer(ANSWER_TOKENS)

        await asyncio.gather(*(one() for _ in range(CLIENTS)))

    over, alone, _ = zip(*pairs.run(saturate, ROUNDS))
    rates = [ANSWERS / statistics.median(times) for times in (over, alone)]
    yield Row(
        f"requests/s of {CLIENTS} clients over HTTP, in those of the engine alone",
        f"{median_ratio(alone, over):.2f} ({rates[0]:.0f} / {rates[1]:.0f})",
        f">= {THROUGHPUT}",
    )


def rates(runner: asyncio.Runner, client: Client) -> Iterator[Row]:
    """Tokens/s of one stream of the tiny model, in those of `generate` in this process."""
    with DynamicInferenceEngine(*tiny(), CONFIG) as engine:
        params = params_of(RATE_TOKENS)
        over, alone = paired(
            lambda: seconds(lambda: runner.run(client.stream_text(RATE_TOKENS))),
            lambda: seconds(lambda: engine.generate(PROMPT, params)),
            RATE_ROUNDS,
        )
    rate = [RATE_TOKENS / statistics.median(times) for times in (over, alone)]
    yield Row(
        "tokens/s of one stream of a tiny model over HTTP, in those of generate in process",
        f"{median_ratio(alone, over):.2f} ({rate[0]:.0f} / {rate[1]:.0f})",
        f">= {RATE}",
    )


def beside_a_page(runner: asyncio.Runner, client: Client) -> Iterator[Row]:
    """Tokens/s of one stream while a page shows a tree of many pieces, in those of one alone."""
    runner.run(grow_tree(client))

    async def streamed(is_open: bool) -> None:
        page = asyncio.ensure_future(Page(client).run() if is_open else asyncio.sleep(0))
        await client.stream_text(PAGE_TOKENS)
        page.cancel()

    shown, alone = paired(
        lambda: seconds(lambda: runner.run(streamed(True))),
        lambda: seconds(lambda: runner.run(streamed(False))),
        PAGE_ROUNDS,
    )
    yield Row(
        f"tokens/s of one stream next to a page with {PAGE_PIECES:,} pieces, in those without",
        f"{median_ratio(alone, shown):.3f}",
        f">= {PAGE_RATE}",
    )


async def grow_tree(client: Client) -> None:
    """Prompts that part from each other at as many places."""
    few = 256  # of one request
    for start in range(0, PAGE_PIECES, few):
        prompts = [
            [5, 6, *divmod(number, 100), *range(7, 27)] for number in range(start, start + few)
        ]
        await client.ask("/v1/completions", {"prompt": prompts, "max_tokens": 0})


class Page:
    """Asks as `serving/page/main.js` does."""

    def __init__(self, client: Client):
        self._client = client
        self._version = ""

    async def run(self) -> None:
        await asyncio.gather(
            self._again(0.7, self._client.ask, "/requests"),
            self._again(2, self._ask_tree),
            self._again(5, self._client.ask, "/cache/history?seconds=3600"),
        )

    async def _ask_tree(self) -> None:
        told = await self._client.ask(f"/cache/tree?since={self._version}")
        told = gzip.decompress(told) if told[:2] == b"\x1f\x8b" else told  # small ones are not
        self._version = json.loads(told)["version"]

    async def _again(self, pause: float, ask: Callable[..., Awaitable], *path: str) -> None:
        while True:
            await ask(*path)
            await asyncio.sleep(pause)


def gaps(runner: asyncio.Runner, client: Client) -> Iterator[Row]:
    """The longest gap of the event loop while one stream runs, and something else is asked."""
    text = (PROMPT + " ") * (200_000 // len(PROMPT))
    choice = {"enum": [f"value {index}" for index in range(8)]}
    inner = {"type": "object", "properties": {f"field{index}": choice for index in range(9)}}
    schema = {"type": "object", "properties": {f"part{index}": inner for index in range(40)}}
    guided = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    turns = {"messages": [{"role": "user", "content": text[:2000]}] * 100}
    tasks: dict[str, list[tuple]] = {
        "nothing else": [],
        "a text of 200 kB to tokenize": [("/tokenize", {"prompt": text})],
        "a chat of 200 kB to render": [("/v1/chat/completions/render", turns)],
        "a JSON schema of 360 fields": [
            ("/v1/chat/completions", {**chat, "response_format": guided})
        ],
        "64 requests at once": [("/v1/completions", body_of(8))] * 64,
    }
    for what, calls in tasks.items():

        async def ask(calls: list = calls) -> float:
            stream = asyncio.ensure_future(client.stream(200))
            await client.ask("/gap")
            for _ in range(3):
                await asyncio.gather(*(client.ask(*call) for call in calls))
            await stream
            return float(await client.ask("/gap"))

        found = statistics.median(runner.run(ask()) for _ in range(3))
        yield Row(f"longest gap of the event loop: a stream, and {what}", f"{found * 1e3:.1f} ms")
