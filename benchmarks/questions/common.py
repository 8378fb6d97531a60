"""What the questions share: a small engine, and tables of 80 columns."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from megatron_hybrid import (
    DynamicInferenceEngine,
    HybridConfig,
    HybridModel,
    InferenceConfig,
    SamplingParams,
    build_hybrid_model,
)
from megatron_hybrid.inference.requests.request import GenerationResult

WIDTH = 80


def aligned(rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Lines of a table whose first row is the head: the first column to the left, the others to the
    right.

    Raises:
        ValueError: a line is wider than 80 columns.
    """
    shown = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for first, *others in shown:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        line = "  ".join(cells).rstrip()
        if len(line) > WIDTH:
            raise ValueError(f"{line!r} has {len(line)} columns, the limit is {WIDTH}")
        yield line


def small_model(pattern: str, **fields) -> HybridModel:
    """Random weights, 64 wide unless fields of HybridConfig say otherwise."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    sizes |= {"ffn_hidden_size": 128, "vocab_size": 512}
    return build_hybrid_model(HybridConfig(layer_pattern=pattern, **{**sizes, **fields})).eval()


def engine_of(model, **fields) -> DynamicInferenceEngine:
    """An engine with a pool that holds all that a question sends."""
    return DynamicInferenceEngine(model, None, InferenceConfig(cache_bytes=128 << 20, **fields))


def answer(engine: DynamicInferenceEngine, prompt: Sequence[int], tokens: int) -> GenerationResult:
    """A greedy answer of so many tokens."""
    params = SamplingParams(top_k=1, num_tokens_to_generate=tokens, ignore_termination=True)
    return engine.generate([list(prompt)], params)[0]


def random_tokens(seed: int, model, *shape: int) -> list:
    """Token ids of a model, drawn evenly."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, model.config.vocab_size, shape).tolist()
