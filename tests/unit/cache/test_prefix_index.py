"""PrefixIndex: what is found, what an edge holds after splits and joins, what is remembered."""

import numpy as np
import pytest

from megatron_hybrid.cache.page_allocator import PageAllocator
from megatron_hybrid.cache.prefix_index import MAX_EMPTY_ROOTS, PrefixIndex, with_room
from megatron_hybrid.cache.tree import MAX_TRACES, Checkpoint, common_prefix, remember

B = 16


class Tree:
    """An index with a pool; `add` brings own pages for every block, as a request would."""

    def __init__(self, num_pages=1000, pages_per_block=1):
        self.pool = PageAllocator(num_pages)
        self.tails = []
        self.index = PrefixIndex(B, pages_per_block, self.pool, self.tails.append)
        self.columns = pages_per_block
        self.tick = 0

    def add(self, tokens, salt=""):
        tokens = np.asarray(tokens, dtype=np.int32)
        blocks = -(-len(tokens) // B)
        pages = self.pool.allocate(blocks * self.columns).reshape(blocks, self.columns)
        self.tick += 1
        self.index.insert(salt, tokens, pages, self.tick)
        self.pool.release(pages)
        self.check()
        return pages

    def walk(self, tokens, salt=""):
        return self.index.walk(salt, np.asarray(tokens, dtype=np.int32))

    def save(self, tokens):
        path = self.walk(tokens)
        assert path.depth == len(tokens)
        pages = self.pool.allocate(1)
        checkpoint = Checkpoint(len(tokens), pages, [])
        self.index.add_checkpoint(path.edges[-1], checkpoint)
        self.pool.release(pages)
        self.check()
        return checkpoint

    def check(self):
        self.pool.check_integrity()
        assert np.array_equal(self.index.check_integrity(), self.pool.cached_counts)

    def spans(self):
        return sorted((edge.start, edge.end) for edge in self.index.edges())


def counting(n, start=0):
    return list(range(start, start + n))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1], [1], 1),
        ([1], [2], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 5, 3], 1),
    ],
)
def test_common_prefix(a, b, expected):
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("asked", [1, 8, 16, 40, 120])
def test_walk_matches_to_the_token(length, asked):
    tree = Tree()
    pages = tree.add(counting(length))
    path = tree.walk(counting(asked))
    assert path.depth == min(length, asked)
    blocks = -(-path.depth // B)
    assert np.array_equal(path.pages(blocks), pages[:blocks])


def test_walk_of_an_empty_tree_or_another_salt_finds_nothing():
    tree = Tree()
    assert tree.walk([1, 2]).depth == 0
    tree.add([1, 2], "a")
    assert tree.walk([1, 2]).depth == 0
    assert tree.walk([1, 2], "a").depth == 2
    assert tree.walk([2, 2], "a").depth == 0


def test_a_split_inside_a_block_leaves_its_page_with_both_edges():
    tree = Tree()
    first = tree.add(counting(40))
    second = tree.add([*counting(20), *counting(30, 500)])
    assert tree.spans() == [(0, 20), (20, 40), (20, 50)]
    # block 1 of the first: held by the edge above the split and by the one below
    assert tree.pool.cached_counts[first.ravel()].tolist() == [1, 2, 1]
    # the second's first block was there already; its own is given back
    assert tree.pool.cached_counts[second.ravel()].tolist() == [0, 1, 1, 1]
    assert tree.walk(counting(40)).pages(3).ravel().tolist() == first.ravel().tolist()
    path = tree.walk([*counting(20), *counting(30, 500)])
    assert path.pages(4).ravel().tolist() == [first[0, 0], *second[1:, 0]]
    # of the shared part alone, the rows of block 1 that count are in the upper edge's page
    assert tree.walk(counting(20)).pages(2).ravel().tolist() == first[:2].ravel().tolist()


def test_a_leaf_grows_and_a_partial_block_takes_the_longer_page():
    tree = Tree()
    first = tree.add(counting(20))
    second = tree.add(counting(50))
    assert tree.spans() == [(0, 50)]
    assert tree.walk(counting(50)).pages(4).ravel().tolist() == [first[0, 0], *second[1:, 0]]
    assert tree.pool.cached_counts[first.ravel()].tolist() == [1, 0]
    assert tree.pool.ref_counts.sum() == 0


def test_the_owner_grows_its_leaf_in_place():
    tree = Tree()
    pages = tree.pool.allocate(4).reshape(4, 1)
    for n in range(1, 60):
        tree.index.insert("", np.arange(n, dtype=np.int32), pages[: -(-n // B)], n)
        tree.check()
    assert tree.spans() == [(0, 59)]
    assert tree.pool.cached_counts[pages.ravel()].tolist() == [1, 1, 1, 1]


def test_a_prefix_of_what_is_there_takes_no_pages():
    tree = Tree()
    tree.add(counting(40))
    free = tree.pool.num_free
    tree.add(counting(25))
    assert tree.pool.num_free == free
    assert tree.spans() == [(0, 40)]


def test_checkpoints_go_with_their_side_of_a_split_and_a_join():
    tree = Tree()
    tree.add(counting(60))
    points = {n: tree.save(counting(n)) for n in (10, 30, 31, 60)}
    tree.add([*counting(30), 999])
    assert tree.walk(counting(60)).deepest_checkpoint() is points[60]
    assert tree.walk(counting(59)).deepest_checkpoint() is points[31]
    assert tree.walk([*counting(30), 999]).deepest_checkpoint() is points[30]
    assert tree.walk(counting(29)).deepest_checkpoint() is points[10]
    assert tree.walk(counting(9)).deepest_checkpoint() is None
    tree.index.touch(tree.walk(counting(60)), 100, 0.0)
    leaf = tree.walk([*counting(30), 999]).edges[-1]
    tree.index.drop_tail(leaf, 30)
    tree.check()
    assert tree.spans() == [(0, 60)]
    assert [p for e in tree.index.edges() for p in sorted(e.checkpoints)] == [10, 30, 31, 60]


def test_edges_used_apart_stay_apart_and_used_together_are_joined():
    """An edge is one unit of recency: a hot head does not keep a cold tail alive."""
    tree = Tree()
    tree.add(counting(60))
    tree.index.touch(tree.walk(counting(24)), 50, 0.0)
    tree.check()
    assert tree.spans() == [(0, 24), (24, 60)]
    assert {e.end: e.last_access for e in tree.index.edges()} == {24: 50, 60: 1}
    tree.index.touch(tree.walk(counting(60)), 60, 0.0)
    tree.check()
    assert tree.spans() == [(0, 60)]


@pytest.mark.parametrize(
    ("new_end", "spans", "free_blocks"),
    [(64, [(0, 64)], 1), (40, [(0, 40)], 2), (48, [(0, 48)], 2), (16, [(0, 16)], 4), (0, [], 5)],
)
def test_drop_tail(new_end, spans, free_blocks):
    tree = Tree()
    tree.add(counting(70))
    free = tree.pool.num_free
    (leaf,) = tree.index.edges()
    tree.index.drop_tail(leaf, new_end)
    tree.check()
    assert tree.spans() == spans
    assert tree.pool.num_free - free == free_blocks
    path = tree.walk(counting(70))
    assert path.depth == new_end
    assert path.tail_was_evicted(np.arange(70, dtype=np.int32))
    assert not path.tail_was_evicted(np.arange(new_end, dtype=np.int32))
    other = np.array([*range(new_end), 7777], dtype=np.int32)
    assert not path.tail_was_evicted(other)


def test_a_dropped_child_is_remembered_by_its_parent():
    tree = Tree()
    tree.add(counting(40))
    tree.add([*counting(20), *counting(20, 500)])
    leaf = tree.walk([*counting(20), *counting(20, 500)]).edges[-1]
    tree.index.drop_tail(leaf, 0)
    tree.check()
    tokens = np.array([*range(20), *range(500, 520)], dtype=np.int32)
    assert tree.walk(tokens).depth == 20
    assert tree.walk(tokens).tail_was_evicted(tokens)
    tree.add(tokens)
    assert tree.walk(tokens).depth == 40


@pytest.mark.parametrize("split", [30, 48, 50])
def test_a_trace_goes_with_its_side_of_a_split(split):
    tree = Tree()
    tokens = np.arange(70, dtype=np.int32)
    tree.add(tokens)
    (leaf,) = tree.index.edges()
    tree.index.drop_tail(leaf, 48)
    other = [*range(48), *counting(20, 500)]
    tree.add(other)
    tree.add([*other[:split], 9999])
    assert len(tree.spans()) == 3
    assert tree.walk(tokens).depth == 48
    assert tree.walk(tokens).tail_was_evicted(tokens)


def test_a_dropped_checkpoint_leaves_its_position():
    tree = Tree()
    tree.add(counting(40))
    checkpoint = tree.save(counting(30))
    tree.index.drop_checkpoint(checkpoint)
    tree.check()
    path = tree.walk(counting(40))
    assert path.state_was_evicted(above=0)
    assert path.state_was_evicted(above=29)
    assert not path.state_was_evicted(above=30)
    assert not tree.walk(counting(29)).state_was_evicted(above=0)
    tree.save(counting(30))
    assert not tree.walk(counting(40)).state_was_evicted(above=0)


def test_traces_are_bounded():
    traces = {}
    for key in range(100):
        remember(traces, key)
    assert list(traces) == list(range(100 - MAX_TRACES, 100))


def test_salts_without_content_are_forgotten_in_the_end():
    tree = Tree()
    tokens, page = np.array([1, 2, 3], dtype=np.int32), tree.pool.allocate(1).reshape(1, 1)
    for salt in range(10 * MAX_EMPTY_ROOTS):
        tree.index.insert(str(salt), tokens, page, tick=1)
        if salt >= 300:
            tree.index.drop_tail(tree.index.walk(str(salt), tokens).edges[0], 0)
    assert len(tree.index._roots) <= 2 * (300 + 2 * MAX_EMPTY_ROOTS)
    assert all(tree.index.walk(str(salt), tokens).depth == 3 for salt in range(300))
    assert tree.index.walk(str(salt), tokens).tail_was_evicted(tokens)
    tree.check()


def test_tails_are_announced_when_they_become_one():
    tree = Tree()
    tree.add(counting(40))
    upper_and_lower = [*counting(20), *counting(20, 500)]
    tree.add(upper_and_lower)
    tree.tails.clear()
    for end in (counting(40), upper_and_lower):
        tree.index.drop_tail(tree.walk(end).edges[-1], 0)
    assert any(edge.end == 20 and not edge.children for edge in tree.tails)


def test_a_split_announces_the_tail_that_it_makes():
    """The rest of a checkpoint's block is no tail, until the edge is cut at the checkpoint."""
    tree = Tree()
    tree.add(counting(20))
    tree.save(counting(18))
    tree.tails.clear()
    tree.index.touch(tree.walk(counting(18)), tick=9, clock=0.0)
    assert [(edge.start, edge.end) for edge in tree.tails] == [(18, 20)]
    tree.check()


def test_misuse_is_refused():
    tree = Tree()
    tree.add(counting(40))
    tree.add([*counting(20), 7])
    with pytest.raises(RuntimeError, match="children"):
        tree.index.drop_tail(tree.walk(counting(20)).edges[0], 0)
    tree.save(counting(20))
    with pytest.raises(RuntimeError, match="already"):
        tree.save(counting(20))


def test_clear_gives_everything_back():
    tree = Tree()
    tree.add(counting(40))
    tree.add([*counting(20), 7])
    tree.save(counting(20))
    tree.index.clear()
    tree.check()
    assert tree.pool.num_free == 999
    assert tree.walk(counting(40)).depth == 0
    assert (tree.index.num_tokens, tree.index.num_checkpoints) == (0, 0)


def test_depth_of_the_tree_costs_no_recursion():
    """3,000 edges below one another, each with a branch, then gone from the bottom up."""
    tree = Tree(num_pages=20_000)
    tokens = np.zeros(3000, dtype=np.int32)
    pages = tree.pool.allocate(188).reshape(188, 1)
    for n in reversed(range(1, 3000)):
        branch = np.append(tokens[:n], np.int32(1))
        tree.index.insert("", branch, pages[: -(-(n + 1) // B)], 3000 - n)
    path = tree.walk(tokens)
    assert (path.depth, len(path.edges)) == (2999, 2999)
    assert path.deepest_checkpoint() is None
    tree.check()
    for leaf in [edge for edge in tree.index.edges() if not edge.children]:
        tree.index.drop_tail(leaf, leaf.start)
    while edges := list(tree.index.edges()):
        edge = edges[-1]
        while edge.parent is not None:
            edge, leaf = edge.parent, edge
            tree.index.drop_tail(leaf, leaf.start)
    tree.check()
    assert tree.index.num_tokens == 0


def test_with_room_doubles():
    array = np.arange(6, dtype=np.int32)
    assert with_room(array, 6, 6) is array
    assert len(with_room(array, 6, 7)) == 12
    assert len(with_room(array, 6, 100)) == 100
    assert with_room(array, 6, 7)[:6].tolist() == array.tolist()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda edge: setattr(edge, "end", edge.end + 3), "wrong number of tokens"),
        (lambda edge: setattr(edge, "first_block", 1), "wrong"),
        (lambda edge: setattr(edge, "_pages", edge._pages[:1]), "wrong number of pages"),
        (lambda edge: edge.checkpoints[30].__class__.position.__set__(
            edge.checkpoints[30], 99), "checkpoint that lies elsewhere"),
        (lambda edge: edge.parent.children.clear() or edge.parent.children.update({9: edge}),
         "another token"),
    ],
)  # fmt: skip
def test_check_integrity_finds(break_it, message):
    tree = Tree()
    tree.add(counting(40))
    tree.save(counting(30))
    (edge,) = tree.index.edges()
    break_it(edge)
    with pytest.raises(RuntimeError, match=message):
        tree.index.check_integrity()
