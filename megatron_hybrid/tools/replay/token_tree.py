"""TokenTree: a radix tree over blocks of tokens, for the baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False, repr=False, slots=True)
class State:
    """A saved state."""

    node: Node | None
    """Its node, None once it is dropped."""
    position: int
    last_access: int = 0


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """The positions (start, end] of a path, and the states saved there."""

    parent: Node | None
    """None for the root, and for a dropped node."""
    start: int
    tokens: np.ndarray
    children: dict[bytes, Node] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    last_access: int = 0
    pins: int = 0
    """Number of running requests whose last token is here."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class TokenTree:
    """Sequences, truncated to whole blocks of `block` tokens.

    `num_tokens` and `num_states` count its content. `changed` is called with each node whose
    children, states, pins, extent or last access changed.
    """

    def __init__(self, block: int, changed: Callable[[Node], None] = lambda node: None):
        self.block = block
        self.root = Node(None, 0, np.empty(0, dtype=np.int32))
        self.num_tokens = 0
        self.num_states = 0
        self._changed = changed

    def walk(self, tokens: np.ndarray) -> tuple[list[Node], int]:
        """Find the nodes on the longest known prefix of tokens (int32), and its length, a multiple
        of the block."""
        node, path, depth, n = self.root, [], 0, self.whole(len(tokens))
        while depth < n:
            node = node.children.get(self._key(tokens, depth))
            if node is None:
                break
            path.append(node)
            depth += self._common(node.tokens, tokens[depth:n])
            if depth < node.end:
                break
        return path, depth

    def whole(self, n: int) -> int:
        """Truncate a length to whole blocks."""
        return n // self.block * self.block

    def _key(self, tokens: np.ndarray, start: int) -> bytes:
        return tokens[start : start + self.block].tobytes()

    def _common(self, a: np.ndarray, b: np.ndarray) -> int:
        n = min(len(a), len(b))
        differ = a[:n] != b[:n]
        first = int(differ.argmax())
        return self.whole(first if differ[first] else n)

    def insert(self, tokens: np.ndarray, tick: int) -> list[Node]:
        """Add all whole blocks of tokens. Return their path, marked as used. It is split at the
        junction, which is therefore always the end of a node."""
        path, depth = self.walk(tokens)
        if path and depth < path[-1].end:
            path[-1] = self._split(path[-1], depth)
        n = self.whole(len(tokens))
        if depth < n:
            parent = path[-1] if path else self.root
            path.append(Node(parent, depth, tokens[depth:n].copy()))
            parent.children[self._key(tokens, depth)] = path[-1]
            self.num_tokens += n - depth
            self._changed(parent)
        for node in path:
            node.last_access = tick
            self._changed(node)
        return path

    def _split(self, node: Node, at: int) -> Node:
        """Split a node. Return the upper part, which is a new node."""
        cut = at - node.start
        upper = Node(node.parent, node.start, node.tokens[:cut].copy())
        upper.last_access = node.last_access
        upper.parent.children[self._key(upper.tokens, 0)] = upper
        node.parent, node.start, node.tokens = upper, at, node.tokens[cut:].copy()
        upper.children[self._key(node.tokens, 0)] = node
        upper.states = {p: state for p, state in node.states.items() if p <= at}
        node.states = {p: state for p, state in node.states.items() if p > at}
        for state in upper.states.values():
            state.node = upper
        self._changed(upper)
        self._changed(node)
        return upper

    def pin(self, node: Node, count: int) -> None:
        """Add `count`, which may be negative, to the running requests that end at a node."""
        node.pins += count
        self._changed(node)

    def save_state(self, path: list[Node], position: int) -> State:
        """Return the state after `position` tokens of a path; save it if it is missing."""
        node = next(node for node in path if node.start < position <= node.end)
        if position not in node.states:
            node.states[position] = State(node, position)
            self.num_states += 1
            self._changed(node)
        return node.states[position]

    def drop_state(self, state: State) -> None:
        node, state.node = state.node, None
        del node.states[state.position]
        self.num_states -= 1
        self._changed(node)

    def cut(self, leaf: Node, end: int) -> None:
        """Drop a leaf's tokens and states beyond `end`; at its start, drop the leaf."""
        for state in [state for p, state in leaf.states.items() if p > end]:
            self.drop_state(state)
        self.num_tokens -= leaf.end - end
        parent = leaf.parent
        if end == leaf.start:
            del parent.children[self._key(leaf.tokens, 0)]
            leaf.parent = None
        leaf.tokens = leaf.tokens[: end - leaf.start].copy()
        self._changed(leaf)
        self._changed(parent)


def deepest_state(path: list[Node], limit: int) -> State | None:
    """Find the last state on a path at a position <= limit, or None."""
    for node in reversed(path):
        position = max((p for p in node.states if p <= limit), default=None)
        if position is not None:
            return node.states[position]
    return None
