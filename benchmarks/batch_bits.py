"""Whether a request's logits depend, in the last bit, on those that are decoded with it."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Row, benchmark_model
from benchmarks.questions.common import small_model
from megatron_hybrid import DynamicInferenceEngine, HybridModel, InferenceConfig, SamplingParams
from megatron_hybrid.inference.scheduling.step_plan import StepPlan

PATTERNS = {
    "full attention": "**",
    "sliding-window attention": "WW",
    "chunked attention": "LL",
    "latent attention": "++",
    "Mamba-2": "MM",
    "Mamba-1": "SS",
    "Gated DeltaNet": "GG",
    "Kimi Delta Attention": "KK",
    "short convolution": "CC",
    "attention and Mamba-2": "HH",
    "shared block": "ZZ",
    "experts": "EE",
    "dense and experts": "BB",
    "per-layer input": "PP",
    "MLP": "--",
    "a hybrid": "MG*-W-",
}
REQUESTS, TOKENS = 8, 32
PROMPTS = (20, 300)
"""Shortest and longest, in tokens."""


def run() -> Iterator[Row]:
    """Count for each kind of layer, in fp32 and bf16, the rows of logits that are equal to the bit;
    then for a wider model, whose fp32 kernels differ for 8 rows and for more (`ROW_ALIGNMENT`)."""
    for name, pattern in PATTERNS.items():
        for dtype in (torch.float32, torch.bfloat16):
            share = equal_share(random_model(pattern, dtype), *PROMPTS)
            what = f"{name} ({pattern}), {str(dtype).removeprefix('torch.')}"
            yield Row(what, f"{100 * share:.1f} %", "100 %" if dtype == torch.float32 else "")
    wide = benchmark_model()
    for shortest, longest in (PROMPTS, (3, 10)):
        share = equal_share(wide, shortest, longest)
        what = f"a hybrid 256 wide, float32, prompts of {shortest} to {longest} tokens"
        yield Row(what, f"{100 * share:.1f} %")


def random_model(pattern: str, dtype: torch.dtype) -> HybridModel:
    """Random weights; each token goes to two of four experts."""
    return small_model(
        pattern,
        hidden_size=128,
        ffn_hidden_size=512,
        sliding_window=64,
        attention_chunk_size=64,
        per_layer_input_size=16,
        mamba_head_dim=32,
        mamba_state_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_head_dim=24,
        qk_pos_emb_head_dim=8,
        v_head_dim=32,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        init_method_std=0.1,
        params_dtype=dtype,
    )


def equal_share(model: HybridModel, shortest: int, longest: int) -> float:
    """The share of the rows of logits that are the same in a batch of eight and alone."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest, REQUESTS, endpoint=True).tolist()
    prompts = [rng.integers(0, model.vocab_size, length).tolist() for length in lengths]
    together = answer_logits(model, prompts)
    alone = [logits for prompt in prompts for logits in answer_logits(model, [prompt])]
    equal = [(a == b).all(-1) for a, b in zip(together, alone, strict=True)]
    return torch.cat(equal).float().mean().item()


def answer_logits(model: HybridModel, prompts: list[list[int]]) -> list[Tensor]:
    """The logits `[TOKENS, V]` of each prompt's greedy answer, all run side by side."""
    config = InferenceConfig(prefix_caching="off", cache_bytes=64 << 20, max_requests=REQUESTS)
    engine = DynamicInferenceEngine(model, None, config)
    rows: dict[int, list[Tensor]] = {}
    forward = engine.runner.forward

    def kept(plan: StepPlan) -> Tensor:
        logits_nV = forward(plan)
        wanted = [work.request_id for work in plan.work if work.num_logits]
        for request_id, logits_V in zip(wanted, logits_nV, strict=True):
            rows.setdefault(request_id, []).append(logits_V)
        return logits_nV

    engine.runner.forward = kept
    params = SamplingParams(top_k=1, num_tokens_to_generate=TOKENS)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [torch.stack(rows[request.request_id]) for request in requests]
