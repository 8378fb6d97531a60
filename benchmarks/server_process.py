"""The server of `benchmarks/server.py`: the demo model, or `tiny`, with routes that tell of the
event loop."""

import asyncio
import sys
import time

import torch

from megatron_hybrid import HybridConfig, build_hybrid_model
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.serving import run
from megatron_hybrid.serving.config import ServingConfig
from megatron_hybrid.utils.child_lifetime import EndSignal

CONFIG = InferenceConfig(cache_bytes=64 << 20, max_requests=64, max_sequence_length=4096)
PROBE_SECONDS = 0.001


def demo():
    """The model and its tokenizer."""
    return load_pretrained("demo", device="cpu", dtype=torch.float32)


def tiny():
    """A random model whose steps take so little that the server's own work shows, and the demo
    model's tokenizer."""
    _, tokenizer = demo()
    torch.manual_seed(0)
    config = HybridConfig(
        layer_pattern="M*",
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=tokenizer.vocab_size,
        mamba_head_dim=16,
        mamba_state_dim=16,
    )
    return build_hybrid_model(config).eval(), tokenizer


def with_probe(make_app):
    """`create_app` with the routes /cpu and /gap: seconds of CPU time of the event loop's thread,
    and its longest gap since the last call. The first call of /gap begins to probe."""

    def make(service):
        app, gap, probes = make_app(service), 0.0, []

        async def probe() -> None:
            nonlocal gap
            while True:
                began = time.perf_counter()
                await asyncio.sleep(PROBE_SECONDS)
                gap = max(gap, time.perf_counter() - began - PROBE_SECONDS)

        @app.get("/cpu")
        async def cpu() -> float:
            return time.thread_time()

        @app.get("/gap")
        async def longest() -> float:
            nonlocal gap
            if not probes:
                probes.append(asyncio.ensure_future(probe()))
            found, gap = gap, 0.0
            return found

        return app

    return make


def main() -> None:
    run.create_app = with_probe(run.create_app)
    run.log_lines()
    address = run.Address(port=0)
    model, tokenizer = {"demo": demo, "tiny": tiny}[sys.argv[1]]()
    served = model, tokenizer, CONFIG, ServingConfig("demo"), address, address.bind()
    run.run(run.serve(*served, None, EndSignal()))


if __name__ == "__main__":
    main()
