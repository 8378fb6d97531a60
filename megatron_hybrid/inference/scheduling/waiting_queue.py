"""WaitingQueue: the requests that wait for a slot, in order."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from operator import itemgetter

from megatron_hybrid.inference.requests.request import Request

_place = itemgetter(0)


class WaitingQueue(Collection[Request]):
    """The waiting requests in order: those that come back, the last one first, then new ones, those
    of the lowest `priority` first. Among equal ones the tenants take turns, each with one sample,
    and the requests of one tenant keep their order of arrival.

    Wherever an exception stops `add` or `discard` (a second Ctrl-C takes effect at once), `discard`
    then takes the request out."""

    def __init__(self):
        self._back: list[Request] = []  # the first one last
        self._new: list[tuple[tuple[int, int], Request]] = []  # (priority, turn) of each
        self._places: dict[Request, tuple[int, int]] = {}  # the same
        self._next_turns: dict[tuple[int, str], int] = {}  # after the last one that waits
        self._num_waiting: dict[tuple[int, str], int] = {}

    def add(self, request: Request) -> None:
        group, turn = (request.options.priority, request.options.tenant), 0
        first = bisect_left(self._new, (request.options.priority,), key=_place)
        if first < len(self._new) and self._new[first][0][0] == request.options.priority:
            turn = self._new[first][0][1]  # a tenant that comes now has missed nothing
        turn = max(turn, self._next_turns.get(group, turn))
        self._num_waiting[group] = self._num_waiting.get(group, 0) + 1
        self._next_turns[group] = turn + 1 + len(request.siblings)
        place = self._places[request] = (request.options.priority, turn)
        insort(self._new, (place, request), key=_place)

    def put_first(self, request: Request) -> None:
        """Queue a request as the first one, as it had a slot, or another of its samples had."""
        self._back.append(request)

    def discard(self, request: Request) -> None:
        """Remove a request, if it is in the queue."""
        if request in self._back:  # the ValueError of `remove` would print the request
            self._back.remove(request)
            return
        place = self._places.get(request)
        if place is None:
            return
        index = bisect_left(self._new, place, key=_place)
        while index < len(self._new) and self._new[index][1] is not request:
            index += 1
        del self._new[index : index + 1]
        group = (request.options.priority, request.options.tenant)
        left = self._num_waiting.pop(group, 1) - 1
        if left:
            self._num_waiting[group] = left
        else:
            self._next_turns.pop(group, None)
        del self._places[request]

    def __contains__(self, request: object) -> bool:
        return request in self._places or request in self._back

    def __iter__(self) -> Iterator[Request]:
        yield from reversed(self._back)
        for _, request in self._new:
            yield request

    def __len__(self) -> int:
        return len(self._back) + len(self._new)
