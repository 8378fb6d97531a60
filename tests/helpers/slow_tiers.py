"""A tier whose reads end, and copies into the pool that arrive, when the test says so."""

from concurrent.futures import Future

from megatron_hybrid.offload.page_mover import Arrival


class SlowStore:
    """A tier's store whose reads end when the test says so."""

    def __init__(self, store):
        self.store, self.reads = store, []

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, record):
        future = Future()
        self.reads.append((future, record))
        return future

    def arrive(self):
        reads, self.reads = self.reads, []
        for future, record in reads:
            if future.set_running_or_notify_cancel():
                future.set_result(self.store.get(record).result())
        return len(reads)


class SlowArrival(Arrival):
    """Pages that arrive in the pool when the test says so."""

    def __init__(self, is_there):
        super().__init__([])
        self.is_done = is_there

    def wait(self):
        pass
