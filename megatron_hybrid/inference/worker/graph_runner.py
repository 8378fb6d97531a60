"""GraphRunner: steps of decodes as CUDA graphs, which launch all kernels of a forward at once.

A graph replays the launches of one forward as they were captured: the same kernels, grids, numbers
and addresses. So it serves steps of one number of decodes, all with one row or all with rows of
drafts, whose inputs are in the step's buffer; a step of fewer is filled up with rows of no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.inference.memory.budget import step_bytes
from megatron_hybrid.inference.scheduling.step_plan import StepPlan
from megatron_hybrid.inference.weights.change_detector import forward_hooks
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.ops.to_device import to_device

logger = logging.getLogger(__name__)

_FEWEST_ROWS = 8
"""Up to it, sizes are powers of two; beyond it, multiples of it. Steps of up to 64 decodes then
have as many rows as without a graph (`ROW_ALIGNMENT`), and matrix products the same kernels."""
_GRAPH_BYTES = 8 << 20
"""Bytes of one graph, besides its tensors: nodes and arguments of its kernels, in the driver."""
_WORKSPACE_BYTES = 64 << 20
"""Bytes for the libraries that multiply matrices, once for all graphs."""


def sizes_up_to(most: int) -> list[int]:
    """Numbers of decodes that have a graph, ascending: 1, 2, 4, 8, 16 .. 64 by 8, then by 16, 32.

    Args:
        most: decodes of a step, at least 1; always the last size.
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += max(min(size, _FEWEST_ROWS), 1 << max(0, size.bit_length() - 3))
    return [*sizes, most]


