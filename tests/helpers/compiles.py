"""Counts what an engine would compile on a GPU that is not there, before its requests and in them.

python tests/helpers/compiles.py 'M*-' 'G*-' 'K*-'     # layer patterns; a line of JSON for each

Kernels by name: `made` while the engine is made, `later` by each kind of request; `cold` by each of
the first requests of an engine without a warm-up.
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice

import gpu_stub

gpu_stub.install()
gpu_stub.one_config()

import numpy as np  # noqa: E402  libraries define their kernels when they are imported
import torch  # noqa: E402
from reference import tiny_model  # noqa: E402
from unwritten_outputs import any_token  # noqa: E402

from megatron_hybrid import (  # noqa: E402
    DynamicInferenceEngine,
    HybridModel,
    InferenceConfig,
    SamplingParams,
)
from megatron_hybrid.inference.requests.options import RequestOptions  # noqa: E402
from megatron_hybrid.inference.worker import warm_up  # noqa: E402

FIELDS = dict(
    vocab_size=128,
    mamba_num_heads=6,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=16,
)
"""Time steps and writing strengths have rows that begin at no multiple of 16 bytes."""


def engine_of(model: HybridModel, is_warmed: bool) -> DynamicInferenceEngine:
    sizes = dict(max_requests=5, max_tokens=64, max_sequence_length=320, block_size_tokens=16)
    sizes |= dict(cache_bytes=176 << 10, host_cache_bytes=1 << 20)  # of three requests at their end
    return DynamicInferenceEngine(
        model, None, InferenceConfig(state_encoding="int8", warm_up=is_warmed, **sizes)
    )


def requests(engine: DynamicInferenceEngine) -> Iterator[str]:
    """Answer requests, one kind after the other. Yields what they were."""
    rng = np.random.default_rng(0)

    def answer(lengths, count=3, n=1, breakpoints=(), tail=(), **sampling) -> None:
        params = SamplingParams(
            **{"top_k": 1, **sampling}, num_tokens_to_generate=count, ignore_termination=True
        )
        prompts = [[*tail, *rng.integers(0, 128, length).tolist()] for length in lengths]
        engine.generate(prompts, params, RequestOptions(n=n, cache_breakpoints=list(breakpoints)))

    answer([40])
    yield "first"
    answer([40])
    yield "second"
    for length in (1, 16, 17, 200):
        answer([length])
        yield f"{length} tokens"
    prompt = rng.integers(0, 128, 70).tolist()
    for _ in range(2):
        answer([9], tail=prompt, breakpoints=[35, 70])
    yield "restored"
    for batch in (2, 4):
        answer(rng.integers(1, 90, batch), count=6)
        yield f"{batch} requests"
    answer([50], n=4, top_k=0)
    yield "forks"
    answer([20], top_k=0, top_p=0.5, return_log_probs=True, frequency_penalty=0.1)
    yield "drawn otherwise"
    answer(rng.integers(60, 90, 5), count=32)
    yield "preempted and offloaded"
    request = engine.add_request(prompt, SamplingParams(num_tokens_to_generate=9))
    for _ in range(2):
        engine.step()
    engine.cancel(request)
    answer([5], tail=prompt)
    yield "cancelled"


def main() -> None:
    gpu_stub.let_backends_serve_the_cpu()
    torch.set_num_threads(1)
    noted = gpu_stub.NotedCompiles()
    for pattern in sys.argv[1:]:
        line = {"model": pattern}
        model = tiny_model(pattern, params_dtype=torch.bfloat16, **FIELDS)
        for what, is_warmed in (("later", True), ("cold", False)):
            noted.forget()
            line[what] = {}
            with engine_of(model, is_warmed) as engine, any_token():
                known = len(noted.names)
                if is_warmed:
                    line["made"] = list(noted.names)
                for kind in islice(requests(engine), None if is_warmed else 3):
                    line[what][kind] = noted.names[known:]
                    known = len(noted.names)
                if is_warmed:
                    line["stats"] = engine.stats()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    warm_up.WARMED.add("cpu")
    main()
