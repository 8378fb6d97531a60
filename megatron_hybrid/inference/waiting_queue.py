"""WaitingQueue: the requests that wait for a slot, in order."""

from bisect import insort
from collections.abc import Collection, Iterator

from megatron_hybrid.inference.request import Request


class WaitingQueue(Collection[Request]):
    """First the requests that come back, of which the last one is first; then new ones, those of
    the lowest `priority` first, and among equal ones in order of arrival."""

    def __init__(self):
        self._requests: list[Request] = []
        self._num_back = 0  # that came back

    def add(self, request: Request) -> None:
        """Queue a new request."""
        insort(self._requests, request, lo=self._num_back, key=lambda each: each.priority)

    def put_first(self, request: Request) -> None:
        """Queue a request that had a slot, or samples of one."""
        self._requests.insert(0, request)
        self._num_back += 1

    def discard(self, request: Request) -> None:
        """Take a request out, if it is in."""
        if request in self._requests:  # the ValueError of `index` would print the request
            place = self._requests.index(request)
            del self._requests[place]
            self._num_back -= place < self._num_back

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
