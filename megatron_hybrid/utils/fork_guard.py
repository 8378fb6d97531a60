"""ForkGuard: refuses objects in a forked process, which does not have their threads."""

import os


class ForkGuard:
    """The process that made an object. A fork of it has the object, but not its threads, and
    perhaps taken locks, so that a wait for these would never end."""

    def __init__(self):
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def require(self, what: str, own: str = "an engine of its own") -> None:
        """Raise RuntimeError in a fork. what, own: the object, and what each process needs."""
        if not self.is_here:
            raise RuntimeError(
                f"{what} belongs to process {self._pid}, of which this one ({os.getpid()}) is a "
                f"fork: make {own} in each process, after the fork"
            )
