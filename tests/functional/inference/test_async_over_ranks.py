"""An AsyncEngine on the first of two ranks serves tasks as one rank does."""

import asyncio

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rank_processes import join_ranks, run_ranks
from reference import greedy, random_tokens, tiny_model

from megatron_hybrid.checkpoints.checkpoint import load_checkpoint, read_config, save_checkpoint
from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.models.hybrid_model import build_hybrid_model

RANKS = 2
MODEL = dict(layer_pattern="M*S-", mamba_num_groups=2)
CONFIG = dict(cache_bytes=1 << 20, max_requests=4, max_sequence_length=160, verify_ranks=True)
PROMPTS = [random_tokens(60, seed=seed) for seed in range(6)]


async def serve(model):
    """Answers of tasks side by side, of a stream, and beside a cancelled task."""
    async with AsyncEngine(model, None, InferenceConfig(**CONFIG)) as engine:
        answers = await asyncio.gather(*(engine.generate(p, greedy(6)) for p in PROMPTS))
        gone = asyncio.create_task(engine.generate(PROMPTS[0][:30], greedy(60)))
        stream = engine.stream(PROMPTS[1][:40], greedy(8))
        streamed = [*(await anext(stream)).tokens]
        gone.cancel()
        dropped = engine.stream(PROMPTS[2][:30], greedy(60))
        await anext(dropped)
        del dropped
        async for output in stream:
            streamed += output.tokens
        with pytest.raises(ValueError, match="vocabulary"):
            await engine.generate([10**6], greedy(2))
        again = await engine.generate(PROMPTS[0], greedy(6))
        for _ in range(100):  # the cancelled ones end with a step of their own
            if (stats := await engine.stats())["leases"] == 0:
                break
            await asyncio.sleep(0.05)
        await engine.check_integrity()
    return (
        [answer.generated_tokens for answer in answers],
        streamed,
        again.prefix.skipped_tokens,
        stats["leases"],
    )


def run_rank(rank, folder):
    join_ranks(rank, RANKS, f"{folder}/rendezvous")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    model = build_hybrid_model(read_config(folder, tensor_model_parallel_size=RANKS))
    load_checkpoint(model, folder)
    if rank == 0:
        torch.save(asyncio.run(serve(model)), f"{folder}/answers.pt")
    else:
        engine = DynamicInferenceEngine(model.eval(), None, InferenceConfig(**CONFIG))
        engine.follow()
        engine.check_integrity()
        assert engine.stats()["leases"] == 0
    dist.destroy_process_group()


def test_tasks_are_served_by_two_ranks_as_by_one(tmp_path):
    save_checkpoint(tiny_model(**MODEL), tmp_path)
    run_ranks(run_rank, (str(tmp_path),), RANKS)
    answers = torch.load(tmp_path / "answers.pt")
    assert answers == asyncio.run(serve(tiny_model(**MODEL)))
    assert answers[2:] == (60, 0)
