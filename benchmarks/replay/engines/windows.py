"""WindowedLRU: caches of models with local layers, whose KV takes memory of its own."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.replay.geometry import Geometry
from megatron_hybrid.tools.replay.lru import LeastRecentlyUsed, Running
from megatron_hybrid.tools.replay.protocol import WINDOW_STEP_TOKENS
from megatron_hybrid.tools.replay.rules import OneState
from megatron_hybrid.tools.replay.token_tree import Node, State, TokenTree


def windows_of(geometry: Geometry) -> dict[str, int]:
    """The arguments of `WindowedLRU`."""
    return {"window": geometry.window, "window_bytes": geometry.window_bytes_per_token}


class WindowTree(TokenTree):
    """A tree that counts the last `window` tokens before each state, in `num_window_tokens`."""

    def __init__(self, block: int, changed: Callable[[Node], None], window: int):
        super().__init__(block, changed)
        self.window = window
        self.num_window_tokens = 0

    def window_tokens(self, n: int) -> int:
        """Number of n tokens in the window of the next one."""
        return min(n, self.window)

    def save_state(self, path: list[Node], position: int) -> State:
        before = self.num_states
        state = super().save_state(path, position)
        self.num_window_tokens += (self.num_states - before) * self.window_tokens(position)
        return state

    def drop_state(self, state: State) -> None:
        super().drop_state(state)
        self.num_window_tokens -= self.window_tokens(state.position)

    def merge(self, node: Node) -> None:
        """Join a node without states with its only child, which takes its place."""
        (child,) = node.children.values()
        child.start, child.parent = node.start, node.parent
        child.tokens = np.concatenate([node.tokens, child.tokens])
        child.parent.children[self._key(child.tokens, 0)] = child
        node.parent, node.children = None, {}
        self._changed(node)
        self._changed(child)


class WindowedLRU(LeastRecentlyUsed):
    """Each saved state has a copy of the KV in its windows, and so has each running request. A
    prefill holds the KV of its longest forward besides.

    Args:
        sizes: of `LeastRecentlyUsed`.
        window: tokens in the windows of local layers.
        window_bytes: KV of one token in all of these layers.
    """

    tree: WindowTree

    def __init__(self, *sizes: Any, window: int = 0, window_bytes: int = 0):
        super().__init__(*sizes)
        self.tree = WindowTree(self.tree.block, self.changed, window)
        self.needs_state = self.needs_state or window > 0
        self._window_bytes = window_bytes
        self._running_window_tokens = self._entering = 0

    @property
    def bytes_held(self) -> int:
        window_tokens = self.tree.num_window_tokens + self._running_window_tokens
        return super().bytes_held + window_tokens * self._window_bytes

    def start(self, tokens: np.ndarray, skipped: int, saved: Iterable[int]) -> Running | None:
        windows = self.tree.window_tokens(len(tokens))
        forward = self._longest_forward(len(tokens), skipped) - windows if windows else 0
        self._entering = windows
        self._running_window_tokens += windows + forward
        running = super().start(tokens, skipped, saved)
        self._running_window_tokens -= forward
        self._entering = 0
        return running

    def _shrink(self) -> bool:
        if super()._shrink():
            return True
        self._running_window_tokens -= self._entering  # it has no room
        self._entering = 0
        return False

    def _longest_forward(self, num_tokens: int, skipped: int) -> int:
        """Tokens whose KV the local layers hold in the longest forward of a prefill: the window
        before it, and its own. Where the empty cache has no room for it, forwards are shorter."""
        step, window = WINDOW_STEP_TOKENS, self.tree.window_tokens
        room = (self.budget - num_tokens * self.kv_bytes) // self._window_bytes
        if skipped == num_tokens:
            return window(num_tokens)
        least = window(num_tokens - 1) + 1
        while least <= room:
            starts = range(skipped, num_tokens, step)
            longest = max(window(start) + min(step, num_tokens - start) for start in starts)
            if longest <= room or step == 1:
                return max(longest, window(num_tokens))
            step //= 2
        return least

    def end(self, handle: Running, tokens: np.ndarray, saved: Iterable[int]) -> None:
        if handle.node is not None:
            # Its windows are those of the state after the answer.
            self._running_window_tokens -= self.tree.window_tokens(handle.prompt_tokens)
        super().end(handle, tokens, saved)


class WindowedOneState(WindowedLRU, OneState):
    """SGLang's rule."""
