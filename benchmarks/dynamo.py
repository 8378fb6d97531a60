"""What NVIDIA Dynamo costs and brings: `make bench-dynamo`, as it needs an environment of its own.

One workload, chats of several turns, goes by turns to `megatron-hybrid serve`, and to Dynamo's
frontend before two workers: with KV events, with the router's guess in their place, and without.
Then a worker is killed while it streams.
"""

import argparse
import asyncio
import json
import signal
import statistics
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.dynamo_cluster import (
    BLIND_FLAGS,
    GUESSING_FLAGS,
    HYBRID_FLAGS,
    MODEL,
    SIZES,
    Cluster,
    Measured,
    Program,
    cluster,
    events_of,
    free_port,
    run_chats,
)

CACHE = ("--cache-mib", "64")
PLAIN = "serve, one process"
FRONTENDS = {
    "Dynamo, events": HYBRID_FLAGS,
    "Dynamo, events, default costs": ("--router-mode", "kv"),
    "Dynamo, the router's guess": GUESSING_FLAGS,
    "Dynamo, without events": BLIND_FLAGS,
}
KILLS = 3
KILL_AFTER = 40
"""Tokens of the stream."""


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.dynamo", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="Measure N times.", metavar="N")
    parser.add_argument("--json", metavar="FILE", help="Also write the numbers to this file.")
    options = parser.parse_args()
    with TemporaryDirectory() as folder, cluster(Path(folder)) as made:
        servers = started(made)
        runs: dict[str, list[Measured]] = defaultdict(list)
        for number in range(options.rounds):
            for place, (name, server) in enumerate(servers.items()):
                seed = number * len(servers) + place
                runs[name].append(asyncio.run(run_chats(server.url, seed)))
        waits = [asyncio.run(kill(made, servers["Dynamo, events"])) for _ in range(KILLS)]
    numbers = {name: summary(found) for name, found in runs.items()}
    show(numbers, waits)
    if options.json:
        Path(options.json).write_text(json.dumps({**numbers, "kill_ms": waits}, indent=1))


def started(made: Cluster) -> dict[str, Program]:
    """The server, and frontends before the same two workers, when all answer."""
    for _ in range(2):
        made.worker(*CACHE)
    frontends = {name: made.frontend(*flags) for name, flags in FRONTENDS.items()}
    for frontend in frontends.values():
        made.wait_until_ready(frontend, 2)
    port = free_port()
    command = ["-m", "megatron_hybrid", "serve", MODEL, *SIZES, *CACHE, "--port", str(port)]
    plain = made.start(command, port)
    while True:
        try:
            if httpx.get(f"{plain.url}/health").status_code == 200:
                return {PLAIN: plain, **frontends}
        except httpx.TransportError:
            pass
        time.sleep(0.2)


async def kill(made: Cluster, frontend: Program) -> float:
    """Kill the worker of a stream. Returns the milliseconds until the stream goes on, after what
    was on its way. Another worker takes its place."""
    workers = [each for each in made.programs if "--cache-mib" in each.process.args]
    alive = [each for each in workers if each.process.poll() is None]
    alive = [each for each in alive if "megatron_hybrid.dynamo.__main__" in each.process.args]
    body = {"model": MODEL, "prompt": "Once upon a time there was a king", "max_tokens": 150}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True}
    times: list[float] = []
    killed = 0.0
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{frontend.url}/v1/completions", json=body) as answer,
    ):
        async for _ in events_of(answer):
            times.append(time.perf_counter())
            if len(times) == KILL_AFTER:
                busy = [w for w in alive if w.metric("vllm:num_requests_running")]
                busy[0].process.send_signal(signal.SIGKILL)
                killed = time.perf_counter()
    made.worker(*CACHE)
    while made.workers_of(frontend) < 2:
        time.sleep(0.2)
    time.sleep(10)  # until the frontend has forgotten the dead one
    _, on = max(pairwise([killed, *times[KILL_AFTER:]]), key=lambda pair: pair[1] - pair[0])
    return 1000 * (on - killed)


def summary(found: list[Measured]) -> dict[str, float]:
    """Medians of some runs."""

    def median(value) -> float:
        return statistics.median(map(value, found))

    return {
        "first token, p50 ms": 1000 * median(lambda m: statistics.median(m.first_token)),
        "between tokens, p50 ms": 1000 * median(lambda m: statistics.median(m.between_tokens)),
        "requests/s": median(lambda m: m.num_answers / m.seconds),
        "skipped %": median(lambda m: m.skipped),
    }


def show(numbers: dict[str, dict[str, float]], waits: list[float]) -> None:
    """Print a table; in brackets the ratios to the plain server."""
    table = Table("", *next(iter(numbers.values())))
    for name, row in numbers.items():
        cells = [
            f"{value:.1f}"
            if what == "skipped %" or name == PLAIN
            else f"{value:.1f} ({value / numbers[PLAIN][what]:.2f})"
            for what, value in row.items()
        ]
        table.add_row(name, *cells)
    console = Console(width=120)
    console.print(table)
    shown = ", ".join(f"{wait:.0f}" for wait in waits)
    console.print(f"from the kill of a worker to the next token of its stream: {shown} ms")


if __name__ == "__main__":
    main()
