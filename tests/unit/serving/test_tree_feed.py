"""TreeFeed: who applies the changes has the same tree as who asks for the whole."""

from types import SimpleNamespace

import numpy as np
import pytest
from followed_tree import drawn
from simulator import SPECS, Simulator

from megatron_hybrid.cache import prefix_cache
from megatron_hybrid.cache.index import journal
from megatron_hybrid.cache.index.prefix_index import SEQUENCE_TOKENS
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.serving import tree_feed
from megatron_hybrid.serving.tree_feed import TreeFeed


class Client:
    """As the page does it."""

    def __init__(self):
        self.version, self.edges, self.num_whole = None, {}, 0

    def take(self, columns: dict) -> None:
        if columns["since"] is None:
            self.edges.clear()
            self.num_whole += 1
        else:
            assert columns["since"] == self.version
        self.version = columns["version"]
        for number in columns["removed"]:
            self.edges.pop(number, None)
        names = ("parents", "starts", "ends", "held_ends", "last_uses", "texts")
        rows = zip(columns["numbers"], *(columns[name] for name in names))
        states = {number: [] for number in columns["numbers"]}
        for state in columns["states"]:
            states[state.edge].append(state)
        self.edges.update((number, (*row, states[number])) for number, *row in rows)
        assert all(row[0] in self.edges or not row[0] for row in self.edges.values())


def prompt_of(random: np.random.Generator) -> list[int]:
    """One that parts from others somewhere."""
    kind, size = int(random.integers(6)), int(random.integers(10, 80))
    return [kind] * (size // 2) + [int(random.integers(2)) for _ in range(size // 2)]


async def follow(most_edges: int, monkeypatch) -> list[Client]:
    """Clients that ask a feed at random moments of random traffic."""
    monkeypatch.setattr(tree_feed, "MAX_EDGES", most_edges)
    monkeypatch.setattr(tree_feed, "_SLICE", 16)
    monkeypatch.setattr(journal, "MAX_REMOVED", 40)
    random = np.random.default_rng(7)
    monkeypatch.setattr(prefix_cache, "known_limit", lambda *pool: 40 * SEQUENCE_TOKENS)
    cache = PrefixCache(SPECS["hybrid"], 60)
    clients, simulator = [Client() for _ in range(3)], Simulator(cache)

    async def changes(since, limit, num_tokens):
        return cache.contents.changes(since, limit, num_tokens=num_tokens)

    engine = SimpleNamespace(cache_changes=changes)
    feed = TreeFeed(engine, lambda *tokens: "".join(map(str, tokens)), num_tokens=3)
    for turn in range(80):
        simulator.run(prompt_of(random))
        if turn % 9 == 0:
            cache.evict(int(random.integers(30)))
        if turn in (30, 55):
            cache.clear()
        whole = Client()
        whole.take(await feed.columns("no version of ours"))
        expected = drawn(cache)
        assert len(whole.edges) == min(most_edges, len(expected))
        uses = [row[4] for row in whole.edges.values()]
        assert (
            sorted(uses) == sorted(edge.last_use for edge in expected)[-len(uses) :]
        )  # those used last
        if len(expected) <= most_edges:
            assert whole.edges.keys() == {edge.number for edge in expected}
            states = [state for row in whole.edges.values() for state in row[-1]]
            assert sorted(states) == sorted(s for edge in expected for s in edge.states)
        for client in (c for c in clients if random.random() < 0.3):
            client.take(await feed.columns(client.version))
            assert client.edges == whole.edges
    return clients


@pytest.mark.parametrize("most_edges", [12, 10_000])
async def test_who_applies_the_changes_has_the_same_tree_as_who_asks_for_the_whole(
    most_edges, monkeypatch
):
    for client in await follow(most_edges, monkeypatch):
        assert 3 <= client.num_whole < 8  # at first, and after each time that all was forgotten
