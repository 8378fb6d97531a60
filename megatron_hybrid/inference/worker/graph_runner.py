"""Steps that are recorded once, and replayed without most of the Python of a forward.

A `GraphRunner` has CUDA graphs, which launch all or many kernels of a forward at once, and
`DecodeTapes` the operations of decodes on a CPU.

A graph replays the launches of one forward as they were captured: the same kernels, grids, numbers
and addresses. So it serves steps of one number of decodes, all with one row or all with rows of
drafts, whose inputs are in the step's buffer. A step of fewer decodes is filled up with decodes of
no request, and a decode of fewer drafts with rows that are taken back.

Other steps of few rows, such as the rest of a prompt after a prefix, are replayed in pieces. Norms,
products and activations, which treat each row by itself, are captured for so many rows. Between
these pieces the ops over sequences are launched, with the layout of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.distributed.ranks import Ranks
from megatron_hybrid.inference.memory.budget import layer_widths, step_bytes
from megatron_hybrid.inference.scheduling.step_plan import StepPlan
from megatron_hybrid.inference.weights.change_detector import unrecorded_calls
from megatron_hybrid.inference.worker.context import DynamicInferenceContext
from megatron_hybrid.inference.worker.cuda_graph import CAPTURES, CudaGraph, Pieces
from megatron_hybrid.models.hybrid_model import HybridModel, has_foreign_layers
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT
from megatron_hybrid.ops.tape import Tape
from megatron_hybrid.ops.to_device import to_device

logger = logging.getLogger(__name__)

_FEWEST_ROWS = 8
"""Up to this number, sizes are powers of two; beyond it, multiples of it. Steps of up to 64 decodes
then have as many rows as without a graph (`ROW_ALIGNMENT`), and products the same kernels."""
PIECES = -1
"""In place of a graph's rows of each decode: its size is a number of rows, in pieces."""
_PROMPT_ROWS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024)
"""Rows of graphs in pieces. Beyond them the device takes longer than the host."""
_GRAPH_BYTES = 8 << 20
"""Bytes of one graph in the driver, without its tensors: nodes and arguments of its kernels."""
_WORKSPACE_BYTES = 64 << 20
"""Bytes for the libraries that multiply matrices, once for all graphs."""
_MOST_DECODES = 16
"""Forwards of more decodes than this take far longer than the Python around them."""


