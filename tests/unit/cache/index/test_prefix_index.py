"""PrefixIndex: what is found, what an edge holds after splits and joins, what stays known."""

import numpy as np
import pytest
from small_index import SmallIndex, counting

from megatron_hybrid.cache.index import prefix_index
from megatron_hybrid.cache.index.prefix_index import MAX_WATCHED
from megatron_hybrid.cache.index.tree import Edge, Kind

B = 16


@pytest.fixture(autouse=True)
def tokens_alone_count(monkeypatch):
    """So that limits can be given in tokens."""
    monkeypatch.setattr(prefix_index, "SEQUENCE_TOKENS", 0)


class Tree(SmallIndex):
    """It is checked after each change."""

    def __init__(self, *sizes, **named):
        super().__init__(*sizes, **named)
        self.tails = []
        self.index.on_tail = self.tails.append

    def add(self, tokens, salt=""):
        pages = super().add(tokens, salt)
        self.check()
        return pages

    def touch(self, tokens):
        self.index.touch(self.walk(tokens))
        self.check()

    def drop(self, tokens, new_end):
        self.index.drop_kv(self.leaf(tokens), new_end)
        self.check()

    def save(self, tokens):
        checkpoint = self.watch(tokens)
        pages = self.pool.allocate(1)
        self.index.store(checkpoint, pages, [])
        self.pool.release(pages)
        self.check()
        return checkpoint

    def check(self):
        self.pool.check_integrity()
        self.index.check_integrity()
        assert np.array_equal(self.index.num_holders(), self.pool.cached_counts)
        prefixes = {prefix for edge in self.index.edges() for prefix in prefixes_on(edge)}
        assert len(prefixes) == self.index.num_tokens, "a prefix is on two edges"

    def spans(self):
        return sorted((edge.start, edge.end) for edge in self.index.edges())

    def held(self):
        """(start, held_end, end) of every edge."""
        return sorted((edge.start, edge.held_end, edge.end) for edge in self.index.edges())


def tokens_to(edge):
    """All tokens from the root to an edge's end, with the root (salts are trees of their own)."""
    tokens = []
    while edge.parent is not None:
        tokens = edge.tokens.tolist() + tokens
        edge = edge.parent
    return id(edge), tuple(tokens)


def prefixes_on(edge):
    root, tokens = tokens_to(edge)
    return [(root, tokens[:n]) for n in range(edge.start + 1, edge.end + 1)]


LEFT, RIGHT = counting(40), [*counting(20), *counting(30, 500)]
"""They part at 20, inside block 1."""


@pytest.fixture
def tree():
    return Tree()


def forked():
    tree = Tree()
    tree.add(LEFT)
    tree.add(RIGHT)
    return tree


# ---- walking and growing ----


def test_a_root_keeps_no_prompt_in_memory(tree):
    tree.add(counting(40))
    root = tree.walk(counting(40)).root
    assert not root.tokens.base.size and not root.pages(B).base.size  # no views of what was given


def test_edges_used_apart_stay_apart_and_used_together_are_joined(tree):
    """An edge is one unit of recency: a hot head does not keep a cold tail alive."""
    tree.add(counting(60))
    tree.touch(counting(24))
    assert tree.spans() == [(0, 24), (24, 60)]
    assert {e.end: e.last_access for e in tree.index.edges()} == {24: 2, 60: 1}
    tree.touch(counting(60))
    assert tree.spans() == [(0, 60)]


