"""SmallIndex: a prefix index and its pool; each prompt brings pages of its own for every block."""

import numpy as np

from megatron_hybrid.cache.index.prefix_index import PrefixIndex
from megatron_hybrid.cache.index.tree import Kind
from megatron_hybrid.cache.pages.allocator import PageAllocator


def counting(n, start=0):
    return list(range(start, start + n))


class SmallIndex:
    """With blocks of 16 tokens."""

    def __init__(self, num_pages=1000, pages_per_block=1):
        self.pool = PageAllocator(num_pages)
        self.index = PrefixIndex(16, pages_per_block, self.pool)
        self.columns = pages_per_block

    def add(self, tokens, salt=""):
        """Returns the pages, which the index alone holds."""
        tokens = np.asarray(tokens, dtype=np.int32)
        blocks = -(-len(tokens) // 16)
        pages = self.pool.allocate(blocks * self.columns).reshape(blocks, self.columns)
        path = self.index.insert(salt, tokens, pages)
        assert (path.depth, path.known) == (len(tokens), len(tokens))
        self.pool.release(pages)
        return pages

    def walk(self, tokens, salt=""):
        return self.index.walk(salt, np.asarray(tokens, dtype=np.int32))

    def leaf(self, tokens):
        path = self.walk(tokens)
        assert path.known == len(tokens)
        return path.edges[-1]

    def watch(self, tokens, kind=Kind.JUNCTION, now=0):
        return self.index.watch(self.leaf(tokens), len(tokens), kind, now)
