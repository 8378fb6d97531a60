"""The view of the tree, against the prompts that were run and what `explain` says of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from settled import settled
from simulator import Simulator

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.cache.prefix_cache import PrefixCache

SPEC = CacheSpec(16, (KVGroup(2, 64),), state_bytes=20_000, hidden_bytes=128)


def grown_cache(pages: int, families: int, seed: int) -> tuple[PrefixCache, list[np.ndarray]]:
    """A cache after prompts of which many begin alike, and these prompts."""
    rng = np.random.default_rng(seed)
    sim, heads = Simulator(settled(PrefixCache(SPEC, pages))), rng.integers(0, 9, (families, 60))
    prompts = []
    for _ in range(25):
        head = heads[rng.integers(families), : rng.integers(1, 60)]
        prompts.append(np.concatenate([head, rng.integers(0, 9, rng.integers(1, 50))]))
        sim.run(prompts[-1].astype(np.int32))
    return sim.cache, prompts


def known_in_view(view, tokens) -> tuple[int, int]:
    """Leading tokens that the view knows, and the number of the edge with the last of them."""
    number, known, index = 0, 0, dict(zip(view.numbers, range(len(view.numbers))))
    children: dict[int, list[int]] = {}
    for child, parent in zip(view.numbers, view.parents):
        children.setdefault(parent, []).append(child)
    while known < len(tokens):
        for child in children.get(number, ()):
            edge = view.first_tokens[index[child]]
            if edge[0] == tokens[known]:
                break
        else:
            return known, number
        number = child
        for token in edge:
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
    view = cache.contents.view(num_tokens=1000)
    assert view.num_edges == len(view.numbers) == len(set(view.numbers))
    assert sum(map(len, view.first_tokens)) == cache.stats()["known_tokens"]
    held = sum(held - start for start, held in zip(view.starts, view.held_ends))
    assert held == cache.stats()["cached_tokens"]
    starts = dict(zip(view.numbers, view.starts))
    ends = dict(zip(view.numbers, view.ends))
    parents = dict(zip(view.numbers, view.parents))
    for number, parent in parents.items():
        assert starts[number] == (ends[parent] if parent else 0)
    for tokens in prompts:
        told = cache.explain(tokens.astype(np.int32))
        assert known_in_view(view, tokens) == (told.known_tokens, told.edge)
        assert cache.contents.edge_number(tokens.astype(np.int32)) == told.edge
        on_path, number = set(), told.edge
        while number:
            on_path.add(number)
            number = parents[number]
        states = {(s.position, s.tier, s.uses) for s in view.states if s.edge in on_path}
        assert {state for state in states if state[0] <= told.known_tokens} == {
            (p.position, "pool" if p.is_stored else "evicted", p.uses)
            for p in told.positions
            if p.was_stored or p.is_stored
        }
    stored = [state for state in view.states if state.tier == "pool"]
    assert len(stored) == cache.stats()["checkpoints"]
    assert all(state.num_bytes > 0 for state in stored)


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_of_many_edges_those_used_last_are_told_with_all_before_them(limit):
    cache, _ = grown_cache(1500, 3, 0)
    whole, view = cache.contents.view(), cache.contents.view(max_edges=limit)
    assert view.num_edges == len(whole.numbers) > limit == len(view.numbers)
    assert set(view.parents) <= {0, *view.numbers}
    others = [
        use for number, use in zip(whole.numbers, whole.last_uses) if number not in view.numbers
    ]
    assert max(others) <= min(view.last_uses)
    assert view.first_tokens == []
    assert {state.edge for state in view.states} <= set(view.numbers)


def test_an_edge_keeps_its_number_while_its_end_lives():
    sim = Simulator(settled(PrefixCache(SPEC, 1500)))
    prompt = np.arange(100, dtype=np.int32)
    sim.run(prompt)
    (number,) = sim.cache.contents.view().numbers
    sim.run(np.concatenate([prompt[:50], prompt[:30]]))  # a fork at 50
    view = sim.cache.contents.view()
    assert view.ends[view.numbers.index(number)] == 100
    assert view.starts[view.numbers.index(number)] == 50
    assert len(view.numbers) == 3
