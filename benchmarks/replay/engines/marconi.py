"""Marconi (Pan et al., MLSys 2025), corrected: exact bytes, and no hit inside an edge."""

from collections.abc import Sequence

import numpy as np

from benchmarks.replay.engines.windows import WindowedLRU, windows_of
from benchmarks.replay.geometry import Geometry
from megatron_hybrid.tools.replay.lru import Running
from megatron_hybrid.tools.replay.token_tree import Node, State, deepest_state

ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)


class Marconi(WindowedLRU):
    """Keeps at most two states of each request: at its junction, where the prompt leaves (or ends
    inside) what is known, and after its last token. Nodes with at most one child are candidates for
    eviction, by recency + alpha x FLOPs saved per byte, each normalised over the candidates; a leaf
    goes with its KV, a node with one child gives its state and joins the child."""

    def __init__(self, geometry: Geometry, state_bytes: int, budget_bytes: float, alpha: float):
        sizes = 1, geometry.kv_bytes_per_token, state_bytes, budget_bytes
        super().__init__(*sizes, **windows_of(geometry))
        self.alpha = alpha
        self._flops = geometry.prefill_flops
        self._slots: dict[Node, int] = {}
        self._nodes: list[Node | None] = []
        self._free: list[int] = []
        self._used = np.zeros(64)
        self._gain = np.full(64, np.nan)  # NaN: no candidate

    def begin(self, prompt: np.ndarray, message_starts: Sequence[int] = ()) -> Running | None:
        self.tick += 1
        path, depth = self.tree.walk(prompt)
        if not self.needs_state:
            return self.start(prompt, depth, ())
        state = deepest_state(path, depth)
        return self.start(prompt, state.position if state else 0, (depth,))

    def finish(self, handle: Running, tokens: np.ndarray) -> None:
        self.tick += 1
        self.end(handle, tokens, (len(tokens),))

    def changed(self, node: Node) -> None:
        if node is self.tree.root:
            return
        if node.parent is None:
            if (slot := self._slots.pop(node, None)) is not None:
                self._nodes[slot], self._gain[slot] = None, np.nan
                self._free.append(slot)
            return
        if (slot := self._slots.get(node)) is None:
            slot = self._slots[node] = self._take_slot(node)
        self._used[slot] = node.last_access
        self._gain[slot] = self._flops_per_byte(node)

    def used(self, state: State) -> None:
        """States have no place of their own in the order."""

    def _take_slot(self, node: Node) -> int:
        if self._free:
            slot = self._free.pop()
            self._nodes[slot] = node
            return slot
        self._nodes.append(node)
        if len(self._nodes) > len(self._gain):
            self._used = np.concatenate([self._used, np.zeros_like(self._used)])
            self._gain = np.concatenate([self._gain, np.full_like(self._gain, np.nan)])
        return len(self._nodes) - 1

    def _flops_per_byte(self, node: Node) -> float:
        """Return what it saves over its parent, for each byte that its eviction frees; NaN: it
        stays."""
        if node.pins or len(node.children) > 1:
            return np.nan
        windows = sum(map(self.tree.window_tokens, node.states))
        freed = len(node.states) * self._state_bytes + windows * self._window_bytes
        if not node.children:
            freed += len(node.tokens) * self.kv_bytes
        elif not node.states:
            return np.nan
        if self.needs_state and not node.states:
            return 0.0  # KV that nothing resumes from
        return (self._flops(node.end) - self._flops(node.start)) / freed

    def evict_one(self, over: float) -> bool:
        count = len(self._nodes)
        used, gain = self._used[:count], self._gain[:count]
        slots = np.flatnonzero(~np.isnan(gain))
        if not len(slots):
            return False
        score = normalised(used[slots]) + self.alpha * normalised(gain[slots])
        node = self._nodes[slots[score.argmin()]]
        if node.children:
            for state in list(node.states.values()):
                self.tree.drop_state(state)
            self.tree.merge(node)
        else:
            self.tree.cut(node, node.start)
        return True


def normalised(values: np.ndarray) -> np.ndarray:
    """Scale to 0 .. 1 over all values; all 0 where they are equal."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.zeros_like(values)
