"""LeastRecentlyUsed, plain LRU over KV blocks and states, and Ceiling, an infinite cache."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hybrid.tools.replay.protocol import Engine
from megatron_hybrid.tools.replay.token_tree import Node, State, TokenTree, deepest_state


@dataclass(eq=False)
class Running:
    prompt_tokens: int
    skipped_tokens: int
    node: Node | None
    """The node of its last token; None if its tokens are not cached."""


class LeastRecentlyUsed(Engine):
    """KV in blocks, with states at block ends: the last one inside the prompt, the last one of its
    known prefix (its junction), and the last one of the answer; all under a byte budget.

    The least recently used item is evicted first, and of equal ones that at the later position. A
    match uses all blocks on its path, and the restored state. KV of requests in flight is pinned;
    states are not, since a request copies them at its start.

    Args:
        block: tokens are cached in whole blocks of this size.
        state_bytes: size of a saved state.
        budget_bytes: limit of all KV and all saved states.
    """

    def __init__(self, block: int, kv_bytes_per_token: int, state_bytes: int, budget_bytes: float):
        self.tree = TokenTree(block, self.changed)
        self.kv_bytes = kv_bytes_per_token
        self.needs_state = state_bytes > 0
        """Whether a prompt needs a state to resume, in addition to KV."""
        self.budget = budget_bytes
        self.tick = 0
        self.running = 0
        self._state_bytes = state_bytes
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
        """Return the positions of the states that a prefill from `skipped` saves. junction, last:
        the last block ends of the known prefix, and of the prompt."""
        return junction, last

    def saved_of_answer(self, prompt_tokens: int, num_tokens: int) -> tuple[int, ...]:
        """Return the positions of the states saved at the end of prompt and answer together."""
        return (self.tree.whole(num_tokens),)

    @property
    def bytes_held(self) -> int:
        return self.tree.num_tokens * self.kv_bytes + self.tree.num_states * self._state_bytes

    def enter(self, tokens: np.ndarray, restored: int, saved: Iterable[int]) -> Node | None:
        """Cache tokens and their states. Return the node of the last token, pinned, or None without
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
        """Begin a request that restores at `skipped` and saves states at `saved`, or return None if
        it has to wait. If it does not fit even alone, it runs outside the cache, and skips none."""
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

    # ---- a lazy heap: an entry counts if its key is still that of its item ----

    def changed(self, node: Node) -> None:
        """Note that a node has changed: the callback of `TokenTree`."""
        if self.kv_bytes and self._droppable(node):  # else dropping it frees nothing
            self._push(node.last_access, node.end, node)

    def used(self, state: State) -> None:
        """Note that a state was saved or restored, and has a new `last_access`."""
        self._push(state.last_access, state.position, state)

    def _push(self, tick: int, position: int, item: Node | State) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (tick, -position, self._pushed, item))

    def evict_one(self, over: float) -> bool:
        """Evict the least recently used item, of KV only `over` bytes. Return whether one was."""
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
