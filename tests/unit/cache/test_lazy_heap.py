"""LazyHeap: the least key first, however keys change."""

import numpy as np

from megatron_hybrid.cache.lazy_heap import MAX_STALE, LazyHeap


class Item:
    def __init__(self, key):
        self.key, self.queued = key, None


def drain(queue):
    items = []
    while queue.least() is not None:
        items.append(queue.pop())
    return items


def test_random_changes_against_the_least_of_all():
    random = np.random.default_rng(0)
    queue, inside = LazyHeap(lambda item: item.key), set()
    items = [Item((0, random.random(), 0)) for _ in range(30)]
    for _ in range(4000):
        item, operation = items[random.integers(30)], random.integers(6)
        if operation == 0 and item.key is not None:
            queue.add(item)
            inside.add(item)
        elif operation == 1:
            queue.discard(item)
            inside.discard(item)
        elif operation == 2 and inside:
            inside.remove(queue.pop())
        else:
            before, item.key = item.key, (0, random.random(), 0)
            if operation == 5 and item in inside:
                item.key = None
                inside.remove(item)
                queue.update(item)
            elif item in inside and item.key < before:  # a risen key is noticed by itself
                queue.update(item) if random.random() < 0.5 else queue.refresh(30)
        assert queue.least() == min((each.key for each in inside), default=None)
        assert len(queue) == len(inside)
    queue.clear()
    assert queue.least() is None


class TestLazyHeap:
    def make(self, *keys, max_risen=None):
        queue = LazyHeap(lambda item: item.key, max_risen)
        items = [Item(key and (0, key, 0)) for key in keys]
        for item in items:
            queue.add(item)
        return queue, items

    def test_least_key_first_and_first_come_among_equals(self):
        queue, (a, b, c, d) = self.make(3.0, 1.0, 2.0, 1.0)
        assert drain(queue) == [b, d, c, a]

    def test_refresh_covers_all_items_a_part_at_a_time(self):
        queue, items = self.make(*map(float, range(1, 8)))
        looked_at = []
        queue.key = lambda item: looked_at.append(items.index(item)) or item.key
        for _ in range(5):
            queue.refresh(3)
        assert looked_at == [*range(7), *range(7), 0]
        queue.refresh(99)
        assert sorted(looked_at[15:]) == [*range(7)]

    def test_entries_that_are_not_valid_any_more_do_not_pile_up(self):
        queue, items = self.make(*map(float, range(1, 21)))
        most = 0
        for fall in range(1, 200):
            for item in items[10:]:
                item.key = (0, 100.0 - fall / 10 + items.index(item), 0)
                queue.refresh(1)
                most = max(most, len(queue._heap))
        assert most <= 2 * 20 + MAX_STALE + 1
        queue.refresh(20)
        assert drain(queue) == items

    def test_after_many_keys_rose_at_once_the_former_least_is_evicted(self):
        """Nobody waits until all of them were looked at; and its key is what it has become."""
        queue, items = self.make(*map(float, range(1, 1001)), max_risen=64)
        looked_at = []
        queue.key = lambda item: looked_at.append(item) or item.key
        for item in items:
            item.key = (0, item.key[1] + 5000, 0)
        assert queue.least() == (0, 5065, 0)
        assert len(looked_at) == 65
        assert queue.pop() is items[64]
        queue.refresh(1000)
        assert drain(queue) == items[:64] + items[65:]
