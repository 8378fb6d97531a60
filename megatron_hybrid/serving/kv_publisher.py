"""KvPublisher: the events of a cache over ZeroMQ, as vLLM publishes its own.

A message has three frames: the topic; the number of the batch, 8 bytes, big-endian; the batch in
msgpack, [time in seconds, events, data-parallel rank]. Numbers count from the microsecond at which
the publisher began, so that a publisher that takes the place of a dead one leaves a gap.
A reader that misses a number asks the replay socket for it, and gets all messages from there on. If
they are not kept any more, or were another publisher's, it gets none, as llm-d-router takes no
replay that begins later; then all readers get a batch with AllBlocksCleared and all that is stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from itertools import islice

import msgpack
import zmq

from megatron_hybrid.serving.kv_events import BlockEvents, Event

logger = logging.getLogger(__name__)
KEPT_BATCHES = 10_000  # the last ones, for replays
_MOST_UNSENT = 100_000  # messages for a reader that lags; it misses the next ones
_TICK_SECONDS = 0.05  # between looks at the replay socket, while nothing happens
_MOST_REQUEST_BYTES = 64
_LINGER_MS = 1000  # for the last messages, at the end
_END = b"\xff" * 8  # in place of the number, after the last batch of a replay


class KvPublisher:
    """The sockets, and from `begin` on a thread that publishes. A context manager.

    Args:
        endpoint: address to listen at, such as "tcp://127.0.0.1:5557"; * is any free port.
        replay_endpoint: address to listen at for replays; "" offers none.
        topic: that of all messages.

    Raises:
        OSError: an endpoint is invalid or in use; the message names it.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = ""):
        self._context = zmq.Context()
        self._topic = topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._next = time.time_ns() // 1000
        self._events: BlockEvents | None = None
        self._repeats = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._replay: zmq.Socket | None = None
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.set_hwm(_MOST_UNSENT)
            self.endpoint = _bind(self._socket, endpoint, "--kv-events-endpoint")
            """Address where it listens."""
            self.replay_endpoint = ""
            """Address where it listens for replays, "" if it does not."""
            if replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                # Beyond that, a router socket drops messages. Up to half of them may be read, which
                # the socket learns late.
                self._replay.set_hwm(4 * (KEPT_BATCHES + 1))
                self._replay.maxmsgsize = _MOST_REQUEST_BYTES
                name = "--kv-events-replay-endpoint"
                self.replay_endpoint = _bind(self._replay, replay_endpoint, name)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def begin(self, events: BlockEvents) -> None:
        """Publish these events, until `close`."""
        self._events = events
        self._thread.start()

    def repeat(self) -> None:
        """Publish all stored blocks again, for readers that came late."""
        self._repeats.set()

    def close(self) -> None:
        """Publish that all blocks are gone, and end the thread and the sockets."""
        if self._events is not None:
            self._events.end()
            self._thread.join()
        self._context.destroy(linger=_LINGER_MS)

    def __enter__(self) -> KvPublisher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- in the thread ----

    def _run(self) -> None:
        try:
            while not self._events.has_ended:
                self._turn(_TICK_SECONDS)
        except Exception:
            logger.exception("KV events end here")
            self._events.end()  # so that the engine queues no more

    def _turn(self, seconds: float) -> None:
        """Publish events and answer replays; wait up to this long for the first event."""
        self._tell(seconds)
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            self._tell(0)  # so that the answer has all that came before the question
            self._answer(*frames)
        if self._repeats.is_set():
            self._repeats.clear()
            self._publish(self._events.all())

    def _tell(self, seconds: float) -> None:
        """Publish what has happened; wait up to this long for it."""
        if batch := self._events.take(seconds):
            self._publish(batch)

    def _publish(self, batch: list[Event]) -> None:
        # Salts may hold invalid Unicode, such as half of a surrogate pair.
        payload = msgpack.packb([time.time(), batch, 0], unicode_errors="backslashreplace")
        number = self._next.to_bytes(8, "big")
        self._next += 1
        self._kept.append((number, payload))
        self._socket.send_multipart((self._topic, number, payload))

    def _answer(self, client: bytes, *frames: bytes) -> None:
        """Send what a reader has missed, or else publish all stored blocks to all readers."""
        if len(frames) != 2 or len(frames[1]) != len(_END):
            logger.debug("a request for a replay is an empty frame and 8 bytes; ignored")
            return
        first = int.from_bytes(frames[1], "big")
        if self._next - len(self._kept) <= first <= self._next:
            for number, payload in islice(self._kept, first - self._next + len(self._kept), None):
                self._replay.send_multipart((client, b"", self._topic, number, payload))
        else:
            self.repeat()
        self._replay.send_multipart((client, b"", b"", _END, b""))


def _bind(socket: zmq.Socket, endpoint: str, option: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(
            f"{option} {endpoint} cannot be used: {error.strerror}; give a free one, such as "
            "tcp://127.0.0.1:5557"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
