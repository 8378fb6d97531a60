"""PageAllocator: uniform pages and their reference counts, without tokens or requests.

Two counts per page: references by requests (`ref_counts`), and references by the prefix index
(`cached_counts`: after a split inside a block two edges hold the same page). A page is free when
both are 0. Page 0 is the null page: it always exists and is never allocated.
"""

import numpy as np

NULL_PAGE = 0


class PageAllocator:
    """A pool of num_pages pages; ids 1 .. num_pages - 1 can be allocated.

    Page lists are int32 arrays of any shape without repeated ids (a call counts each id once). A
    call allocates memory before it changes anything: after a MemoryError nothing has changed.

    Raises:
        ValueError: there are fewer than two pages.
    """

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise ValueError(
                f"num_pages is {num_pages}; the pool needs at least 2 (page 0 is the null page): "
                f"raise cache_bytes"
            )
        self.num_pages = num_pages
        self.ref_counts = np.zeros(num_pages, dtype=np.int16)
        # int32: every state within a window after a block holds the block's pages, in any prompt.
        self.cached_counts = np.zeros(num_pages, dtype=np.int32)
        self._free = np.arange(num_pages, dtype=np.int32)[::-1].copy()  # a stack of num_free pages
        self.num_free = num_pages - 1
        self.num_evictable = 0
        """Pages held by the index only: eviction can free them."""
        self.num_unpinned = 0
        """How often the last request that held cached pages released them."""

    def can_free(self, n: int) -> bool:
        """Return whether n pages are free or eviction could free them."""
        return n <= self.num_free + self.num_evictable

    def allocate(self, n: int) -> np.ndarray | None:
        """Return n pages with one request reference each, int32 [n], or None if fewer are free."""
        if n > self.num_free:
            return None
        pages = self._free[self.num_free - n : self.num_free][::-1].copy()
        self.ref_counts[indices(pages)] = 1
        self.num_free -= n
        return pages

    def retain(self, pages: np.ndarray) -> None:
        """Add a request reference to each page. Raise RuntimeError if a page is free, or already
        has 32,767 (the most that int16 can count)."""
        at = indices(pages)
        refs = self.ref_counts[at]
        unheld = at.size - int(np.count_nonzero(refs))
        if unheld and np.count_nonzero(refs | self.cached_counts[at]) < at.size:
            raise RuntimeError(f"retain of a free page among {pages.tolist()}")
        refs += 1
        if np.count_nonzero(refs < 0):
            raise RuntimeError(f"more than 32,767 requests hold a page among {pages.tolist()}")
        self.ref_counts[at] = refs
        self.num_evictable -= unheld

    def release(self, pages: np.ndarray) -> None:
        """Remove a request reference from each page. Raise RuntimeError if a page has none."""
        at = indices(pages)
        refs = self.ref_counts[at]
        if np.count_nonzero(refs) < at.size:
            raise RuntimeError(f"release of a page that no request holds among {pages.tolist()}")
        refs -= 1
        num_held = np.count_nonzero(refs)
        if num_held == at.size:
            self.ref_counts[at] = refs
            return
        unheld = at[refs == 0] if num_held else at
        cached = self.cached_counts[unheld]
        num_cached = int(np.count_nonzero(cached))
        free = unheld[cached == 0] if num_cached else unheld
        self.ref_counts[at] = refs
        self.num_evictable += num_cached
        self.num_unpinned += num_cached > 0
        self._push(free)

    def cache(self, pages: np.ndarray) -> None:
        """Add an index reference to each page. Raise RuntimeError if a page is free."""
        at = indices(pages)
        counts = self.cached_counts[at]
        if np.count_nonzero(counts | self.ref_counts[at]) < at.size:
            raise RuntimeError(f"cache of a free page among {pages.tolist()}")
        self.cached_counts[at] = counts + 1

    def uncache(self, pages: np.ndarray) -> None:
        """Remove an index reference from each page. Raise RuntimeError if a page has none."""
        at = indices(pages)
        counts = self.cached_counts[at]
        if np.count_nonzero(counts) < at.size:
            raise RuntimeError(f"uncache of a page that is not cached among {pages.tolist()}")
        counts -= 1
        held = counts | self.ref_counts[at]
        free = at[held == 0] if np.count_nonzero(held) else at
        self.cached_counts[at] = counts
        self.num_evictable -= free.size
        self._push(free)

    def _push(self, pages: np.ndarray) -> None:
        self._free[self.num_free : self.num_free + pages.size] = pages[::-1]
        self.num_free += pages.size

    def recount(self, ref_counts: np.ndarray, cached_counts: np.ndarray) -> None:
        """Set the counts of all pages, int [num_pages], and derive everything else from them."""
        held = (ref_counts > 0) | (cached_counts > 0)
        free = np.flatnonzero(~held[1:])[::-1] + 1
        evictable = (ref_counts == 0) & (cached_counts > 0)
        self.ref_counts[:], self.cached_counts[:] = ref_counts, cached_counts
        self._free[: free.size], self.num_free = free, free.size
        self.num_evictable = int(np.count_nonzero(evictable))
        self.num_unpinned += 1

    def check_integrity(self) -> None:
        """Raise RuntimeError unless free + held = all and the running counts are right."""
        held = (self.ref_counts > 0) | (self.cached_counts > 0)
        free = self._free[: self.num_free]
        evictable = np.count_nonzero((self.ref_counts == 0) & (self.cached_counts > 0))
        if (self.ref_counts < 0).any() or (self.cached_counts < 0).any():
            raise RuntimeError("a page has a negative count")
        if held[NULL_PAGE] or (free == NULL_PAGE).any():
            raise RuntimeError("the null page was handed out")
        if np.unique(free).size != free.size or held[free].any():
            raise RuntimeError("a page is in the free list twice, or free and held")
        if free.size != self.num_pages - 1 - np.count_nonzero(held):
            raise RuntimeError(
                f"{free.size} free + {np.count_nonzero(held)} held pages are not "
                f"{self.num_pages - 1}: pages were lost"
            )
        if evictable != self.num_evictable:
            raise RuntimeError(f"{evictable} pages are evictable, counted {self.num_evictable}")


def indices(pages: np.ndarray) -> np.ndarray:
    """Return the pages as a flat intp array, as numpy converts other indices at every access."""
    return pages.ravel().astype(np.intp)


def with_room(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """Return the array if it has `needed` rows, else a copy of its first `used` rows, at least 1/64
    longer. It grows by little, as most arrays never grow again, and copies are cheap."""
    if needed <= len(array):
        return array
    length = max(needed, len(array) + len(array) // 64)
    grown = np.empty((length, *array.shape[1:]), dtype=array.dtype)
    grown[:used] = array[:used]
    return grown
