"""TreeChanges: the index, or what has changed in it, as plain data for views."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hybrid.cache.index.journal import Version
from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind

_KINDS = {kind: kind.name.lower() for kind in Kind}


class StateView(NamedTuple):
    """A state that is or was stored."""

    edge: int
    """Number of the edge that spans its position."""
    position: int
    tier: str
    """Place of the data: "pool", "host" or "disk", or "evicted" if it is in none of them."""
    kind: str
    """Name of its `Kind`, in lower case."""
    uses: int
    """Requests that it served, or would have served."""
    num_bytes: int
    """Bytes in the pool."""


class EdgeView(NamedTuple):
    """An edge: the tokens between two forks, which have the positions [start, end) in their
    prompts."""

    number: int
    """The same as long as the edge exists."""
    parent: int
    """Number of the edge before it, or 0 if it starts at a root."""
    start: int
    end: int
    held_end: int
    """End of the KV in the pool; tokens after it are known, not held."""
    last_use: int
    """Tick of the cache at the last use, see `TreeChanges`."""
    first_tokens: list[int]
    """The requested number of tokens."""
    states: list[StateView]
    """Ascending by position."""


@dataclass(frozen=True)
class TreeChanges:
    """What has changed in the tree since a version."""

    is_whole: bool
    """Whether this is the whole tree, as there was no known version: forget earlier answers."""
    version: Version
    """Version that these changes lead to."""
    is_last: bool
    """Whether that is the present one. Until then an edge may lack its parent."""
    num_edges: int
    """Edges of the whole tree."""
    tick: int
    """The present, in units of `EdgeView.last_use`: look-ups and commits of requests."""
    removed: list[int]
    """Numbers of edges that are gone."""
    edges: list[EdgeView]
    """New and changed edges, as they are now, in no order."""


def tier_in_pool(checkpoint: Checkpoint) -> str:
    """Return where a state is if there is no tier below the pool."""
    return "evicted" if checkpoint.pages is None else "pool"


def view_edge(
    edge: Edge, page_bytes: int, tier_of: Callable[[Checkpoint], str], num_tokens: int
) -> EdgeView:
    """Return the view of an edge.

    Args:
        page_bytes: of the pool.
        tier_of: the tier of a state, as in `StateView`.
        num_tokens: first tokens of the edge in the view.
    """
    return EdgeView(
        edge.number,
        edge.parent.number if edge.parent.parent else 0,
        edge.start,
        edge.end,
        edge.held_end,
        edge.last_access,
        edge.tokens[:num_tokens].tolist() if num_tokens else [],
        [
            StateView(
                edge.number,
                checkpoint.position,
                tier_of(checkpoint),
                _KINDS[checkpoint.kind],
                checkpoint.uses,
                0 if checkpoint.pages is None else checkpoint.num_pages * page_bytes,
            )
            for _, checkpoint in sorted(edge.checkpoints.items())
            if checkpoint.was_stored or checkpoint.pages is not None
        ],
    )
