"""PageMover: copies pages between the pool and host memory, concurrently with the model's steps.

On a CUDA device, pages for the host are first gathered on the device, on the stream of the steps,
so that they may be overwritten at once; copies to and from pinned host memory run on a separate
stream. On other devices both are plain copies.
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
    """Recorded after the copy, or None if the pages have arrived."""

    def numpy(self) -> np.ndarray:
        """Wait for the pages, and return them, uint8 [n, page_bytes]. Any thread may call it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.data.numpy()


class PageMover:
    """Moves pages of one pool.

    Args:
        pool: uint8 [num_pages, page_bytes].
    """

    def __init__(self, pool: Tensor):
        self._words = pool.view(torch.int64)
        """The pool in elements of 8 bytes, as a GPU copies one element at a time."""
        self._on_cuda = pool.device.type == "cuda"
        self._stream = torch.cuda.Stream(pool.device) if self._on_cuda else None

    def _ids(self, pages: np.ndarray) -> Tensor:
        ids = torch.from_numpy(np.ascontiguousarray(pages, dtype=np.int64))
        if self._on_cuda:
            ids = ids.pin_memory()  # else the copy waits for all queued work of the device
        return ids.to(self._words.device, non_blocking=True)

    def to_host(self, page_lists: list[np.ndarray]) -> list[HostPages]:
        """Copy the pages of each list (int32 [n]), of at least one. The pages may be overwritten at
        once."""
        # One tensor per list: an evicted record frees its bytes independently of others.
        if not self._on_cuda:
            copies = [self._words.index_select(0, self._ids(pages)) for pages in page_lists]
            return [HostPages(data.view(torch.uint8)) for data in copies]
        sizes = [len(pages) for pages in page_lists]
        gathered = self._words[self._ids(np.concatenate(page_lists))].view(torch.uint8)
        self._stream.wait_stream(torch.cuda.current_stream(self._words.device))
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
        """Write `sources` into the pages of each list, which must not be used until the arrival. If
        this raises, no copy is running."""
        arrival = Arrival(sources)
        if self._on_cuda:
            # Reused pages: earlier steps must read them first.
            self._stream.wait_stream(torch.cuda.current_stream(self._words.device))
            try:
                with torch.cuda.stream(self._stream):
                    for pages, source in zip(page_lists, sources):
                        rows = source.data.to(self._words.device, non_blocking=True)
                        self._write(pages, rows)
                    arrival.event = torch.cuda.Event()
                    arrival.event.record()
            except BaseException:
                self._stream.synchronize()
                raise
            return arrival
        for pages, source in zip(page_lists, sources):
            self._write(pages, source.data)
        return arrival

    def _write(self, pages: np.ndarray, rows: Tensor) -> None:
        self._words.index_copy_(0, self._ids(pages), rows.view(torch.int64))


@dataclass
class Arrival:
    """A copy of pages into the pool."""

    sources: list[HostPages]
    """Kept alive until they have arrived."""
    event: torch.cuda.Event | None = None

    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Wait until the pages have arrived."""
        if self.event is not None:
            self.event.synchronize()
