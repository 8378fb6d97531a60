"""TreeView: a snapshot of the index as plain data, for drawing it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind

_KINDS = {kind: kind.name.lower() for kind in Kind}


class StateView(NamedTuple):
    """A state that is or was stored."""

    edge: int
    """Number of the edge that spans its position."""
    position: int
    tier: str
    """Where it is: "pool", "host" or "disk"; "evicted": in none of them."""
    kind: str
    """Name of its `Kind`, in lower case."""
    uses: int
    """Requests that it served, or would have served."""
    num_bytes: int
    """Bytes in the pool."""


@dataclass(frozen=True)
class TreeView:
    """Lists with one item per edge, parents first, and the states. An edge is the tokens between
    two forks; they have the positions [start, end) in their prompts."""

    num_edges: int
    """Edges of the whole tree. The lists have at most the requested number, the most recently
    used."""
    tick: int
    """The present, in units of `last_uses`: look-ups and commits of requests."""
    numbers: list[int]
    """An edge has the same number as long as it exists."""
    parents: list[int]
    """Number of the edge before it; 0: it starts at a root."""
    starts: list[int]
    ends: list[int]
    held_ends: list[int]
    """End of the KV in the pool; tokens behind it are known, not held."""
    last_uses: list[int]
    first_tokens: list[list[int]]
    """The requested number of tokens."""
    states: list[StateView]
    """Ascending by position within an edge."""


def tier_in_pool(checkpoint: Checkpoint) -> str:
    """Return where a state is if there is no tier below the pool."""
    return "evicted" if checkpoint.pages is None else "pool"


def view_tree(
    edges: Iterable[Edge],
    tick: int,
    page_bytes: int,
    tier_of: Callable[[Checkpoint], str],
    max_edges: int,
    num_tokens: int,
) -> TreeView:
    """Return the view of a tree.

    Args:
        edges: all of them, parents first.
        tick: the present.
        page_bytes: of the pool.
        tier_of: the tier of a state, as in `StateView`.
        max_edges: most edges of the view.
        num_tokens: first tokens of each edge in the view.
    """
    found = list(edges)
    num_edges = len(found)
    if num_edges > max_edges:
        # Parents are used whenever their children are, and the sort is stable: none lacks its own.
        found = sorted(found, key=lambda edge: -edge.last_access)[:max_edges]
    return TreeView(
        num_edges,
        tick,
        numbers=[edge.number for edge in found],
        parents=[edge.parent.number if edge.parent.parent else 0 for edge in found],
        starts=[edge.start for edge in found],
        ends=[edge.end for edge in found],
        held_ends=[edge.held_end for edge in found],
        last_uses=[edge.last_access for edge in found],
        first_tokens=[edge.tokens[:num_tokens].tolist() for edge in found] if num_tokens else [],
        states=[
            StateView(
                edge.number,
                checkpoint.position,
                tier_of(checkpoint),
                _KINDS[checkpoint.kind],
                checkpoint.uses,
                0 if checkpoint.pages is None else checkpoint.num_pages * page_bytes,
            )
            for edge in found
            if edge.checkpoints
            for _, checkpoint in sorted(edge.checkpoints.items())
            if checkpoint.was_stored or checkpoint.pages is not None
        ],
    )
