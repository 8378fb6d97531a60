"""PageAllocator: who holds a page."""

import numpy as np
import pytest

from megatron_hybrid.cache.pages.allocator import PageAllocator, with_room


def test_any_number_of_states_may_hold_a_page():
    """As those of short chats do, whose windows all reach back into one system prompt."""
    pool = PageAllocator(3)
    pages = pool.allocate(1)
    for _ in range(1 << 16):  # an int16 overflows at half of it, and is 0 again here
        pool.cache(pages)
    pool.check_integrity()
    pool.release(pages)
    assert (pool.num_free, pool.num_evictable) == (1, 1)
    for _ in range(1 << 16):
        pool.uncache(pages)
    assert (pool.num_free, pool.num_evictable) == (2, 0)


@pytest.mark.parametrize("operation", ["retain", "release", "cache", "uncache"])
def test_a_free_page_is_not_to_be_touched(operation):
    pool = PageAllocator(4)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(RuntimeError, match="among"):
        getattr(pool, operation)(pages)
    pool.check_integrity()


def test_freed_pages_are_used_again_in_the_same_order():
    pool = PageAllocator(10)
    pages = pool.allocate(6)
    pool.release(pages[1:4])
    assert pool.allocate(3).tolist() == pages[1:4].tolist()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda pool: pool.ref_counts.__setitem__(3, 1), "free list twice, or free and held"),
        (lambda pool: setattr(pool, "num_free", pool.num_free - 1), "pages were lost"),
        (lambda pool: setattr(pool, "num_evictable", 7), "evictable"),
        (lambda pool: pool.cached_counts.__setitem__(0, 1), "null page"),
        (lambda pool: pool.ref_counts.__setitem__(1, -1), "negative"),
    ],
)
def test_check_integrity_finds(break_it, message):
    pool = PageAllocator(6)
    pool.allocate(1)
    break_it(pool)
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity()


def test_a_page_that_more_requests_hold_than_can_be_counted_is_refused():
    pool = PageAllocator(3)
    pages = pool.allocate(2)
    pool.cache(pages[:1])
    pool.release(pages[:1])
    pool.ref_counts[pages[1]] = 32_767
    with pytest.raises(RuntimeError, match="more than 32,767 requests"):
        pool.retain(pages)
    assert pool.ref_counts[pages].tolist() == [0, 32_767] and pool.num_evictable == 1
    pool.check_integrity()


def test_with_room_grows_by_a_64th():
    array = np.arange(640, dtype=np.int32)
    assert with_room(array, 640, 640) is array
    assert len(with_room(array, 640, 641)) == 650
    assert len(with_room(array, 640, 2000)) == 2000
    assert with_room(array, 600, 641)[:600].tolist() == array[:600].tolist()
