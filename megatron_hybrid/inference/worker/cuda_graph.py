"""CudaGraph: a function whose launches are captured, as one piece, or with ops between pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.tape import Live, recorded_by


class CudaGraph:
    """A captured function without arguments. `output` is what it returned, which a replay writes
    anew, and `num_bytes` the device memory that the capture took.

    Args:
        run: the function. It is called three times: to compile kernels, to find waits for the
            device, and to be captured.
        device: its own.
        pool: from `new_pool`; graphs of one pool share the memory between their first and last
            kernels.
        pieces: takes the function apart; by default it is one piece.

    Raises:
        RuntimeError: it cannot be captured; torch's message says why. No kernel still runs then,
            and no stream or capture is left open.
    """

    new_pool = staticmethod(torch.cuda.graph_pool_handle)
    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    """One stream for all captures of a device: torch keeps the memory of a pool by stream, and
    libraries their workspaces."""

    def __init__(
        self,
        run: Callable[[], Tensor],
        device: torch.device,
        pool: Any,
        pieces: Pieces | None = None,
    ):
        self._pool = pool
        self.steps: list[Callable[[], Any]] = []
        self.open_piece: torch.cuda.CUDAGraph | None = None
        with torch.cuda.device(device), nullcontext() if pieces is None else pieces.of(self):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream()
            stream, own = self._streams[device], torch.cuda.current_stream()
            stream.wait_stream(own)
            try:
                with torch.cuda.stream(stream):
                    run()
                    with _no_waits():
                        run()
            finally:  # also after an error: the host goes on to write what its kernels read
                own.wait_stream(stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            with _no_open_capture(device, pool), torch.cuda.stream(stream):
                try:
                    self.begin_piece()
                    self.output = run()
                    self.end_piece()
                finally:
                    if self.open_piece is not None:
                        with suppress(RuntimeError):  # the first error says why
                            self.open_piece.capture_end()
                    if self.steps:  # ops between pieces have run
                        own.wait_stream(stream)
            torch.cuda.synchronize()
            self.num_bytes = max(0, torch.cuda.memory_reserved() - before)

    def begin_piece(self) -> None:
        """Begin to capture a piece."""
        piece = torch.cuda.CUDAGraph()
        # Other threads may copy pages meanwhile.
        piece.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.open_piece = piece

    def end_piece(self) -> None:
        """End the capture of a piece."""
        piece, self.open_piece = self.open_piece, None
        piece.capture_end()
        self.steps.append(piece.replay)

    def replay(self) -> None:
        """Launch what was captured, without waiting."""
        for step in self.steps:
            step()


class Pieces:
    """Records a function as a graph in pieces, with the ops over sequences between them.

    These ops run one after the other, so their inputs and outputs pass through the same rooms.

    Args:
        live: inputs of the ops that differ in a replay.
        rooms: memory between the pieces, by its use; all graphs share it, at the same addresses.
            The graph of the most rows comes first.
        agree: called before anything is launched; it raises RuntimeError if another rank cannot.
    """

    def __init__(self, live: Live, rooms: dict[tuple, Tensor], agree: Callable[[], None]):
        self._live, self._rooms, self._agree = live, rooms, agree

    @contextmanager
    def of(self, graph: CudaGraph) -> Iterator[None]:
        """Make a context in which the pieces of a graph begin and end. Before the first piece
        everything runs as it is."""
        self._graph = graph
        with recorded_by(self):
            yield

    def takes_apart(self, op: Op) -> bool:
        return op.is_ragged

    def paused(self) -> AbstractContextManager[None]:
        """Pause nothing: results that are kept for later calls exist before a capture."""
        return nullcontext()

    def call(self, op: Op, inputs: tuple) -> Tensor:
        """End a piece, launch the op, and begin the next piece."""
        graph, staged = self._graph, list(inputs)
        for place in op.flat_inputs:
            if (rows := inputs[place]) is not None:
                staged[place] = self._room(place, rows).copy_(rows)

        def serve() -> Tensor:
            found = op.serve(*map(self._live.now, staged))
            return self._room(-1, found).copy_(found)

        if graph.open_piece is None:
            return serve().clone()
        graph.end_piece()
        self._agree()
        graph.steps[-1]()
        output = serve()
        graph.steps.append(serve)
        graph.begin_piece()
        return output.clone()

    def _room(self, place: int, rows: Tensor) -> Tensor:
        """Return room for rows `[T, ...]` of an op's input, or of its output, place -1."""
        key = place, rows.shape[1:], rows.dtype
        if key not in self._rooms:
            self._rooms[key] = torch.empty_like(rows, memory_format=torch.contiguous_format)
        return self._rooms[key][: len(rows)]


@contextmanager
def _no_open_capture(device: torch.device, pool: Any) -> Iterator[None]:
    """End the capture of torch's allocator after an error, as torch does not end it itself."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError, AttributeError, TypeError):
            torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        raise


@contextmanager
def _no_waits() -> Iterator[None]:
    """Let calls that wait for the device raise RuntimeError. Inside a capture they would also spoil
    the graph, and leave torch's allocator in it."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


CAPTURES: dict[str, Any] = {"cuda": CudaGraph}
"""How functions are captured, by the type of a device."""
