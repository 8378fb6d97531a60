"""HostStore: the bytes of the host tier's records, in host memory."""

from concurrent.futures import Future

from megatron_hybrid.offload.page_mover import HostPages
from megatron_hybrid.offload.tier import LOST, Record


class HostStore:
    """Records' pages by key. Dropped pages are freed after their last read."""

    def __init__(self):
        self._pages: dict[bytes, HostPages | None] = {}  # None: lost
        self._lost: list[Record] = []

    def accepts(self) -> bool:
        return True

    def put(self, record: Record, data: HostPages) -> None:
        self._pages[record.key] = data

    def put_lost(self, record: Record) -> None:
        self._pages[record.key] = None
        self._lost.append(record)

    def take_lost(self) -> list[Record]:
        lost, self._lost = self._lost, []
        return lost

    def get(self, record: Record) -> Future[HostPages | None]:
        future: Future[HostPages | None] = Future()
        future.set_result(self._pages[record.key])
        return future

    def pages(self, record: Record) -> HostPages | object:
        """Return a record's pages, or LOST."""
        return self._pages[record.key] or LOST

    def drop(self, record: Record) -> None:
        del self._pages[record.key]
