"""Many clients of a server at once, of which some go away, are slow, or send nonsense.

python tests/helpers/server_soak.py [SECONDS] [CLIENTS]     # 300 and 200
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import httpx
import psutil
from http_server import RunningServer, running_server

from megatron_hybrid.inference.sampling_params import SamplingParams

BEGINNINGS = ("Once upon a time there was", "The old king said to his", "In the morning the ship")
NUM_TOKENS = 24
MAX_BODY = 50_000
REFUSED = 503


def prompts() -> list[str]:
    """Some that share beginnings, of several lengths."""
    return [
        " ".join([beginning] * (1 + index % 4)) + f" {'abcdefgh'[index]}"
        for beginning in BEGINNINGS
        for index in range(8)
    ]


def expected_texts(server: RunningServer) -> dict[str, str]:
    """What the engine answers to each prompt."""
    params = SamplingParams(temperature=0, num_tokens_to_generate=NUM_TOKENS)

    async def ask() -> list:
        calls = [server.service.engine.generate(prompt, params) for prompt in prompts()]
        return await asyncio.gather(*calls)

    return {prompt: result.text for prompt, result in zip(prompts(), asyncio.run(ask()))}


class Client:
    """One of many: each deed once, then random ones until the end.

    Args:
        url: of the server.
        expected: prompt -> text.
        seed: of its deeds.
        counts: deeds of all clients so far.
    """

    def __init__(self, url: str, expected: dict[str, str], seed: int, counts: Counter):
        self._url, self._expected, self._counts = url, expected, counts
        self._random = random.Random(seed)

        self._deeds = [self.read, self.read_slowly, self.leave, self.wait, self.send_nonsense]

    async def run(self, seconds: float, warm: asyncio.Barrier) -> None:
        """Do one thing after the other, for some seconds after all clients are warm."""
        async with httpx.AsyncClient(base_url=self._url, timeout=None) as self._http:
            for deed in self._random.sample(self._deeds, len(self._deeds)):
                await self._do(deed)
            await warm.wait()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await self._do(self._random.choice([self.read, *self._deeds]))

    async def _do(self, deed: Callable[[], Awaitable[None]]) -> None:
        await deed()
        self._counts[deed.__name__] += 1

    def _body(self, **fields) -> tuple[str, dict]:
        prompt = self._random.choice(list(self._expected))
        given = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
        return prompt, given

    async def read(self, pause: float = 0.0, leave_after: int | None = None) -> None:
        """Read a stream to its end, and compare."""
        prompt, body = self._body(stream=True)
        text, reason, chunks = "", None, 0
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code == REFUSED:
                self._counts["refused"] += 1
                return
            assert answer.status_code == 200, answer.status_code
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                (choice,) = json.loads(data)["choices"]
                text, reason, chunks = text + choice["text"], choice["finish_reason"], chunks + 1
                if chunks == leave_after:
                    assert self._expected[prompt].startswith(text)
                    return
                if pause:
                    await asyncio.sleep(pause)
        assert (text, reason) == (self._expected[prompt], "length"), (prompt, text)

    async def read_slowly(self) -> None:
        """The same, slower than the server writes."""
        await self.read(pause=0.05)

    async def leave(self) -> None:
        """Go away in the middle of a stream, or of a wait."""
        if self._random.random() < 0.5:
            await self.read(leave_after=self._random.randint(1, NUM_TOKENS // 2))
            return
        _, body = self._body(n=self._random.randint(1, 3))
        with suppress(httpx.TimeoutException):
            await self._http.post("/v1/completions", json=body, timeout=0.05)

    async def wait(self) -> None:
        """Wait for whole answers."""
        prompt, body = self._body(n=2)
        answer = await self._http.post("/v1/completions", json=body)
        if answer.status_code != REFUSED:
            texts = [choice["text"] for choice in answer.json()["choices"]]
            assert texts == [self._expected[prompt]] * 2

    async def send_nonsense(self) -> None:
        """Get refusals."""
        headers = {"Content-Type": "application/json"}
        content, status = self._random.choice(
            [
                (b'{"prompt": ', 400),
                (b"[]", 400),
                (b'{"prompt": "a", "temperature": -1}', 400),
                (json.dumps({"prompt": "a" * MAX_BODY}).encode(), 413),
            ]
        )
        answer = await self._http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code in (status, REFUSED), answer.text


async def load(url: str, expected: dict[str, str], seconds: float, count: int) -> Counter:
    """Run the clients. Returns their deeds, and `bytes` that the process has grown by since it was
    warm."""
    counts: Counter = Counter()
    warm = asyncio.Barrier(count + 1)
    clients = [Client(url, expected, seed, counts) for seed in range(count)]
    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(client.run(seconds, warm))
        await warm.wait()
        begun = psutil.Process().memory_info().rss
    counts["bytes"] = psutil.Process().memory_info().rss - begun
    return counts


def soak(seconds: float, count: int) -> Counter:
    """Run a server under load, and check what it leaves behind.

    Raises:
        AssertionError: a token is lost, or a lease.
    """
    fields = {"max_requests": 16, "cache_bytes": 16 << 20}
    with running_server(fields, max_waiting=count, max_body_bytes=MAX_BODY) as server:
        expected = expected_texts(server)
        counts = asyncio.run(load(server.url, expected, seconds, count))

        async def leftovers() -> dict:
            engine = server.service.engine
            for _ in range(200):
                stats = await engine.stats()
                if not (stats["requests_running"] or stats["requests_waiting"]):
                    break
                await asyncio.sleep(0.05)
            await engine.check_integrity()
            return stats

        stats = asyncio.run(leftovers())
        for name in ("requests_running", "requests_waiting", "leases", "pages_in_use"):
            assert stats[name] == 0, (name, stats[name])
    return counts


def main() -> None:
    seconds, count = (float(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) > 2 else (300.0, 200)
    counts = soak(seconds, count)
    print(f"{count} clients for {seconds:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    main()
