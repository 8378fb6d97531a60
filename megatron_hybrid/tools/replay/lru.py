"""LeastRecentlyUsed, plain LRU over KV blocks and states, and Ceiling, an infinite cache."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hybrid.tools.replay.baseline import Baseline, Running
from megatron_hybrid.tools.replay.token_tree import Node, State, deepest_state


class LeastRecentlyUsed(Baseline):
    """KV in blocks, with states at block ends: the last one inside the prompt, the last one of its
    known prefix (its junction), and the last one of the answer.

    The least recently used item is evicted first, of equals the later position. A match uses all
    blocks on its path, and the restored state.
    """

    def __init__(self, *sizes: Any):
        super().__init__(*sizes)
        self._heap: list[tuple] = []
        self._pushed = 0

    def begin(self, prompt: np.ndarray, message_starts: Sequence[int] = ()) -> Running | None:
        self.tick += 1
        path, depth = self.tree.walk(prompt)
        if not self.needs_state:
            return self.start(prompt, depth, ())
        # No logits are saved, so the last token is always computed.
        limit = self.tree.whole(len(prompt) - 1)
        junction = min(depth, limit)
        state = deepest_state(path, junction)
        skipped = state.position if state else 0
        return self.start(prompt, skipped, self.saved_of_prompt(skipped, junction, limit))

    def finish(self, handle: Running, tokens: np.ndarray) -> None:
        self.tick += 1
        self.end(handle, tokens, self.saved_of_answer(handle.prompt_tokens, len(tokens)))

    def saved_of_prompt(self, skipped: int, junction: int, last: int) -> tuple[int, ...]:
        """Positions of the states that a prefill from `skipped` saves. junction, last: the last
        block ends of the known prefix, and of the prompt."""
        return junction, last

    def saved_of_answer(self, prompt_tokens: int, num_tokens: int) -> tuple[int, ...]:
        """Positions of the states saved at the end. num_tokens: of prompt and answer."""
        return (self.tree.whole(num_tokens),)

    # ---- a lazy heap: an entry counts if its key is still that of its item ----

    def changed(self, node: Node) -> None:
        if self.kv_bytes and self._droppable(node):  # else dropping it frees nothing
            self._push(node.last_access, node.end, node)

    def used(self, state: State) -> None:
        self._push(state.last_access, state.position, state)

    def _push(self, tick: int, position: int, item: Node | State) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (tick, -position, self._pushed, item))

    def evict_one(self, over: float) -> bool:
        while self._heap:
            tick, position, _, item = heapq.heappop(self._heap)
            if item.last_access != tick:
                continue
            if isinstance(item, State):
                if item.node is not None:
                    self.tree.drop_state(item)
                    return True
            elif self._droppable(item) and item.end == -position:
                self.drop_tail(item, over)
                return True
        return False

    def _droppable(self, node: Node) -> bool:
        return node.parent is not None and not node.children and not node.pins

    def drop_tail(self, leaf: Node, over: float) -> None:
        """Drop the last blocks or the last state of a leaf, to free `over` bytes."""
        blocks = int(-(-over // (self.kv_bytes * self.tree.block)))
        end = max(leaf.start, leaf.end - blocks * self.tree.block)
        deepest = max(leaf.states, default=0)
        if deepest == leaf.end:
            self.tree.drop_state(leaf.states[deepest])
        else:
            self.tree.cut(leaf, max(end, deepest))


class Ceiling(LeastRecentlyUsed):
    """An infinite cache that resumes at any token: the upper bound of every policy."""

    def __init__(self):
        super().__init__(1, 0, 0, 0)  # what costs nothing is never evicted
