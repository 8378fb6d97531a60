"""Pages between the pool and host memory, beside the steps of the model.

On a CUDA device what leaves is first gathered on the device, in the order of the steps' own work,
so that the pages may be written again at once; the way to pinned host memory and back runs on a
stream of its own. Elsewhere both are plain copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class HostPages:
    """Pages in host memory."""

    data: Tensor
    """uint8 [n, page_bytes]."""
    arrived: torch.cuda.Event | None = None
    """Set while they are on their way; None: they are there."""

    def numpy(self) -> np.ndarray:
        """uint8 [n, page_bytes], once they have arrived. Any thread may ask."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.data.numpy()


class PageMover:
    """Moves pages of one pool.

    Args:
        pool: uint8 [num_pages, page_bytes].
    """

    def __init__(self, pool: Tensor):
        self._pool = pool
        self._on_cuda = pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(pool.device) if self._on_cuda else None

    def _ids(self, pages: np.ndarray) -> Tensor:
        ids = torch.from_numpy(np.ascontiguousarray(pages, dtype=np.int64))
        return ids.to(self._pool.device, non_blocking=True)

    def to_host(self, page_lists: list[np.ndarray]) -> list[HostPages]:
        """Copies of the pages of each list (int32 [n]); the pages may change at once."""
        if not page_lists:
            return []
        # Each by itself: a record that goes must not wait for others to free its bytes.
        if not self._on_cuda:
            copies = [self._pool.index_select(0, self._ids(pages)) for pages in page_lists]
            return [HostPages(data) for data in copies]
        sizes = [len(pages) for pages in page_lists]
        gathered = self._pool[self._ids(np.concatenate(page_lists))]
        self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
        gathered.record_stream(self._stream)
        parts = []
        with torch.cuda.stream(self._stream):
            for part in gathered.split(sizes):
                data = torch.empty(part.shape, dtype=torch.uint8, pin_memory=True)
                parts.append(data.copy_(part, non_blocking=True))
            arrived = torch.cuda.Event()
            arrived.record()
        return [HostPages(data, arrived) for data in parts]

    def to_pool(self, page_lists: list[np.ndarray], sources: list[HostPages]) -> Arrival:
        """Writes `sources` into the pages of each list; until the arrival they are nobody else's.
        If it raises, nothing is on its way."""
        arrival = Arrival(sources)
        if self._on_cuda:
            # The pages may be new: what the steps before still read of them comes first.
            self._stream.wait_stream(torch.cuda.current_stream(self._pool.device))
            try:
                with torch.cuda.stream(self._stream):
                    for pages, source in zip(page_lists, sources):
                        rows = source.data.to(self._pool.device, non_blocking=True)
                        self._pool.index_copy_(0, self._ids(pages), rows)
                    arrival.event = torch.cuda.Event()
                    arrival.event.record()
            except BaseException:
                self._stream.synchronize()
                raise
            return arrival
        for pages, source in zip(page_lists, sources):
            self._pool.index_copy_(0, self._ids(pages), source.data)
        return arrival


@dataclass
class Arrival:
    """Pages on their way into the pool."""

    sources: list[HostPages]
    """Held until they have arrived."""
    event: torch.cuda.Event | None = None

    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Returns when they are there."""
        if self.event is not None:
            self.event.synchronize()
