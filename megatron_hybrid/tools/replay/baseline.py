"""Baseline: base class of the modelled caches. It grows the tree, then evicts to the budget."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_hybrid.tools.replay.protocol import Engine
from megatron_hybrid.tools.replay.token_tree import Node, State, TokenTree


@dataclass(eq=False)
class Running:
    prompt_tokens: int
    skipped_tokens: int
    node: Node | None
    """The node of its last token; None: its tokens are not cached."""


class Baseline(Engine):
    """A token tree under a byte budget; subclasses choose the items to evict.

    KV of requests in flight is pinned; states are not, since a request copies them at its start.

    Args:
        block: tokens are cached in whole blocks of this size.
        state_bytes: of a saved state.
        budget_bytes: for all KV and all saved states.
    """

    def __init__(self, block: int, kv_bytes_per_token: int, state_bytes: int, budget_bytes: float):
        self.tree = TokenTree(block, self.changed)
        self.kv_bytes = kv_bytes_per_token
        self.needs_state = state_bytes > 0
        """False: a prompt resumes from KV alone."""
        self.budget = budget_bytes
        self.tick = 0
        self.running = 0
        self._state_bytes = state_bytes

    def changed(self, node: Node) -> None:
        """Callback: a node changed, see `TokenTree`."""
        raise NotImplementedError

    def used(self, state: State) -> None:
        """Callback: a state was saved or restored, `state.last_access` is new."""

    def evict_one(self, over: float) -> bool:
        """Evict the least valuable item, of KV only as much as frees `over` bytes; False: none."""
        raise NotImplementedError

    @property
    def bytes_held(self) -> int:
        return self.tree.num_tokens * self.kv_bytes + self.tree.num_states * self._state_bytes

    def enter(self, tokens: np.ndarray, restored: int, saved: Iterable[int]) -> Node | None:
        """Cache tokens and their states. Returns the node of the last token, pinned; None: no
        room."""
        tree, before = self.tree, self.tree.num_tokens
        path = tree.insert(tokens, self.tick)
        grew = tree.num_tokens > before
        # Less than a block ends at the root: nothing to cache, so it always fits.
        node = path[-1] if path else tree.root
        tree.pin(node, 1)
        for position in {restored, *saved} - {0} if self.needs_state else ():
            state = tree.save_state(path, position)
            state.last_access = self.tick
            self.used(state)
        if self._shrink():
            return node
        tree.pin(node, -1)
        if grew:
            tree.cut(node, node.start)
        self._shrink()
        return None

    def _shrink(self) -> bool:
        while (over := self.bytes_held - self.budget) > 0:
            if not self.evict_one(over):
                return False
        return True

    def start(self, tokens: np.ndarray, skipped: int, saved: Iterable[int]) -> Running | None:
        """Begin a request that restores at `skipped` and saves states at `saved`. If it does not
        fit even alone, it runs outside the cache, and skips nothing."""
        node = self.enter(tokens, skipped, saved)
        if node is None and self.running:
            return None
        self.running += 1
        return Running(len(tokens), skipped if node is not None else 0, node)

    def end(self, handle: Running, tokens: np.ndarray, saved: Iterable[int]) -> None:
        """Finish a request; its answer is cached if there is room."""
        self.running -= 1
        if handle.node is not None:
            node = self.enter(tokens, 0, saved)
            if node is not None:
                self.tree.pin(node, -1)
            self.tree.pin(handle.node, -1)
            self._shrink()  # its pins may have prevented evictions