def sizes_up_to(most: int) -> list[int]:
    """List the numbers of decodes that have a graph: 1, 2, 4, 8, 16 .. 64 by 8, then by 16, 32.

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


def prompt_sizes(max_tokens: int, max_sequence_length: int) -> list[int]:
    """Return the numbers of rows that have a graph in pieces, ascending."""
    return [rows for rows in _PROMPT_ROWS if rows <= min(max_tokens, max_sequence_length)]


def planned_bytes(
    model: HybridModel,
    spec: CacheSpec,
    sizes: dict[int, list[int]],
    max_tokens: int,
    max_sequence_length: int,
) -> int:
    """Estimate the bytes of device memory that the graphs of all sizes take, with the states before
    drafts. They share the memory of the step of the most rows, one buffer of logits, and inputs
    and outputs of one op between pieces.

    sizes: from `graph_sizes`.
    """
    in_pieces = prompt_sizes(max_tokens, max_sequence_length)
    most_rows = max(rows * each[-1] for rows, each in sizes.items())
    rooms = max(in_pieces, default=0) * 3 * round(max(layer_widths(model), default=0))
    rooms += sum(in_pieces) * model.config.hidden_size  # what they return
    rooms *= model.config.params_dtype.itemsize
    states = sum((rows - 1) * each[-1] for rows, each in sizes.items())
    rows = max([most_rows, *in_pieces])
    step = step_bytes(model, spec, states, sizes[1][-1], rows, max_sequence_length)
    logits = most_rows * model.vocab_size * model.config.params_dtype.itemsize
    num_graphs = sum(map(len, sizes.values())) + len(in_pieces)
    num_graphs += len(sizes[1]) * (len(sizes) > 1 and hasattr(model, "mtp"))
    return step + logits + rooms + num_graphs * _GRAPH_BYTES + _WORKSPACE_BYTES


def refusal(model: HybridModel, device: torch.device) -> str | None:
    """Return why no steps of a model can be captured, or None if they may be."""
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
    """Captures the forward of decodes of each size between steps, and replays it in steps.

    Args:
        model: in eval mode.
        context: over a memory with one live slot more than requests.
        sizes: from `graph_sizes`.
        in_pieces: from `prompt_sizes`.
        ranks: those of the model, which capture the same graphs.

    If the context has an MTP head that keeps no states, its passes have graphs of the same numbers
    of decodes; their key has 0 rows. No step is in pieces if the context has an MTP head, if ranks
    split rows, or if layers come from other packages, which may read a layout that is not live.
    """

    def __init__(
        self,
        model: HybridModel,
        context: DynamicInferenceContext,
        sizes: dict[int, list[int]],
        in_pieces: list[int],
        ranks: Ranks,
    ):
        self._model, self._context, self.sizes, self._ranks = model, context, sizes, ranks
        splits_rows = model.config.sequence_parallel
        has_none = context.prediction is not None or splits_rows or has_foreign_layers(model)
        self._in_pieces = [] if has_none else in_pieces
        self._rooms: dict[tuple, Tensor] = {}  # see `Pieces`
        self._has_head = context.prediction is not None and not any(
            layer.states for layer in model.prediction_requirements()
        )
        self._hidden: Tensor | None = None  # what passes of the head read and write, [rows, H]
        self._graphs: dict[tuple[int, int], CudaGraph] = {}
        self._read: list[int] = []  # see `_what_is_read`
        self._logits: Tensor | None = None  # what all graphs write, [rows, V]
        self._pool: Any = None
        self.num_replays = 0
        self._told: set[str] = set()

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        return sum(graph.num_bytes for graph in self._graphs.values())

    def all_sizes(self) -> list[tuple[int, int]]:
        """List (decodes, rows of each) of all graphs, the largest first, so that the smaller ones
        find room in the memory that they share."""
        found = [(size, rows) for rows, sizes in self.sizes.items() for size in sizes]
        found += [(size, 0) for size in self.sizes[1]] if self._has_head else []
        found.sort(key=lambda key: key[0] * key[1])
        return [*found, *((rows, PIECES) for rows in self._in_pieces)][::-1]

    def drop(self) -> None:
        """Drop all graphs, as memory that they read may change its address."""
        self._graphs.clear()
        self._context.forget_layouts()
        self._pool, self._logits, self._hidden, self._read = None, None, None, []
        self._rooms = {}

    def hold(self) -> bool:
        """Return whether the graphs of all ranks read the model's present memory and modules. All
        ranks call it."""
        return not any(self._ranks.maximum([self._read != self._what_is_read()]))

    def _what_is_read(self) -> list[int]:
        """List the addresses of weights, and ids of the modules and of calls that run with them."""
        model = self._model
        things = chain(model.modules(), unrecorded_calls(model))
        tensors = chain(model.parameters(), model.buffers())
        return [*(tensor.data_ptr() for tensor in tensors), *map(id, things)]

    def forward(self, plan: StepPlan) -> Tensor | None:
        """Return logits [n, V] of a plan, `num_logits` rows for each of its `work`, then one for
        each of its `ready`, valid until the next step. Do nothing and return None if the plan has
        no graph."""
        if not _is_of_decodes(plan):
            return self._forward_in_pieces(plan)
        counts = [len(work.tokens) for work in plan.work]
        num_rows = next((rows for rows in self.sizes if rows >= max(counts)), 0)
        size = next((size for size in self.sizes.get(num_rows, ()) if size >= len(counts)), 0)
        if (graph := self._graphs.get((size, num_rows))) is None:
            return self._forward_in_pieces(plan)
        self._context.begin_step(plan, size, num_rows)
        graph.replay()
        self._context.end_recorded(plan)
        self.num_replays += 1
        wanted = [work.num_logits for work in plan.work]
        logits_nV = graph.output[: num_rows * len(counts)]
        if min(wanted) < num_rows:
            rows = [i * num_rows + j for i, count in enumerate(wanted) for j in range(count)]
            logits_nV = logits_nV.index_select(0, to_device(rows, logits_nV.device))
        if plan.ready:  # they need no forward
            slots_n = to_device([ready.slot for ready in plan.ready], logits_nV.device)
            ready_nV = self._model.compute_logits(self._context.memory.hidden()[slots_n])
            logits_nV = torch.cat([logits_nV, ready_nV.to(logits_nV.dtype)])
        return logits_nV

    def _forward_in_pieces(self, plan: StepPlan) -> Tensor | None:
        count, context = sum(len(work.tokens) for work in plan.work), self._context
        rows = next((rows for rows in self._in_pieces if rows >= count), 0)
        graph = self._graphs.get((rows, PIECES)) if count else None
        if graph is None:
            return None
        context.begin_step(plan, padded_to=rows)
        graph.replay()
        self.num_replays += 1
        return self._model.compute_logits(context.last_token_logits(graph.output.unsqueeze(0)))

    def predict(self, plan: StepPlan, ids_n: Tensor | None) -> Tensor | None:
        """Return logits [n, V] of a pass of the MTP head over decodes, valid until the next one. Do
        nothing and return None if there is no graph.

        Args:
            plan: its work alone.
            ids_n: the tokens of the decodes if they are drafts. Then the pass goes on from the
                result of the pass before, over at least these decodes. None in the first pass.
        """
        count = len(plan.work)
        size = next((size for size in self.sizes[1] if size >= count), 0)
        if (graph := self._graphs.get((size, 0))) is None:
            return None
        context = self._context
        context.begin_step(plan, size)
        if ids_n is None:
            self._hidden[:count] = context.live_hidden()[:count]
        else:
            context.input_ids[0, :count] = ids_n[:count]
        graph.replay()
        return graph.output[:count]

    def capture(self, size: int, num_rows: int) -> None:
        """Capture steps of `size` decodes of so many rows, or of `size` rows with `PIECES`, unless
        that is done. Call it on all ranks, between steps. If it fails on one of them, no rank has
        this graph, and the other graphs stay."""
        key = size, num_rows
        if key in self._graphs:
            return
        exchange = _Exchange(self._ranks)
        try:
            if unrecorded_calls(self._model):
                raise RuntimeError("a module has forward hooks, which a replay would not call")
            if num_rows == PIECES:
                graph = self._capture_pieces(size, exchange)
            else:
                graph = self._capture(size, num_rows, exchange)
        except (RuntimeError, MemoryError) as error:
            reason = str(error).strip().split("\n")[0]
            exchange.end(has_failed=True)
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("decodes run without CUDA graphs: %s", reason)
        else:
            if not exchange.end(has_failed=False):
                self._graphs[key], self._read = graph, self._what_is_read()

    def _capture(self, size: int, num_rows: int, exchange: _Exchange) -> CudaGraph:
        """Capture steps of `size` decodes, with rows of no request."""
        context, model = self._context, self._model
        context.begin_step(StepPlan(), size, max(1, num_rows))
        output = self._room_for_logits(exchange)[: size * max(1, num_rows)]
        hidden_Th = self._room_for_hidden(context.input_ids.shape[1])

        def run() -> Tensor:
            exchange.require_all()
            context.begin_pass()
            if num_rows:
                return output.copy_(model(context.input_ids, inference_context=context)[0])
            predicted_Th = model.predict(hidden_Th, context.input_ids[0], context.prediction)
            hidden_Th.copy_(predicted_Th)
            return output.copy_(model.compute_logits(predicted_Th[:size]))

        graph = self._new_graph(run)
        context.begin_pass()  # values in the graph's memory are of no use outside
        logger.info(
            "captured a graph of %d decodes, %d rows each: %d bytes",
            *(size, num_rows, graph.num_bytes),
        )
        return graph

    def _capture_pieces(self, num_rows: int, exchange: _Exchange) -> CudaGraph:
        """Capture steps of so many rows in pieces, with a prompt of no request."""
        context, model = self._context, self._model
        plan, layout = context.one_prompt(num_rows)
        context.begin_step(plan, padded_to=num_rows)

        def run() -> Tensor:
            exchange.require_all()
            layout.forget_derived()
            return model.last_hidden(context.input_ids, context)

        with context.recording(layout) as live:
            graph = self._new_graph(run, Pieces(live, self._rooms, exchange.require_all))
        layout.forget_derived()
        logger.info("captured a graph of %d rows, in pieces: %d bytes", num_rows, graph.num_bytes)
        return graph

    def _new_graph(self, run: Callable[[], Tensor], *more: Any) -> CudaGraph:
        device = self._context.memory.device
        capture = CAPTURES[device.type]
        if self._pool is None:
            self._pool = capture.new_pool()
        return capture(run, device, self._pool, *more)

    def _room_for_logits(self, exchange: _Exchange) -> Tensor:
        """Return the logits that all graphs write into. The first call runs a forward for it."""
        if self._logits is None:
            exchange.require_all()
            context = self._context
            sample_nV = self._model(context.input_ids, inference_context=context)[0]
            most = max(rows * sizes[-1] for rows, sizes in self.sizes.items())
            self._logits = sample_nV.new_empty(most, sample_nV.shape[1])
        return self._logits

    def _room_for_hidden(self, num_rows: int) -> Tensor:
        if self._hidden is None:
            rows = -(-self.sizes[1][-1] // ROW_ALIGNMENT) * ROW_ALIGNMENT
            config = self._model.config
            self._hidden = torch.zeros(
                rows,
                config.hidden_size,
                dtype=config.params_dtype,
                device=self._context.memory.device,
            )
        return self._hidden[:num_rows]


class DecodeTapes:
    """Runs forwards. From the third one of a number of decodes of one row each, a tape replays it.

    A tape calls the ops that read positions, slots or numbers of rows on the host as they are, with
    the layout and the block tables of its step. Layers of other packages may read these anywhere,
    so models with such layers have no tapes.
    """

    def __init__(self, model: HybridModel, context: DynamicInferenceContext):
        self._model, self._context = model, context
        self._known: set[tuple[int, int]] = set()
        self._calls: dict[tuple[int, int], Callable[[], Tensor]] = {}

    def drop(self) -> None:
        """Drop all tapes, as weights or the addresses of memory have changed."""
        self._known.clear()
        self._calls.clear()

    def forward(self, plan: StepPlan) -> Tensor:
        """Return logits [n, V] of a plan that is laid out."""
        context = self._context
        layout = context.ragged_layout()
        key = layout.num_sequences, sum(work.num_logits for work in plan.work)
        is_plain = key[0] == layout.num_tokens <= _MOST_DECODES
        # Steps in which many requests end do not come again.
        is_plain = is_plain and key[1] >= key[0] - 1 and not (plan.ready or layout.captures)
        if not is_plain or context.adapter_slots is not None or torch.is_autocast_enabled("cpu"):
            return self._run()
        if (call := self._calls.get(key)) is not None:
            return call()
        if key not in self._known:
            self._known.add(key)
            return self._run()
        if unrecorded_calls(self._model) or has_foreign_layers(self._model):
            self._calls[key] = self._run
            return self._run()
        with context.recording(context.single_decodes()) as live:
            tape = self._calls[key] = Tape(self._run, live)
        if tape.reason is not None:
            logger.info("decodes run without a tape: %s", tape.reason)
        return tape.take_first()

    def _run(self) -> Tensor:
        context = self._context
        return self._model(context.input_ids, inference_context=context)[0]


class _Exchange:
    """Lets the ranks of a model agree before each forward of a capture that all of them make it.
    Else one would wait for the others inside."""

    def __init__(self, ranks: Ranks):
        self._ranks, self._is_over = ranks, False

    def require_all(self) -> None:
        """Raise RuntimeError if another rank has failed."""
        if self.end(has_failed=False):
            raise RuntimeError("another rank cannot capture a graph")

    def end(self, has_failed: bool) -> bool:
        """Report whether this rank has failed, and return whether any has."""
        if not self._is_over:
            self._is_over = any(self._ranks.maximum([has_failed]))
        return self._is_over


def _is_of_decodes(plan: StepPlan) -> bool:
    """Return whether all work is of last tokens, with or without drafts after them. A request that
    ends, of which only the last state is wanted, draws no token."""
    return bool(plan.work) and all(
        len(work.tokens) == 1 + len(work.draft_draws)
        and work.num_logits in (0, len(work.tokens))
        and work.num_logits >= len(work.draft_draws)
        for work in plan.work
    )
