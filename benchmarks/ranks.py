"""What one engine over several ranks costs in addition to the model: bytes of a decoded token, host
time of a step; and what a suspended engine holds.

Ranks are processes on this machine, on gloo. A step's forward is a stub, so that the time of a step
is that of its bookkeeping and of the messages between the ranks.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.common import Row
from megatron_hybrid import (
    DynamicInferenceEngine,
    HybridConfig,
    InferenceConfig,
    SamplingParams,
    build_hybrid_model,
)

LAYOUTS = {
    "TP 2": {"tensor_model_parallel_size": 2},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
}
RUNNING, STEPS = 16, 200
HOST_TIME = 1.1
"""Most host time of a step on rank 0, in that of one rank."""
POOL_BYTES = 64 << 20


def run() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        alone = measure(0, 1, "alone", folder)
        for name in LAYOUTS:
            mp.spawn(measure, (2, name, folder), nprocs=2)
            given = torch.load(Path(folder) / f"{name}.pt")
            for tiers, sent in given["bytes"].items():
                yield Row(f"{name}: bytes sent for a decoded token, {tiers}", f"{sent:.1f}")
            cpu, wall = (given[kind] / alone[kind] for kind in ("cpu", "wall"))
            yield Row(
                f"{name}: host time of a decode step of {RUNNING}, over one rank's",
                f"{cpu:.2f}x CPU, {wall:.2f}x with the waits ({given['wall']:.0f} us)",
                f"<= {HOST_TIME}x",
            )
        for keep in ("drop", "host", "disk"):
            held, seconds = suspended(keep, folder)
            yield Row(
                f"suspend({keep!r}): bytes held of {POOL_BYTES >> 20} MiB pool and its slots",
                f"{held / (1 << 20):.1f} MiB, resume() in {seconds * 1e3:.1f} ms",
            )


def model_of(name: str, rank: int):
    torch.manual_seed(0)
    stages = LAYOUTS.get(name, {}).get("pipeline_model_parallel_size", 1)
    config = HybridConfig(
        layer_pattern="M*E|M*E",
        hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=512,
        vocab_size=4096,
        mamba_head_dim=32,
        mamba_state_dim=64,
        mamba_num_groups=2,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=128,
        **LAYOUTS.get(name, {}),
    )
    stage = rank if stages > 1 else 0
    return build_hybrid_model(
        config, pre_process=stage == 0, post_process=stage == stages - 1
    ).eval()


def measure(rank: int, size: int, name: str, folder: str) -> dict:
    """Bytes of a token without and with tiers, and the time of a step with a stub, on rank 0."""
    torch.set_num_threads(1)
    if size > 1:
        rendezvous = f"file://{folder}/{name}.rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
    model, given = model_of(name, rank), {"bytes": {}}
    for tiers, fields in (("no tiers", {}), ("with tiers", {"host_cache_bytes": 1 << 24})):
        engine = DynamicInferenceEngine(
            model, None, InferenceConfig(cache_bytes=POOL_BYTES, max_requests=RUNNING, **fields)
        )
        if not engine.ranks.is_first:
            engine.follow()
            engine.close()
            continue
        with engine.lead():
            given["bytes"][tiers] = bytes_of_a_token(engine)
        engine.close()
    engine = DynamicInferenceEngine(
        model, None, InferenceConfig(cache_bytes=POOL_BYTES, max_requests=RUNNING)
    )
    stub(engine)
    if engine.ranks.is_first:
        with engine.lead():
            given["cpu"], given["wall"] = step_micros(engine)
        torch.save(given, f"{folder}/{name}.pt")
    else:
        engine.follow()
    engine.close()
    if size > 1:
        dist.destroy_process_group()
    return given


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 4096, 20).tolist() for _ in range(RUNNING)]


def start(engine: DynamicInferenceEngine) -> None:
    """Bring all requests into decode."""
    params = SamplingParams(top_k=1, num_tokens_to_generate=400, ignore_termination=True)
    for prompt in prompts():
        engine.add_request(prompt, params)
    while len(engine.scheduler.running) < RUNNING or engine.scheduler.waiting:
        engine.step()
    engine.step()


def bytes_of_a_token(engine: DynamicInferenceEngine) -> float:
    start(engine)
    before, tokens = engine.stats()["rank_bytes"], 0
    for _ in range(20):
        tokens += sum(len(output.token_ids) for output in engine.step())
    return (engine.stats()["rank_bytes"] - before) / tokens


def stub(engine: DynamicInferenceEngine) -> None:
    """Replace the forward by constants of its shape."""
    rng = np.random.default_rng(0)
    logits_nV = torch.from_numpy(rng.standard_normal((RUNNING, 4096), np.float32))
    runner = engine.runner

    def forward(plan):
        engine.context.begin_step(plan)
        is_last = engine.model.post_process
        return logits_nV[: sum(work.num_logits for work in plan.work)] if is_last else None

    runner.forward = forward


def step_micros(engine: DynamicInferenceEngine) -> tuple[float, float]:
    """Median CPU and wall time of `step`."""
    start(engine)
    cpu, wall = [], []
    for _ in range(STEPS):
        began = time.thread_time(), time.perf_counter()
        engine.step()
        cpu.append((time.thread_time() - began[0]) * 1e6)
        wall.append((time.perf_counter() - began[1]) * 1e6)
    return statistics.median(cpu), statistics.median(wall)


def suspended(keep: str, folder: str) -> tuple[int, float]:
    """Bytes that a suspended engine holds with a part of its pool in use, and seconds of
    `resume`."""
    disk = {"cache_dir": f"{folder}/cache"} if keep == "disk" else {}
    config = InferenceConfig(cache_bytes=POOL_BYTES, max_requests=RUNNING, **disk)
    with DynamicInferenceEngine(model_of("alone", 0), None, config) as engine:
        engine.generate(prompts(), SamplingParams(top_k=1, num_tokens_to_generate=20))
        engine.suspend(keep)
        held = engine.memory.held_bytes
        began = time.perf_counter()
        engine.resume()
        return held, time.perf_counter() - began
