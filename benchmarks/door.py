"""What Megatron's interface costs over our engine alone, and what its users save.

The transcripts are answered through the door by a small model; megatron-core's rule (256-token
blocks, states at block ends of prompts) is the model of `tools/replay/rules.py`, with room for all.
"""

import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import Row, benchmark_model, median_ratio
from megatron_hybrid import InferenceConfig as EngineConfig
from megatron_hybrid import SamplingParams as EngineParams
from megatron_hybrid.inference.engine import DynamicInferenceEngine as Engine
from megatron_hybrid.megatron import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)
from megatron_hybrid.tools.replay.rules import MEGATRON_BLOCK, rules

RUNNING, STEPS = (1, 16, 64), 60
OVERHEAD = 1.1
"""Most time of a step through the door, in those of the engine alone."""
CHATS, TURNS, SYSTEM = 6, 6, 300
EXAMPLE = Path(__file__).parents[1] / "examples" / "megatron_inference.py"


def run() -> Iterator[Row]:
    model = benchmark_model()
    for count in RUNNING:
        ratio, door, alone = step_ratio(model, count)
        yield Row(
            f"one decode step of {count} requests through the door, over the engine alone",
            f"{ratio:.3f}x ({door * 1e3:.2f} ms, {alone * 1e3:.2f} ms)",
            f"<= {OVERHEAD}x",
        )
    prompts, computed, theirs = transcripts(model)
    yield Row(
        f"prompt tokens computed of {prompts:,} in {CHATS} chats of {TURNS} turns",
        f"{computed:,} ({computed / prompts:.1%})",
    )
    yield Row(
        f"the same by megatron-core's rule, {MEGATRON_BLOCK}-token blocks of prompts",
        f"{theirs:,} ({theirs / prompts:.1%}), {theirs / computed:.1f}x",
    )
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    imports = sum(line.startswith("from megatron.core.inference") for line in lines)
    yield Row(
        f"imports to change in {EXAMPLE.name}, {len(lines)} lines",
        f"{imports}; with `python -m megatron_hybrid.megatron` 0",
    )


def door_engine(model: torch.nn.Module, **fields) -> DynamicInferenceEngine:
    config = InferenceConfig(
        **{
            "block_size_tokens": 16,
            "buffer_size_gb": 0.25,
            "max_requests": max(RUNNING),
            "max_tokens": 2048,
            "max_sequence_length": 4096,
            "enable_prefix_caching": True,
            "prefix_caching_mamba_gb": 0.25,
            **fields,
        }
    )
    context = DynamicInferenceContext(model.config, config)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), None)
    return DynamicInferenceEngine(controller, context)


def step_ratio(model: torch.nn.Module, count: int) -> tuple[float, float, float]:
    """Median ratio of paired decode steps, and the median seconds of both."""
    door = door_engine(model)
    alone = Engine(model, None, EngineConfig(**vars(door.engine.config)))
    rng = np.random.default_rng(0)
    total = 4 * STEPS
    for request_id in range(count):
        prompt = rng.integers(0, model.config.vocab_size, 20).tolist()
        door.add_request(
            request_id,
            prompt,
            SamplingParams(top_k=1, num_tokens_to_generate=total, termination_id=-1),
        )
        alone.add_request(
            prompt, EngineParams(top_k=1, num_tokens_to_generate=total), growing_text=False
        )
    for _ in range(10):
        door.step_modern(), alone.step()
    pairs = []
    for _ in range(STEPS):
        began = time.perf_counter()
        door.step_modern()
        between = time.perf_counter()
        alone.step()
        pairs.append((between - began, time.perf_counter() - between))
    doors, alones = zip(*pairs)
    return median_ratio(doors, alones), float(np.median(doors)), float(np.median(alones))


def transcripts(model: torch.nn.Module) -> tuple[int, int, int]:
    """Prompt tokens, those computed through the door, and those computed by core's rule."""
    door = door_engine(model)
    layers, spec = model.cache_requirements(), door.engine.cache.spec
    (rule,) = (each for each in rules(layers, spec) if each.block_tokens == MEGATRON_BLOCK)
    theirs = rule.build(inf)
    rng = np.random.default_rng(1)
    system = rng.integers(0, model.config.vocab_size, SYSTEM).tolist()
    histories = [list(system) for _ in range(CHATS)]
    prompts = by_rule = 0
    for _ in range(TURNS):
        for history in histories:
            history += rng.integers(0, model.config.vocab_size, rng.integers(20, 200)).tolist()
            params = SamplingParams(
                top_k=1, num_tokens_to_generate=int(rng.integers(20, 120)), termination_id=-1
            )
            handle = theirs.begin(np.array(history, np.int32))
            by_rule += len(history) - handle.skipped_tokens
            prompts += len(history)
            (record,) = door.generate([history], params)
            history += record.merge().token_ids
            theirs.finish(handle, np.array(history, np.int32))
    return prompts, door.context.lifetime_prefill_token_count, by_rule
