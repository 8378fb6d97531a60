"""When upkeep is due."""


class AmortizedSweep:
    """What has to be done for many things now and then is done in rounds, at a constant cost per
    request however many they are, and a part at a time: no request waits while all are done.

    Args:
        least: requests from the beginning of one round to that of the next, at least.
        share: a round begins when 1 / share of as many requests came as the last one had things.
        at_once: things that are done in one request at most.
    """

    def __init__(self, least: int, share: int, at_once: int):
        self._least = least
        self._share = share
        self._at_once = at_once
        self._next = 0
        self.left = 0
        """Things of this round that are still to be done."""

    def due(self, now: int, number: int) -> int:
        """How many things are to be done at request `now`. number: of all of them."""
        if not self.left and now >= self._next:
            self.left = number
            self._next = now + max(self._least, self.left // self._share)
        part = min(self.left, self._at_once)
        self.left -= part
        return part
