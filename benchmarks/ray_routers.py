"""Prompt tokens skipped behind Ray Serve, by the router that picks a replica.

    .venv-ray/bin/python -m benchmarks.ray_routers     # after `make test-ray`, which installs Ray

Two replicas of the demo model; twelve chats of five turns that share three system prompts. Their
requests come one after the other, in a drawn order, so that no figure depends on other programs.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import yaml

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray"
PORT = 18_653
BY_PREFIX = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
ROUTERS = {
    "`ConsistentHashRouter`": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    "`PrefixCacheAffinityRouter`": f"{BY_PREFIX}.PrefixCacheAffinityRouter",
    "`PowerOfTwoChoicesRequestRouter`": "ray.serve._private.request_router."
    "PowerOfTwoChoicesRequestRouter",
}
SYSTEMS = [f"You are {who}. " + "Tell what you have seen, in few words. " * 8 for who in "ABC"]


@contextmanager
def deployment(router: str) -> Iterator[httpx.Client]:
    """A client of two replicas."""
    settings = yaml.safe_load((EXAMPLE / "ray_serve.yaml").read_text())
    settings["http_options"]["port"] = PORT
    settings["applications"][0]["args"] |= {"cpus": 0.5, "router": router}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(settings, file)
        command = [Path(sys.executable).with_name("serve"), "run", file.name]
        process = subprocess.Popen(command, cwd=EXAMPLE, stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=600) as client:
                while not _has_two(client):
                    time.sleep(1)
                yield client
        finally:
            process.terminate()
            process.wait()


def _has_two(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/metrics").text.count("\nmegatron_hybrid_requests_total{") == 2
    return False


def skipped_percent(client: httpx.Client) -> float:
    """Part of all prompt tokens that was skipped, in percent."""
    rng, asked, skipped = random.Random(0), 0, 0
    chats = {f"chat-{i}": [{"role": "system", "content": SYSTEMS[i % 3]}] for i in range(12)}
    turns = [name for name in chats for _ in range(5)]
    rng.shuffle(turns)
    for name in turns:
        chats[name].append({"role": "user", "content": f"{name} asks: and then? " * 4})
        body = {"model": "demo", "messages": chats[name], "max_tokens": 16, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body, headers={"X-Session-Id": name})
        fields = answer.raise_for_status().json()
        asked += fields["usage"]["prompt_tokens"]
        skipped += fields["usage"]["prompt_tokens_details"]["cached_tokens"]
        chats[name].append(fields["choices"][0]["message"])
    return 100 * skipped / asked


def main() -> None:
    """Print a row for each router."""
    for name, router in ROUTERS.items():
        with deployment(router) as client:
            print(f"| {name} | {skipped_percent(client):.1f} |", flush=True)


if __name__ == "__main__":
    main()
