"""AmortizedSweep: upkeep of many items, a part per request."""


class AmortizedSweep:
    """Schedules sweeps over all items so that each request handles a bounded part of a sweep.

    Args:
        least: least requests from the start of one sweep to the start of the next.
        share: after a sweep of n items the next one starts no sooner than n / share requests.
        at_once: most items handled in one request.
    """

    def __init__(self, least: int, share: int, at_once: int):
        self._least = least
        self._share = share
        self._at_once = at_once
        self._next = 0
        self.left = 0
        """Items of this sweep not handled yet."""

    def due(self, now: int, number: int) -> int:
        """Number of items to handle at request `now`. number: of all items."""
        if not self.left and now >= self._next:
            self.left = number
            self._next = now + max(self._least, self.left // self._share)
        part = min(self.left, self._at_once)
        self.left -= part
        return part
