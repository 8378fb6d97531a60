"""Clients of a real server that would stop the others: what they cost, in a process of its own.

python tests/helpers/attacks.py
"""

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import psutil
from commands import free_port

KEYS = {"attacker": "mallory", "other": "alice"}
NUM_PROMPTS = 3000
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
COMPLETION = {"prompt": "hi", "max_tokens": 2}
FULL = {"prompt": [[5, 6]] * 64, "max_tokens": 8}
"""As many requests as run at a time: their memory is no growth."""
SHUTDOWN_SECONDS = 5.0
GROWTH = 1.2
"""Most of the memory after the attacks, in that of a server that has run full."""


def large_schema(number: int) -> dict:
    """3,000 properties, 0.2 MB."""
    properties = {
        f"p{number}_{i}": {"type": "integer", "minimum": -i * 7919, "maximum": i * 104729 + number}
        for i in range(3000)
    }
    schema = {"type": "object", "properties": properties}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


class Attacks:
    """The attacks, one after the other.

    Args:
        url: of the server.
        port: of it.
    """

    def __init__(self, url: str, port: int):
        self._url, self._port = url, port

    def client(self, who: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {KEYS[who]}"}
        return httpx.AsyncClient(base_url=self._url, headers=headers, timeout=300)

    async def other(self, path: str, body: dict) -> float:
        """Seconds of another client's request."""
        async with self.client("other") as client:
            began = time.perf_counter()
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return time.perf_counter() - began

    async def schemas(self, count: int = 8) -> float:
        """Clients that send large schemas and hang up. Returns the seconds of a chat then."""

        async def leave(client: httpx.AsyncClient, number: int) -> None:
            body = {**CHAT, "response_format": large_schema(number)}
            with suppress(httpx.TimeoutException):
                answer = await client.post("/v1/chat/completions", json=body, timeout=2)
                assert answer.status_code == 400, f"a guide was compiled: {answer.text:.200}"

        async with self.client("attacker") as client:
            await asyncio.gather(*(leave(client, number) for number in range(count)))
        return await self.other("/v1/chat/completions", CHAT)

    async def prompts(self) -> float:
        """One request of many prompts. Returns the seconds of another one beside it."""
        async with self.client("attacker") as client:
            body = {"prompt": [[5, 6]] * NUM_PROMPTS, "max_tokens": 8}
            many = asyncio.ensure_future(client.post("/v1/completions", json=body))
            await asyncio.sleep(1)
            seconds = await self.other("/v1/completions", COMPLETION)
            assert not many.done(), "the attack was over before: raise NUM_PROMPTS"
            many.cancel()
            with suppress(asyncio.CancelledError):
                await many
        return seconds

    async def slow(self, count: int = 100) -> float:
        """Connections that send nothing, or half of their headers. Returns the seconds of a chat
        beside them."""
        found = [await asyncio.open_connection("127.0.0.1", self._port) for _ in range(count)]
        for _, writer in found[::2]:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
        seconds = await self.other("/v1/chat/completions", CHAT)
        for reader, writer in found:
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        return seconds


def main() -> None:
    port = free_port()
    command = [
        *(sys.executable, "-m", "megatron_hybrid", "serve", "demo", "--port", str(port)),
        *("--shutdown-timeout", str(SHUTDOWN_SECONDS), "--max-waiting", str(2 * NUM_PROMPTS)),
        *("--cache-mib", "32"),  # cached prefixes are no growth: they may have so much
        *(f"--api-key={key}" for key in KEYS.values()),
    ]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(3000):
            with suppress(httpx.TransportError):
                if httpx.get(url + "/health").status_code == 200:
                    break
            time.sleep(0.1)
        attacks, usage = Attacks(url, port), psutil.Process(server.pid).memory_info
        asyncio.run(attacks.other("/v1/completions", FULL))
        quiet = asyncio.run(attacks.other("/v1/chat/completions", CHAT))
        before = usage().rss
        print(f"a chat on the quiet server: {quiet:.2f} s, {before >> 20} MiB")
        for attack in (attacks.schemas, attacks.prompts, attacks.slow):
            seconds, memory = asyncio.run(attack()), usage().rss >> 20
            print(f"beside {attack.__name__}: {seconds:.2f} s, then {memory} MiB", flush=True)
        time.sleep(5)  # what is free goes back then
        after = usage().rss
        print(f"after the attacks: {after >> 20} MiB")
        with suppress(AssertionError):
            asyncio.run(attacks.schemas(2))
        began = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        seconds = time.perf_counter() - began
        print(f"from SIGTERM to the exit: {seconds:.1f} s, status {server.returncode}")
        assert after < GROWTH * before, (before, after)
        assert seconds < SHUTDOWN_SECONDS + 1, seconds
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