@pytest.mark.parametrize("kept", [0, 100, 1000, None])
@pytest.mark.parametrize("columns", [0, 1, 2])
def test_any_number_of_edges_is_joined_at_once(kept, columns):
    """Cut into 80, of one token to several blocks, with KV up to any of them."""
    ends = np.cumsum(np.random.default_rng(0).integers(1, 40, size=80)).tolist()
    tree, whole = Tree(pages_per_block=columns), counting(ends[-1])
    pages = tree.add(whole)
    states = [] if kept is not None or not columns else [tree.save(whole[:n]) for n in ends[::9]]
    for end in ends[::-1]:
        tree.index.touch(tree.walk(whole[:end]))
    assert tree.spans() == list(zip([0, *ends], ends))
    for end in [end for end in ends[::-1] if columns and kept is not None and end > kept]:
        tree.index.drop_kv(tree.leaf(whole[:end]), kept)
    held = min(ends[-1], kept) if columns and kept is not None else ends[-1]
    tree.touch(whole)
    assert tree.held() == [(0, held, ends[-1])]
    (edge,) = tree.index.edges()
    assert edge.stored == [state.position for state in states]
    assert all(state.edge is edge for state in states)
    rows = pages[: -(-held // B)]
    assert np.array_equal(edge.pages(B), rows)
    assert tree.pool.cached_counts.sum() == rows.size + len(states)


def test_a_fork_is_where_prompts_part(tree):
    tree.add(LEFT)
    here, further = tree.watch(counting(20)), tree.watch(LEFT)
    assert not here.is_fork()
    tree.touch(counting(20))  # an edge of its own, with one child
    assert not here.is_fork()
    tree.add(RIGHT)
    assert here.is_fork()
    assert not further.is_fork()
    assert not tree.watch(counting(10)).is_fork()


# ---- states ----


def test_watching_a_position_again_finds_its_record(tree):
    tree.add(counting(40))
    first = tree.watch(counting(30), Kind.INTERVAL, now=7)
    assert (first.kind, first.born, first.last_use) == (Kind.INTERVAL, 7, 7)
    assert tree.watch(counting(30), Kind.TAIL, now=9) is first
    assert (first.kind, first.born) == (Kind.INTERVAL, 7)
    assert tree.index.num_checkpoints == 0


def test_an_edge_keeps_a_bounded_number_of_ghost_entries(tree):
    tree.add(counting(200))
    stored = tree.save(counting(1))
    watched = [tree.watch(counting(p), now=1) for p in range(2, MAX_WATCHED + 2)]
    watched[0].last_use = watched[2].last_use = 5
    (edge,) = tree.index.edges()
    assert len(edge.checkpoints) == MAX_WATCHED + 1  # stored ones do not count
    for new, gone in ((150, 3), (151, 5), (152, 6)):
        tree.watch(counting(new), now=9)
        assert watched[gone - 2].edge is None
        assert gone not in edge.checkpoints
        assert len(edge.checkpoints) == MAX_WATCHED + 1
    assert edge.checkpoints[1] is stored
    assert {2, 4} < set(edge.checkpoints)
    tree.check()


def test_on_an_edge_of_many_states_positions_without_one_are_forgotten_many_at_once():
    """Dropping states one by one must not look at all of the others each time."""
    tree, num_states = Tree(), 10 * MAX_WATCHED
    tree.add(counting(num_states))
    points = [tree.save(counting(p)) for p in range(1, num_states + 1)]
    (edge,) = tree.index.edges()
    looks, most = 0, 0
    for point in points:
        before = len(edge.checkpoints)
        tree.index.drop_checkpoint(point)
        looks += before if len(edge.checkpoints) < before else 0
        most = max(most, len(edge.checkpoints) - len(edge.stored))
    assert looks < 70 * num_states  # one by one it is half of num_states squared
    assert most <= MAX_WATCHED + num_states // 64
    tree.check()


# ---- forgetting ----


def test_a_sequence_counts_as_more_than_its_tokens(monkeypatch):
    """What is watched on its way, and the tree itself, take memory too."""
    monkeypatch.setattr(prefix_index, "SEQUENCE_TOKENS", 100)
    tree = Tree()
    for start in (0, 100, 200):
        tree.add(counting(20, start))
    tree.index.forget(0)
    assert tree.index.num_tokens == 60  # what is held is bounded by the pool
    for start in (0, 100, 200):
        tree.drop(counting(20, start), 0)
    tree.index.forget(3 * 120)
    assert tree.index.num_tokens == 60
    tree.index.forget(3 * 120 - 1)
    assert tree.index.num_tokens == 40
    tree.index.forget(120)
    assert [tree.walk(counting(20, start)).known for start in (0, 100, 200)] == [0, 0, 20]
    tree.check()


def test_the_least_recently_used_tokens_are_forgotten_first_as_needed(tree):
    for salt in "abcd":
        tree.add(counting(30), salt)
    for salt in "cabd":
        tree.index.drop_kv(tree.walk(counting(30), salt).edges[0], 10)
    tree.check()
    tree.index.forget(120)
    assert tree.index.num_tokens == 120
    for limit, known in (
        (119, {"c": 10, "a": 30, "b": 30, "d": 30}),
        (100, {"c": 10, "a": 30, "b": 30, "d": 30}),
        (99, {"c": 10, "a": 10, "b": 30, "d": 30}),
        (0, {"c": 10, "a": 10, "b": 10, "d": 10}),
    ):
        tree.index.forget(limit)
        tree.check()
        assert {salt: tree.walk(counting(30), salt).known for salt in known} == known
        assert tree.index.num_held_tokens == 40


def test_use_of_known_tokens_defers_their_end(tree):
    for salt in "ab":
        tree.add(counting(30), salt)
    for salt in "ab":
        tree.index.drop_kv(tree.walk(counting(30), salt).edges[0], 0)
    tree.index.touch(tree.walk(counting(30), "a"))
    tree.index.forget(59)
    tree.check()
    assert [tree.walk(counting(30), salt).known for salt in "ab"] == [30, 0]


def test_forgetting_goes_up_the_tree():
    """A parent without KV may go as soon as its last child went, and its records with it."""
    tree = forked()
    points = [tree.watch(tokens) for tokens in (counting(20), LEFT, RIGHT)]
    for tokens in (LEFT, RIGHT, counting(20)):
        tree.drop(tokens, 0)
    tree.index.forget(70 - 1)
    tree.check()
    assert tree.walk(LEFT).known == 20
    assert [point.edge is None for point in points] == [False, True, False]
    tree.index.forget(1)
    tree.check()
    assert tree.spans() == []
    assert tree.index.num_tokens == 0
    assert all(point.edge is None for point in points)


def test_salts_without_content_are_forgotten(tree):
    tokens, page = np.array([1, 2, 3], dtype=np.int32), tree.pool.allocate(1).reshape(1, 1)
    for salt in range(1000):
        tree.index.insert(str(salt), tokens, page)
        if salt >= 300:
            tree.index.drop_kv(tree.index.walk(str(salt), tokens).edges[0], 0)
            tree.index.forget(900)
    roots = [tree.index.walk(str(salt), tokens).root for salt in range(1000)]
    assert len(roots) - roots.count(None) == 300
    assert all(tree.index.walk(str(salt), tokens).depth == 3 for salt in range(300))
    tree.check()


# ---- tails ----


def test_a_split_announces_the_tail_that_it_makes(tree):
    """The rest of a checkpoint's block is no tail, until the edge is cut at the checkpoint."""
    tree.add(counting(20))
    tree.save(counting(18))
    tree.tails.clear()
    tree.touch(counting(18))
    assert (18, 20) in [(edge.start, edge.end) for edge in tree.tails]


# ---- the whole ----


def test_clear_gives_everything_back():
    tree = forked()
    point = tree.save(counting(20))
    tree.drop(LEFT, 0)
    (leaf,) = [edge for edge in tree.index.edges() if edge.end == 50]
    tree.index.clear()
    tree.check()
    assert tree.pool.num_free == 999
    assert tree.walk(LEFT).known == 0
    assert (point.edge, point.pages, leaf.parent) == (None, None, None)
    assert (tree.index.num_tokens, tree.index.num_held_tokens, tree.index.num_checkpoints) == (
        (0,) * 3
    )
    tree.index.forget(0)
    tree.add(LEFT)


def test_depth_of_the_tree_costs_no_recursion():
    """3,000 edges below one another, each with a branch, then gone from the bottom up."""
    tree = Tree(num_pages=20_000)
    tokens = np.zeros(3000, dtype=np.int32)
    pages = tree.pool.allocate(188).reshape(188, 1)
    for n in reversed(range(1, 3000)):
        branch = np.append(tokens[:n], np.int32(1))
        tree.index.insert("", branch, pages[: -(-(n + 1) // B)])
    path = tree.walk(tokens)
    assert (path.depth, len(path.edges)) == (2999, 2999)
    assert path.deepest_checkpoint() is None
    tree.index.check_integrity()
    for edge in reversed(list(tree.index.edges())):  # parents come first
        if edge.is_held_leaf():
            tree.index.drop_kv(edge, edge.start)
    while edges := [edge for edge in tree.index.edges() if edge.is_held_leaf()]:
        for edge in edges:
            while edge.parent is not None and edge.is_held_leaf():
                edge, leaf = edge.parent, edge
                tree.index.drop_kv(leaf, leaf.start)
    tree.index.check_integrity()
    assert (tree.index.num_held_tokens, tree.index.num_tokens) == (0, 2999 + 2999)
    assert not tree.pool.cached_counts.any()
    tree.index.forget(0)
    assert tree.index.num_tokens == 0


@pytest.mark.parametrize("end", [10, 16, 40])
def test_a_path_found_before_tokens_were_forgotten_is_not_trusted(tree, end):
    """Others may have followed in their place, on the same edge."""
    tree.add(counting(40))
    before = tree.walk(counting(40))
    tree.drop(counting(40), end - 8)
    tree.index.forget(0)
    tree.add([*counting(end - 8), *counting(60, 500)])
    assert tree.spans() == [(0, end + 52)]
    assert tree.index.held_edge(before, 40) is None
    path = tree.index.walk("", np.arange(40, dtype=np.int32), before)
    assert (path.known, path.depth) == (end - 8, end - 8)


def edge_with(tree, end):
    (edge,) = [edge for edge in tree.index.edges() if edge.end == end]
    return edge


def add_empty_edge(tree):
    edge = edge_with(tree, 40)
    tokens, pages = np.zeros(0, np.int32), np.zeros((0, 1), np.int32)
    empty = Edge(edge, 40, tokens, pages)
    empty.first_block = 2
    edge.children[7] = empty


def refile(tree):
    edge = edge_with(tree, 40)
    del edge.parent.children[20]
    edge.parent.children[9] = edge


def unlink_sibling(tree):
    edge = edge_with(tree, 20)
    del edge.children[20]


def shift(tree):
    edge = edge_with(tree, 40)
    edge.start, edge.held_end, edge.end = 21, 40, 41


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (add_empty_edge, "is empty"),
        (lambda tree: setattr(edge_with(tree, 40), "end", 43), "wrong number of tokens"),
        (lambda tree: setattr(edge_with(tree, 40), "held_end", 41), "KV beyond its ends"),
        (lambda tree: setattr(edge_with(tree, 40), "held_end", 32), "state beyond its KV"),
        (lambda tree: setattr(edge_with(tree, 40), "first_block", 0), "wrong number of pages"),
        (shift, "does not start at its parent's end"),
        (lambda tree: setattr(edge_with(tree, 20), "held_end", 16), "KV that its parent lacks"),
        (refile, "another token"),
        (unlink_sibling, "one with its only child"),
        (lambda tree: setattr(edge_with(tree, 40).checkpoints[40], "position", 39),
         "checkpoint that lies elsewhere"),
        (lambda tree: edge_with(tree, 40).stored.clear(), "lists other states"),
        (lambda tree: setattr(edge_with(tree, 20), "num_stored", 2), "miscounts the states"),
        (lambda tree: setattr(edge_with(tree, 20), "num_held_children", 1), "miscounts its child"),
        (lambda tree: tree.index._forgettable.clear(), "may be forgotten"),
        (lambda tree: setattr(edge_with(tree, 50), "end", 30), "may be forgotten, or not"),
        (lambda tree: setattr(tree.index, "num_tokens", 1), "counted 1"),
        (lambda tree: setattr(tree.index, "num_held_tokens", 1), "counted 70, 1"),
        (lambda tree: setattr(tree.index, "num_checkpoints", 9), "and 9"),
    ],
)  # fmt: skip
def test_check_integrity_finds(break_it, message):
    tree = forked()
    tree.save(LEFT)
    tree.drop(RIGHT, 30)
    break_it(tree)
    with pytest.raises(RuntimeError, match=message):
        tree.index.check_integrity()


def test_tokens_known_behind_others_are_those_of_the_edge_used_last(tree):
    base = list(range(20))
    tree.add([*base, 50, 51, 52])
    tree.add([*base, 60, 61])

    def known_after(tokens, most, salt=""):
        return tree.index.known_after(salt, np.array(tokens, np.int32), most).tolist()

    assert known_after(base[:18], 2) == [18, 19]
    assert known_after(base[:18], 9) == [18, 19, 60, 61]
    assert known_after([*base, 50], 9) == [51, 52]
    tree.add([*base, 50, 51, 52, 53])
    assert known_after(base, 3) == [50, 51, 52]
    assert known_after([*base, 50, 51, 52, 53], 3) == []
    assert known_after([*base, 70], 3) == known_after(base, 3, "other") == []
