"""The view of the tree, against the prompts that were run and what `explain` says of them."""

import numpy as np
from followed_tree import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from settled import settled
from simulator import LARGE_STATES, Simulator

from megatron_hybrid.cache.prefix_cache import PrefixCache


def grown_cache(pages: int, families: int, seed: int) -> tuple[PrefixCache, list[np.ndarray]]:
    """A cache after prompts of which many begin alike, and these prompts."""
    rng = np.random.default_rng(seed)
    sim = Simulator(settled(PrefixCache(LARGE_STATES, pages)))
    heads = rng.integers(0, 9, (families, 60))
    prompts = []
    for _ in range(25):
        head = heads[rng.integers(families), : rng.integers(1, 60)]
        prompts.append(np.concatenate([head, rng.integers(0, 9, rng.integers(1, 50))]))
        sim.run(prompts[-1].astype(np.int32))
    return sim.cache, prompts


def known_in_view(edges, tokens) -> tuple[int, int]:
    """Leading tokens that the view knows, and the number of the edge with the last of them."""
    number, known = 0, 0
    children = {(edge.parent, edge.first_tokens[0]): edge for edge in edges}
    while known < len(tokens):
        if (edge := children.get((number, tokens[known]))) is None:
            return known, number
        number = edge.number
        for token in edge.first_tokens:
            if known == len(tokens) or token != tokens[known]:
                return known, number
            known += 1
    return known, number


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([40, 120, 1500]),  # small pools evict
    st.integers(1, 3),
    st.integers(0, 1000),
)
def test_a_view_has_the_tokens_and_states_that_explain_tells_of(pages, families, seed):
    cache, prompts = grown_cache(pages, families, seed)
    told = cache.contents.changes(None, num_tokens=1000)
    edges = {edge.number: edge for edge in told.edges}
    assert told.num_edges == len(told.edges) == len(edges)
    assert sum(len(edge.first_tokens) for edge in told.edges) == cache.stats()["known_tokens"]
    assert sum(edge.held_end - edge.start for edge in told.edges) == cache.stats()["cached_tokens"]
    for edge in told.edges:
        assert edge.start == (edges[edge.parent].end if edge.parent else 0)
    all_states = [state for edge in told.edges for state in edge.states]
    for tokens in prompts:
        found = cache.explain(tokens.astype(np.int32))
        assert known_in_view(told.edges, tokens) == (found.known_tokens, found.edge)
        assert cache.contents.edge_number(tokens.astype(np.int32)) == found.edge
        on_path, number = set(), found.edge
        while number:
            on_path.add(number)
            number = edges[number].parent
        states = {(s.position, s.tier, s.uses) for s in all_states if s.edge in on_path}
        assert {state for state in states if state[0] <= found.known_tokens} == {
            (p.position, "pool" if p.is_stored else "evicted", p.uses)
            for p in found.positions
            if p.was_stored or p.is_stored
        }
    stored = [state for state in all_states if state.tier == "pool"]
    assert len(stored) == cache.stats()["checkpoints"]
    assert all(state.num_bytes > 0 for state in stored)


def test_an_edge_keeps_its_number_while_its_end_lives():
    sim = Simulator(settled(PrefixCache(LARGE_STATES, 1500)))
    prompt = np.arange(100, dtype=np.int32)
    sim.run(prompt)
    (edge,) = drawn(sim.cache)
    sim.run(np.concatenate([prompt[:50], prompt[:30]]))  # a fork at 50
    edges = drawn(sim.cache)
    (kept,) = [each for each in edges if each.number == edge.number]
    assert (kept.start, kept.end, len(edges)) == (50, 100, 3)
