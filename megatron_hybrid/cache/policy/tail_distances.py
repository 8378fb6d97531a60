"""TailDistances: how far before the end of a prompt its successors leave it."""

from collections import Counter, deque
from collections.abc import Iterator

from megatron_hybrid.cache.index.tree import Checkpoint, Edge, Kind, Path

WINDOW = 256
"""Observed distances that are remembered."""
PRIOR_DISTANCES = (0, 32, 128, 512)
"""Distances that count as observed at first."""


class TailDistances:
    """Histogram of the distances before the end of a prompt at which successors leave it; 0: they
    continue from the end.

    Where a different question follows a document each time, a state at the very end serves no other
    prompt; one at the usual distance before the end serves most.
    """

    def __init__(self):
        self._recent: deque[int] = deque(PRIOR_DISTANCES, WINDOW)

    def observe(self, distance: int) -> None:
        """A prompt left another one `distance` tokens before the end of that one."""
        self._recent.append(distance)

    def observe_path(self, path: Path, known: list[Checkpoint]) -> None:
        """A prompt leaves the known ones: observe how far before the nearest end of one. The end
        may lie beyond forks: the newest branch leads to one.

        Args:
            path: its known tokens, at least one.
            known: the checkpoints on it.
        """
        edge = path.edges[-1]
        ends = _prompt_ends(edge, path.known)
        if not ends and any(checkpoint.kind == Kind.PROMPT_END for checkpoint in known):
            ends = [path.known]
        elif path.known < edge.end:
            while not ends and edge.children:
                edge = next(reversed(edge.children.values()))
                ends = _prompt_ends(edge, edge.start)
        if ends:
            self.observe(min(ends) - path.known)

    def weights(self) -> Iterator[tuple[int, float]]:
        """(distance, share of the prompts that part at it or later), ascending distances."""
        sooner = 0
        for distance, count in sorted(Counter(self._recent).items()):
            sooner += count
            yield distance, sooner / len(self._recent)


def _prompt_ends(edge: Edge, start: int) -> list[int]:
    """Positions on an edge, from `start` on, where prompts ended."""
    ends = [c.position for c in edge.checkpoints.values() if c.kind == Kind.PROMPT_END]
    return [position for position in ends if position >= start]
