"""PageAllocator: uniform pages and who holds them. Knows neither tokens nor requests.

Two counts per page: references of requests (`ref_counts`), and references of the prefix index
(`cached_counts`: an edge split inside a block lets two edges hold the same page). A page is free
when both are 0. Page 0 is the null page: always there, never handed out.
"""

from __future__ import annotations

import numpy as np

NULL_PAGE = 0


class PageAllocator:
    """A pool of num_pages pages, ids 1 .. num_pages - 1 to hand out.

    Page lists are int32 arrays of any shape without repeated ids (a call counts each id once).

    Raises:
        ValueError: fewer than two pages.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(
                f"num_pages is {num_pages}; the pool needs at least 2 (page 0 is the null page): "
                f"raise cache_bytes"
            )
        self.num_pages = num_pages
        self.ref_counts = np.zeros(num_pages, dtype=np.int32)
        self.cached_counts = np.zeros(num_pages, dtype=np.int32)
        # A stack, lowest ids on top, so that a fresh pool fills from the front.
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self.num_free = num_pages - 1
        self.num_evictable = 0
        """Pages that only the index holds: what eviction could free."""

    def allocate(self, n: int) -> np.ndarray | None:
        """n pages with one request reference each, int32 [n]; None if fewer are free."""
        if n > self.num_free:
            return None
        self.num_free -= n
        pages = self._free[self.num_free : self.num_free + n][::-1].copy()
        self.ref_counts[pages] = 1
        return pages

    def retain(self, pages: np.ndarray) -> None:
        """One more request reference on each page. Raises RuntimeError if one is free."""
        pages = pages.ravel()
        refs = self.ref_counts[pages]
        unheld = int(np.count_nonzero(refs == 0))
        if unheld:
            if (refs + self.cached_counts[pages] == 0).any():
                raise RuntimeError(f"retain of a free page among {pages.tolist()}")
            self.num_evictable -= unheld
        self.ref_counts[pages] = refs + 1

    def release(self, pages: np.ndarray) -> None:
        """One request reference less on each page. Raises RuntimeError if one has none."""
        pages = pages.ravel()
        refs = self.ref_counts[pages] - 1
        if pages.size and refs.min() < 0:
            raise RuntimeError(f"release of a page that no request holds among {pages.tolist()}")
        self.ref_counts[pages] = refs
        unheld = pages[refs == 0]
        if unheld.size:
            free = unheld[self.cached_counts[unheld] == 0]
            self.num_evictable += unheld.size - free.size
            self._push(free)

    def cache(self, pages: np.ndarray) -> None:
        """One more index reference on each page. Raises RuntimeError if one is free."""
        pages = pages.ravel()
        counts = self.cached_counts[pages]
        unheld = self.ref_counts[pages] == 0
        if (counts[unheld] == 0).any():
            raise RuntimeError(f"cache of a free page among {pages.tolist()}")
        self.cached_counts[pages] = counts + 1

    def uncache(self, pages: np.ndarray) -> None:
        """One index reference less on each page. Raises RuntimeError if one has none."""
        pages = pages.ravel()
        counts = self.cached_counts[pages] - 1
        if pages.size and counts.min() < 0:
            raise RuntimeError(f"uncache of a page that is not cached among {pages.tolist()}")
        self.cached_counts[pages] = counts
        free = pages[(counts == 0) & (self.ref_counts[pages] == 0)]
        self.num_evictable -= free.size
        self._push(free)

    def _push(self, pages: np.ndarray) -> None:
        self._free[self.num_free : self.num_free + pages.size] = pages[::-1]
        self.num_free += pages.size

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free + held = all and the running counts are right."""
        held = (self.ref_counts > 0) | (self.cached_counts > 0)
        free = self._free[: self.num_free]
        evictable = np.count_nonzero((self.ref_counts == 0) & (self.cached_counts > 0))
        if (self.ref_counts < 0).any() or (self.cached_counts < 0).any():
            raise RuntimeError("a page has a negative count")
        if held[NULL_PAGE] or (free == NULL_PAGE).any():
            raise RuntimeError("the null page was handed out")
        if np.unique(free).size != free.size or held[free].any():
            raise RuntimeError("a page is in the free list twice, or free and held")
        if free.size + np.count_nonzero(held) != self.num_pages - 1:
            raise RuntimeError(
                f"{free.size} free + {np.count_nonzero(held)} held pages are not "
                f"{self.num_pages - 1}: pages were lost"
            )
        if evictable != self.num_evictable:
            raise RuntimeError(f"{evictable} pages are evictable, counted {self.num_evictable}")
