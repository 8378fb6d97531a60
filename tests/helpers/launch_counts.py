"""Counts the launches of steps of a published model, without a GPU.

Kernels of Triton, whose interpreter is on, are counted and not run; each call of torch that would
be a kernel is one launch.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
import triton.runtime.interpreter
from reference import tiny_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unwritten_outputs import any_token

from benchmarks.gpu.models import cut_config
from megatron_hybrid import DynamicInferenceEngine, SamplingParams, build_hybrid_model
from megatron_hybrid.inference.worker import graph_runner

_NO_KERNELS = {
    *("alias", "as_strided", "chunk", "detach", "diagonal", "expand", "flatten", "narrow"),
    *("permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t"),
    *("transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
    *("_unsafe_view", "_reshape_alias", "resolve_conj", "resolve_neg", "lift_fresh"),
    *("empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_"),
    *("_local_scalar_dense", "is_pinned", "is_same_size", "dropout"),
}
"""Functions of torch that make views, or memory that nothing is written to."""
_COPIES = {"_to_copy", "contiguous", "flatten", "float", "reshape", "to"}
"""Functions that give a view of their first argument where they can."""


class _Torch(TorchDispatchMode):
    """Counts calls by function."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        is_view = name in _COPIES and result.data_ptr() == args[0].data_ptr()
        if not is_view and (name in _COPIES or name not in _NO_KERNELS):
            # Nothing is launched for empty tensors, as those of no padding rows.
            written = args[0] if name.endswith("_") else result
            sizes = [x.numel() for x in tree_leaves(written) if isinstance(x, torch.Tensor)]
            self._counts[name] += bool(tensors) and any(sizes)
        return result


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Launches inside, by function or kernel. Kernels of Triton leave outputs as they are."""
    counts: ClassVar[Counter[str]] = Counter()
    executor = triton.runtime.interpreter.GridExecutor
    run = executor.__call__

    def count(self, *args: Any, **kwargs: Any) -> None:
        counts[f"{self.fn.__module__.split('.')[-2]}.{self.fn.__name__}"] += 1

    executor.__call__ = count
    try:
        with _Torch(counts), any_token():
            yield counts
    finally:
        executor.__call__ = run


def engine_of(name: str, cache_bytes: int, **sizes: Any) -> DynamicInferenceEngine:
    """Of all layers of a published model in bf16, at toy size."""
    pattern = cut_config(name, False).layer_pattern
    config = cut_config(name, True, pattern)
    fields = config.to_dict() | {"params_dtype": "bfloat16"}
    model = build_hybrid_model(type(config).from_dict(fields)).eval()
    return tiny_engine(model, cache_bytes=cache_bytes, prefix_caching="off", **sizes)


class CountedGraph:
    """In the place of a graph: a replay counts one launch a piece, and the ops between them run."""

    counts: ClassVar[Counter[str]] = Counter()
    num_bytes, new_pool = 0, staticmethod(lambda: None)

    def __init__(self, run, device, pool, pieces=None):
        self.open_piece, self.steps = None, []
        with nullcontext() if pieces is None else pieces.of(self):
            run()
            self.begin_piece()
            self.output = run()
            self.end_piece()

    def begin_piece(self) -> None:
        self.open_piece = self

    def end_piece(self) -> None:
        self.open_piece = None
        self.steps.append(lambda: self.counts.update(graph=1))

    def replay(self) -> None:
        for step in self.steps:
            step()


def launches_of_a_suffix(name: str, rows: int, in_pieces: bool) -> Counter[str]:
    """Those of a step of the rest of a prompt, of so many rows."""
    sizes = dict(max_requests=1, max_tokens=rows, max_sequence_length=4 * rows)
    params = SamplingParams(top_k=1, num_tokens_to_generate=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(graph_runner.CAPTURES, "cpu", CountedGraph)
        with counted_launches() as CountedGraph.counts:
            engine = engine_of(name, 64 << 20, cuda_graphs=in_pieces, **sizes)
            engine.add_request([1] * 3 * rows, params)
            for _ in range(2):
                engine.step()
            CountedGraph.counts.clear()
            engine.step()
            counts = +CountedGraph.counts
            engine.close()
    return counts


def launches_of_a_step(name: str, batch: int, **sampling: Any) -> Counter[str]:
    """Those of one decode step of `batch` requests. sampling: parameters; greedy without any."""
    sizes = dict(max_requests=batch, max_tokens=32 * batch, max_sequence_length=64)
    engine = engine_of(name, 16 << 20, **sizes)
    params = SamplingParams(
        **{"top_k": 1, **sampling}, num_tokens_to_generate=20, ignore_termination=True
    )
    with counted_launches() as counts:
        for number in range(batch):
            engine.add_request([number + 1] * 9, params)
        for _ in range(3):  # the prefill, and a step that derives what follows from weights
            engine.step()
        counts.clear()
        engine.step()
    engine.close()
    return +counts