def graph_sizes(max_requests: int, max_tokens: int, max_drafts: int) -> dict[int, list[int]]:
    """Return the numbers of decodes that have a graph, ascending, by the rows of each: one, and
    with all drafts.

    Args:
        max_requests: live slots.
        max_tokens: rows of a step.
        max_drafts: of a request in a step.
    """
    most = {rows: min(max_requests, max_tokens // rows) for rows in (1, 1 + max_drafts)}
    return {rows: sizes_up_to(number) for rows, number in most.items() if number}


def planned_bytes(
    model: HybridModel, spec: CacheSpec, sizes: dict[int, list[int]], max_sequence_length: int
) -> int:
    """Return about how much device memory the graphs of all sizes take, with the states before
    drafts.

    They share the memory of the step of the most rows, and each has logits of its own.

    sizes: from `graph_sizes`.
    """
    most_rows = max(rows * each[-1] for rows, each in sizes.items())
    states = sum((rows - 1) * each[-1] for rows, each in sizes.items())
    step = step_bytes(model, spec, states, sizes[1][-1], most_rows, max_sequence_length)
    logits = sum(rows * sum(each) for rows, each in sizes.items()) * model.vocab_size
    num_graphs = sum(map(len, sizes.values()))
    return (
        step
        + logits * model.config.params_dtype.itemsize
        + num_graphs * _GRAPH_BYTES
        + _WORKSPACE_BYTES
    )


def refusal(model: HybridModel, device: torch.device) -> str | None:
    """Return why steps of a model cannot be captured, whatever they are; None: they may be."""
    if device.type not in CAPTURES:
        return f"graphs are captured on CUDA devices, and the model is on {device.type}"
    groups = model.pg_collection
    if groups.pp.size() > 1:
        return "pipeline stages wait for each other's rows"
    if model.config.expert_model_parallel_size > 1:
        return "expert-parallel ranks tell each other numbers of rows by way of the host"
    if groups.tp.size() > 1 and (backend := dist.get_backend(groups.tp)) != "nccl":
        return f"the ranks exchange tensors by {backend}, and only NCCL's calls can be captured"
    return None


class GraphRunner:
    """Captures the forward of decodes of each size, in the warm-up or at the first such step, and
    replays it later.

    Args:
        model: in eval mode.
        context: over a memory with one live slot more than requests.
        sizes: from `graph_sizes`.
    """

    def __init__(
        self, model: HybridModel, context: DynamicInferenceContext, sizes: dict[int, list[int]]
    ):
        self._model, self._context, self.sizes = model, context, sizes
        self._graphs: dict[tuple[int, int], CudaGraph] = {}
        self._pool: Any = None
        self.reason: str | None = None
        """Why decodes run without graphs; None: they need not."""
        self.num_replays = 0
        self._told: set[str] = set()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        return sum(graph.num_bytes for graph in self._graphs.values())

    def drop(self) -> None:
        """Drop all graphs, where memory that they read may change its place. They are captured
        again when they are needed, also where they could not be."""
        self._graphs.clear()
        self._context.forget_layouts()
        self._pool, self.reason = None, None

    def forward(self, plan: StepPlan) -> Tensor | None:
        """Logits [n, V] of a plan, `num_logits` rows for each of its `work`, valid until the next
        step. None: it cannot be replayed, and nothing has changed."""
        if self.reason is not None or not _is_of_decodes(plan):
            return None
        counts = [len(work.tokens) for work in plan.work]
        num_rows = next((rows for rows in self.sizes if rows >= max(counts)), 0)
        size = next((size for size in self.sizes.get(num_rows, ()) if size >= len(counts)), 0)
        if not size or not self.capture(size, num_rows):
            return None
        self._context.begin_step(plan, size, num_rows)
        graph = self._graphs[size, num_rows]
        graph.replay()
        self.num_replays += 1
        if min(counts) == num_rows:
            return graph.output[: num_rows * len(counts)]
        rows = [i * num_rows + j for i, count in enumerate(counts) for j in range(count)]
        return graph.output.index_select(0, to_device(rows, graph.output.device))

    def capture(self, size: int, num_rows: int) -> bool:
        """Capture steps of `size` decodes of so many rows, unless that is done. Returns whether
        there is a graph; else `reason` says why not."""
        key = size, num_rows
        if self.reason is None and key not in self._graphs:
            try:
                self._graphs[key] = self._capture(size, num_rows)
            except (RuntimeError, MemoryError) as error:
                self.drop()
                self.reason = str(error).strip().split("\n")[0]
                if self.reason not in self._told:
                    self._told.add(self.reason)
                    logger.warning("decodes run without CUDA graphs: %s", self.reason)
        return key in self._graphs

    def _capture(self, size: int, num_rows: int) -> CudaGraph:
        """Capture steps of `size` decodes, by one of rows of no request."""
        hooks = chain.from_iterable(map(forward_hooks, self._model.modules()))
        if any((*hooks, _global_forward_hooks, _global_forward_pre_hooks)):
            raise RuntimeError("a module has forward hooks, which a replay would not call")
        context = self._context
        context.begin_step(StepPlan(), size, num_rows)

        def run() -> Tensor:
            context.begin_pass()
            return self._model(context.input_ids, inference_context=context)[0]

        device = context.memory.device
        capture = CAPTURES[device.type]
        if self._pool is None:
            self._pool = capture.new_pool()
        graph = capture(run, device, self._pool)
        context.begin_pass()  # what was worked out in the graph's memory is of no use outside
        logger.info(
            "captured a graph of %d decodes, %d rows each: %d bytes",
            *(size, num_rows, graph.num_bytes),
        )
        return graph


def _is_of_decodes(plan: StepPlan) -> bool:
    return (
        bool(plan.work)
        and not plan.ready
        and all(
            len(work.tokens) == work.num_logits == 1 + len(work.draft_draws) for work in plan.work
        )
    )


class CudaGraph:
    """A captured function without arguments. `output` is what it returned, which a replay writes
    anew, and `num_bytes` the device memory that the capture took.

    Args:
        run: the function; it is called three times: kernels are compiled, waits for the device are
            found, and then it is captured.
        device: its own.
        pool: from `new_pool`; graphs of one pool share the memory between their first and last
            kernels.

    Raises:
        RuntimeError: it cannot be captured; torch's message says why.
    """

    new_pool = staticmethod(torch.cuda.graph_pool_handle)

    def __init__(self, run: Callable[[], Tensor], device: torch.device, pool: Any):
        with torch.cuda.device(device):
            stream, own = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(own)
            with torch.cuda.stream(stream):
                run()
                with _no_waits():
                    run()
            own.wait_stream(stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may copy pages meanwhile.
            with torch.cuda.graph(
                self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
            ):
                self.output = run()
            self.num_bytes = max(0, free - torch.cuda.mem_get_info()[0])

    def replay(self) -> None:
        """Run what was captured, without waiting."""
        self._graph.replay()


@contextmanager
def _no_waits() -> Iterator[None]:
    """A call that waits for the device raises RuntimeError. Inside a capture it would also spoil
    the graph, and leave torch's allocator in it."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


CAPTURES: dict[str, Any] = {"cuda": CudaGraph}
"""How functions are captured, by the type of a device."""
