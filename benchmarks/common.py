"""What the benchmarks share: rows of results, paired timings, a model of a realistic shape."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_hybrid import DynamicInferenceEngine, HybridConfig, SamplingParams, build_hybrid_model

ONE_TOKEN = SamplingParams(top_k=1, num_tokens_to_generate=1)


@dataclass
class Row:
    what: str
    value: str
    goal: str = ""


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call, device work included."""
    _synchronize()
    began = time.perf_counter()
    action()
    _synchronize()
    return time.perf_counter() - began


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_token(server: DynamicInferenceEngine, tokens: list[int]) -> float:
    """Seconds from the arrival of a request that is alone to its first token."""
    request = server.add_request(tokens, ONE_TOKEN)

    def until_first() -> None:
        while request.first_token_at is None:
            server.step()

    elapsed = seconds(until_first)
    while server.has_work:
        server.step()
    return elapsed


def paired(a: Callable[[], float], b: Callable[[], float], rounds: int) -> tuple[list, list]:
    """Timings of a and b in turn (a b a b ...), after one round that is not counted."""
    a(), b()
    pairs = [(a(), b()) for _ in range(rounds)]
    return [x for x, _ in pairs], [y for _, y in pairs]


def median_ratio(a: list[float], b: list[float]) -> float:
    """Median of the ratios pair by pair: drift of the machine's speed cancels."""
    return statistics.median(x / y for x, y in zip(a, b))


def benchmark_model():
    """A small hybrid with every mixer: large enough that a forward pass is not all overhead."""
    torch.manual_seed(0)
    config = HybridConfig(
        layer_pattern="M-G-W-M-*-",
        hidden_size=256,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=704,
        vocab_size=4096,
        sliding_window=128,
        mamba_head_dim=32,
        mamba_state_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    return build_hybrid_model(config).eval()
