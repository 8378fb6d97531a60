"""A policy that knows the trace: how much of what an online policy loses is for lack of foresight.

It keeps what is needed soonest for its bytes (Belady's rule, with sizes and costs), and saves
states only where a later prompt resumes. With unequal sizes no such rule is optimal, so this is
what foresight can reach, not a bound from above; that is `Ceiling`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from megatron_hybrid.cache.lazy_heap import LazyHeap
from megatron_hybrid.tools.replay.protocol import Engine, Request
from megatron_hybrid.tools.replay.token_tree import Node, TokenTree

_LOOK_AHEAD = 64
"""Visits that are searched for the first one that no deeper state serves."""


class State:
    """A saved state at the end of a place."""

    __slots__ = ("place", "queued")

    def __init__(self, place: Place):
        self.place = place
        self.queued: tuple | None = None


class Place:
    """The positions (start, end] of paths that part, or end, only at its ends."""

    __slots__ = (
        "depth",
        "end",
        "held_children",
        "held_end",
        "num_stored",
        "parent",
        "pins",
        "queued",
        "start",
        "state",
        "visits",
    )

    def __init__(self, parent: Place | None, start: int, end: int):
        self.parent = parent
        self.start, self.end = start, end
        self.depth = parent.depth + 1 if parent else 0
        self.visits: list[int] = []  # requests whose prompts go through its end
        self.held_end = start  # KV is held up to here, and on all of the way to the start
        self.held_children = 0
        self.state: State | None = None
        self.num_stored = 0  # states here and beneath
        self.pins = 0
        self.queued: tuple | None = None


@dataclass(eq=False)
class Running:
    skipped_tokens: int
    index: int
    pinned: list[Place] | None
    """None: it never fits, and runs without the cache."""


class Clairvoyant(Engine):
    """KV by the token and states by the piece, under one byte budget. KV that leads to no state
    goes first, then the state that saves least: tokens / bytes that go with it / requests until its
    next use. A new state competes with the others, so it may be refused. Where KV alone resumes,
    the leaf goes that is needed last.

    Args:
        state_bytes: 0: KV alone resumes.
        budget_bytes: for all KV and all saved states.
    """

    def __init__(self, kv_bytes_per_token: int, state_bytes: int, budget_bytes: float):
        self._kv_bytes = kv_bytes_per_token
        self._state_bytes = state_bytes
        self._budget = budget_bytes
        self._tails = LazyHeap(self._tail_key)
        self._states = LazyHeap(self._state_key)
        self._prompts: list[list[Place]] = []
        self._wholes: list[list[Place]] = []
        self._now = -1  # the request that began last
        self._running = 0
        self._refresh_at = 0
        self.num_tokens = 0
        self.num_states = 0

    def foresee(self, requests: Sequence[Request]) -> None:
        """The trace that will come."""
        tree = TokenTree(1)
        wholes = [np.concatenate([request.prompt, request.output]) for request in requests]
        for request, whole in zip(requests, wholes):
            tree.insert(request.prompt, 0)
            tree.insert(whole, 0)
        places: dict[Node, Place] = {}

        def path(tokens: np.ndarray) -> list[Place]:
            found, parent = [], None
            for node in tree.walk(tokens)[0]:
                if node not in places:
                    places[node] = Place(parent, node.start, node.end)
                parent = places[node]
                found.append(parent)
            return found

        self._prompts = [path(request.prompt) for request in requests]
        self._wholes = [path(whole) for whole in wholes]
        for index, prompt in enumerate(self._prompts):
            for place in prompt:
                place.visits.append(index)

    def begin(self, prompt: np.ndarray, message_starts: Sequence[int] = ()) -> Running | None:
        index = self._now + 1
        if index >= len(self._prompts) or len(prompt) != self._prompts[index][-1].end:
            raise ValueError(f"request {index} of {len(prompt)} tokens is not the foreseen one")
        path = self._prompts[index]
        skipped = self._resume(path)
        self._now = index
        for place in path:
            if place.state is not None:
                self._states.update(place.state)  # its next use lies further on
        self._pin(path, 1)
        if not self._hold(path):
            self._pin(path, -1)
            if self._running:
                self._now = index - 1
                return None
            self._running += 1
            return Running(0, index, None)
        self._running += 1
        self._save(path, skipped)
        if self._now >= self._refresh_at:
            self._states.refresh(len(self._states))
            self._refresh_at = self._now + max(4, self.num_states // 8)
        return Running(skipped, index, list(path))

    def finish(self, handle: Running, tokens: np.ndarray) -> None:
        self._running -= 1
        if handle.pinned is None:
            return
        prompt, path = handle.pinned, self._wholes[handle.index]
        self._pin(path, 1)
        if self._hold(path):
            self._save(path, prompt[-1].end)
        self._pin(path, -1)
        self._pin(prompt, -1)

    @property
    def bytes_held(self) -> int:
        return self.num_tokens * self._kv_bytes + self.num_states * self._state_bytes

    # ---- what is there ----

    def _resume(self, path: list[Place]) -> int:
        if self._state_bytes:
            return max((place.end for place in path if place.state is not None), default=0)
        held = (place.held_end for place in path if place.held_end > place.start)
        return max(held, default=0)

    def _pin(self, path: list[Place], count: int) -> None:
        for place in path:
            place.pins += count
        for place in path:
            self._tails.update(place)

    def _hold(self, path: list[Place]) -> bool:
        """Hold the KV of a pinned path; False, and no KV more, if there is no room."""
        missing = sum(place.end - place.held_end for place in path)
        if not self._make_room(missing * self._kv_bytes):
            return False
        for place in path:
            if place.held_end == place.start and place.parent is not None:
                place.parent.held_children += 1
            place.held_end = place.end
        self.num_tokens += missing
        return True

    def _save(self, path: list[Place], start: int) -> None:
        """Save the states beyond `start` that later prompts resume from, the deepest first."""
        for place in reversed(path) if self._state_bytes else ():
            if place.end <= start or place.state is not None or self._next_use(place) == inf:
                continue
            place.state = State(place)
            self._count(place, 1)
            self._states.add(place.state)
            below = nearest_stored(place.parent)
            if below is not None:
                self._states.update(below.state)  # it is covered now
            self._make_room(0)

    def _count(self, place: Place | None, count: int) -> None:
        self.num_states += count
        while place is not None:
            place.num_stored += count
            place = place.parent

    # ---- what goes ----

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until so many bytes are free; False: all that is left is in use."""
        while (over := self.bytes_held + num_bytes - self._budget) > 0:
            if self._tails.least() is not None:
                self._drop_tail(self._tails.pop(), over)
            elif self._states.least() is not None:
                place = self._states.pop().place
                place.state = None
                self._count(place, -1)
                self._tails.update(place)
            else:
                return False
        return True

    def _drop_tail(self, place: Place, over: float) -> None:
        dropped = min(place.held_end - place.start, int(-(-over // self._kv_bytes)))
        place.held_end -= dropped
        self.num_tokens -= dropped
        if place.held_end == place.start and place.parent is not None:
            place.parent.held_children -= 1
            self._tails.update(place.parent)
        self._tails.update(place)

    def _tail_key(self, place: Place) -> tuple | None:
        """Order KV that no state needs: what is needed last goes first."""
        held = place.held_end > place.start
        if not held or place.pins or place.num_stored or place.held_children:
            return None
        return (-next_visit(place, self._now),)

    def _state_key(self, state: State) -> tuple | None:
        place = state.place
        if place.state is not state:
            return None
        below = nearest_stored(place.parent)
        saved = place.end - (below.end if below else 0)
        cost = self._state_bytes + self._kv_bytes * exclusive_tokens(place)
        return (saved / cost / (self._next_use(place) - self._now),)

    def _next_use(self, place: Place) -> float:
        """The next prompt through a place that no deeper state serves."""
        first = bisect_right(place.visits, self._now)
        for index in place.visits[first : first + _LOOK_AHEAD]:
            deeper = self._prompts[index][place.depth + 1 :]
            if place.num_stored == 0 or all(each.state is None for each in deeper):
                return index
        return next_visit(place, self._now, _LOOK_AHEAD)


def next_visit(place: Place, now: int, skip: int = 0) -> float:
    """The request that comes through a place next, or `skip` requests after that."""
    i = bisect_right(place.visits, now) + skip
    return place.visits[i] if i < len(place.visits) else inf


def nearest_stored(place: Place | None) -> Place | None:
    """The place, or the next one towards the root, that has a state."""
    while place is not None and place.state is None:
        place = place.parent
    return place


def exclusive_tokens(place: Place) -> int:
    """Tokens whose KV leads to this state only."""
    if place.num_stored > 1:
        return 0
    top = place
    while top.parent is not None and top.parent.num_stored == top.num_stored:
        top = top.parent
    return place.end - top.start
