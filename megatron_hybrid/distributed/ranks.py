"""Ranks: the processes that hold the parts of one model, and so run one engine.

Every rank runs the same scheduler over the same requests, so most decisions need no message. This
module makes inputs equal that could differ, and exchanges facts that one machine alone finds out.
All values are small and in host memory. They travel over sockets between the first rank and each
other one. This needs no process group of its own, a rank may wait for the first one without limit,
and another thread can end its wait. In torch 2.13 nothing ends the wait in a collective of gloo,
which takes 25 times as long. torch's store takes 3 to 9 times as long, and reports no ended rank.
"""

import os
import pickle
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TypeVar
from weakref import WeakSet

import torch.distributed as dist

from megatron_hybrid.compat import parallel_state
from megatron_hybrid.distributed.call_log import DIGEST_BYTES, Call, CallLog, describe_difference
from megatron_hybrid.distributed.rendezvous import (
    BEGIN_SECONDS,
    Member,
    RankError,
    exchange,
    first_difference,
    own_member,
)

T = TypeVar("T")
CONNECT_SECONDS = 60.0
"""Time for all ranks to connect, once they have met."""
MAKING = "making an engine"
"""The call of an engine's constructor, for messages."""
HANDSHAKE_SECONDS = 5.0
"""Time for a connected process to show that it belongs to the job."""
_FAILED, _DIFFER, _KIND_BYTES = b"failed  ", b"differ  ", 8
_HEAD_BYTES = _KIND_BYTES + DIGEST_BYTES
_KEEPALIVE = {socket.TCP_KEEPIDLE: 8, socket.TCP_KEEPINTVL: 4, socket.TCP_KEEPCNT: 2}
"""Seconds without a message, seconds between probes, number of probes: then a machine is gone."""


class Ranks:
    """Messages between the ranks of one model. All ranks make the same calls in the same order.

    In an exchange every rank gives a message to the first one and gets its answer. A rank whose own
    work has failed gives the error in place of its value; then all of them raise. Each message
    begins with a digest of the calls that its rank has made. If these differ, all raise, too, with
    the first difference.

    Args:
        rank: of this process, from 0.
        size: number of ranks.
        connections: on the first rank, to the other ranks, in their order; on another rank, to the
            first one.
        watched: further connections, for the failures of ranks, by rank.
        members: the processes, in order.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        connections: Sequence[Connection] = (),
        watched: dict[int, Connection] | None = None,
        members: Sequence[Member] = (),
    ):
        self.rank, self.size = rank, size
        self.members = list(members) or [Member(i, socket.gethostname(), 0) for i in range(size)]
        self.connections = connections
        self.watched = watched or {}
        self.sent_bytes = 0
        """Bytes that this rank has sent."""
        self.calls = CallLog()
        self.call = "nothing"
        """The call that this rank is in, for messages."""
        self.on_difference: Callable[[str], None] = lambda text: None
        """Called on all ranks when they have made different calls, after which no exchange can be
        relied on."""
        self._depth = 0  # of `raise_on_all`
        self._told: BaseException | None = (
            None  # inside of it: the last own error that all ranks know
        )
        _open.add(self)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def name(self) -> str:
        """Name for files: "rank-0-of-1"."""
        return f"rank-{self.rank}-of-{self.size}"

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the largest value of all ranks at each place; all give as many.

        Raises:
            RankError: another rank has failed meanwhile.
        """
        if self.size == 1 or not len(values):
            return list(values)
        return [max(column) for column in zip(*self._exchange(b"maximum ", list(values)))]

    def minimum(self, value: int) -> int:
        return -self.maximum([-value])[0]

    def gather(self, value: T) -> list[T]:
        """Return the picklable value of every rank, in rank order.

        Raises:
            RankError: another rank has failed meanwhile.
        """
        return [value] if self.size == 1 else self._exchange(b"gather  ", value)

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the picklable value of rank `source`; values of others are ignored."""
        return self.gather(value if self.rank == source else None)[source]

    @contextmanager
    def raise_on_all(self, what: str) -> Iterator[None]:
        """Make a context for work that raises on all ranks if it raises on one. Exchanges and
        further such contexts may be inside. what: its name, for the error.

        Raises:
            RankError: it raised on another rank.
        """
        self._depth += 1
        try:
            yield
        except RankError:
            raise
        except BaseException as error:  # such as SystemExit: the others must not wait for this one
            if error is not self._told:
                self.broadcast_error(what, error)
                self._told = error
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._told = None
        if self.size > 1:
            self._exchange(b"together", None)

    def broadcast_error(self, what: str, error: BaseException) -> None:
        """Give an error of this rank to the exchange in which the other ranks are, or will be.
        There they raise it, unless all of them give one."""
        if self.size > 1:
            text = f"{what} failed on {self.members[self.rank]}: {type(error).__name__}: {error}"
            with suppress(RankError):
                self._exchange(_FAILED, text)

    def _exchange(self, kind: bytes, value: object) -> list:
        """Give a picklable value, and get those of all ranks, in rank order."""
        own = kind + self.calls.digest + pickle.dumps(value)
        answer = self._answered(own, self._answer)
        if answer.startswith(_DIFFER):
            self._raise_difference(kind, value)
        self.calls.agreed()
        if answer.startswith(_FAILED):
            raise RankError(pickle.loads(answer[_KIND_BYTES:]))
        return [pickle.loads(each) for each in pickle.loads(answer[_KIND_BYTES:])]

    def _answered(self, own: bytes, answer: Callable[[list[bytes]], bytes]) -> bytes:
        """Give a message to the first rank, which makes the answer from those of all ranks."""
        if not self.is_first:
            self._send_all(own)
            return self.connections[0].recv_bytes()
        made = answer([own, *(connection.recv_bytes() for connection in self.connections)])
        self._send_all(made)
        return made

    @staticmethod
    def _answer(given: list[bytes]) -> bytes:
        failed = next((each for each in given if each.startswith(_FAILED)), None)
        kinds = {each[:_KIND_BYTES] for each in given} - {_FAILED}
        if len(kinds) > 1 or len({each[_KIND_BYTES:_HEAD_BYTES] for each in given}) > 1:
            return _DIFFER
        if failed is not None:
            return _FAILED + failed[_HEAD_BYTES:]
        return b"".join([*kinds, pickle.dumps([each[_HEAD_BYTES:] for each in given])])

    def _raise_difference(self, kind: bytes, value: object) -> None:
        """Find the first call in which the ranks differ. kind, value: given by this rank."""
        has_failed = kind == _FAILED
        last: Call = (value, {}) if has_failed else (self.call, {"exchange": kind.decode().strip()})
        own = pickle.dumps((has_failed, [*self.calls.recent, last]))
        text = pickle.loads(self._answered(own, self._difference))
        self.on_difference(text)
        raise RankError(text)

    def _difference(self, given: list[bytes]) -> bytes:
        said = [pickle.loads(each) for each in given]
        text = next((calls[-1][0] for has_failed, calls in said if has_failed), None)
        if text is None:
            text = describe_difference(list(zip(self.members, (calls for _, calls in said))))
        return pickle.dumps(text)

    def send(self, value: object) -> None:
        """Send a picklable value from the first rank to all others, outside of an exchange."""
        self._send_all(pickle.dumps(value))

    def receive(self) -> object:
        return pickle.loads(self.connections[0].recv_bytes())

    def _send_all(self, message: bytes) -> None:
        for connection in self.connections:
            connection.send_bytes(message)
            self.sent_bytes += len(message)

    def require_equal(self, named: dict[str, object]) -> None:
        """Raise ValueError on all ranks if two have different values under a name.

        named: picklable values, of which a rank may lack some.
        """
        difference = first_difference(list(zip(self.members, self.gather(named))))
        if difference is not None:
            raise ValueError(difference)

    def wake(self) -> None:
        """End the wait of another thread of this rank for an exchange, which raises EOFError."""
        for connection in self.connections:
            _end(connection)

    def close(self) -> None:
        """Leave the other ranks. Their waits for this one raise EOFError."""
        for connection in self.connections:
            _shut(connection)


def _shut(connection: Connection) -> None:
    """End a connection, even if a forked process still has it."""
    _end(connection)
    connection.close()


def _end(connection: Connection) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as ends:
        ends.shutdown(socket.SHUT_RDWR)


_open: WeakSet[Ranks] = WeakSet()


def _forget_in_fork() -> None:
    """Close all connections in a forked process: they would hide that the rank has ended."""
    for ranks in list(_open):
        for connection in (*ranks.connections, *ranks.watched.values()):
            connection.close()


os.register_at_fork(after_in_child=_forget_in_fork)
ONE_RANK = Ranks()


def ranks_of(groups: object, seconds: float = BEGIN_SECONDS, what: str = MAKING) -> Ranks:
    """Connect the ranks of a model. Call it on all of them.

    They are joined by tensor-, pipeline- and expert-parallel groups. So ranks that hold the same
    dense layers and different experts run one engine, too.

    Args:
        groups: megatron-core's ProcessGroupCollection of the model.
        seconds: time for all of them to call it.
        what: the call that they make, for messages.

    Raises:
        RankError: one of them does not call it, has failed, or makes another call.
        OSError: they do not reach each other.
    """
    joined = _joined(groups)
    return _connected(joined, seconds, what) if joined else ONE_RANK


def _joined(groups: object) -> list[dist.ProcessGroup]:
    """List the groups that join the ranks of a model, twice: one may reach members of another."""
    found = [getattr(groups, name, None) for name in ("ep", "expt_tp", "tp", "pp")]
    return [group for group in found if group is not None and group.size() > 1] * 2


def replica_of(groups: object) -> tuple[int, int]:
    """Return which data-parallel replica this rank serves, and how many there are. Expert-parallel
    ranks are data-parallel ones, too, and serve together.

    groups: megatron-core's ProcessGroupCollection of the model.
    """
    if (dp := getattr(groups, "dp", None)) is None:
        return 0, 1
    ep, expert_tp, tp = (
        1 if (group := getattr(groups, name, None)) is None else group.size()
        for name in ("ep", "expt_tp", "tp")
    )
    together = max(1, ep * expert_tp // tp)
    return dp.rank() // together, dp.size() // together


def is_one_machine() -> bool:
    """Return whether the launcher says that all processes of the job are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "1")


def _connected(groups: Sequence[dist.ProcessGroup], seconds: float, what: str) -> Ranks:
    """Connect the ranks that successive meetings of these groups reach."""
    host = "127.0.0.1" if is_one_machine() else ""
    server = socket.create_server((host, 0), backlog=128)
    with server:
        server.settimeout(CONNECT_SECONDS)
        port = server.getsockname()[1]
        own = own_member(), _own_address(), port, secrets.token_bytes(32)
        known = {dist.get_rank(): own}
        for group in groups:
            met = exchange(what, known, dist.get_process_group_ranks(group), seconds)
            known = {rank: value for _, each in met for rank, value in each.items()}
        numbers = sorted(known)
        members = [known[number][0] for number in numbers]
        rank = numbers.index(dist.get_rank())
        if rank == 0:
            control, watched = _accept(server, own[-1], len(members) - 1)
            connections = [control[other] for other in sorted(control)]
            return Ranks(0, len(members), connections, watched, members)
        first, address, port, secret = known[numbers[0]]
        reach = ("127.0.0.1" if first.host == own[0].host else address), port
        control, watched = (_connect(reach, secret, rank, kind) for kind in ("control", "watch"))
        return Ranks(rank, len(members), [control], {0: watched}, members)


def _connect(address: tuple, secret: bytes, rank: int, kind: str) -> Connection:
    ends = socket.create_connection(address, CONNECT_SECONDS)
    ends.sendall(secret)
    connection = _connection(ends)
    connection.send((rank, kind))
    return connection


def _connection(ends: socket.socket) -> Connection:
    ends.setblocking(True)
    ends.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    ends.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE.items():
        ends.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(ends.detach())


def _accept(
    server: socket.socket, secret: bytes, num_others: int
) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Accept connections for messages and for the watch, and return them by rank."""
    found: dict[str, dict[int, Connection]] = {"control": {}, "watch": {}}
    while sum(map(len, found.values())) < 2 * num_others:
        ends, _ = server.accept()
        if not _knows(ends, secret):
            ends.close()
            continue
        connection = _connection(ends)
        rank, kind = connection.recv()
        found[kind][rank] = connection
    return found["control"], found["watch"]


def _knows(ends: socket.socket, secret: bytes) -> bool:
    """Return whether the process at the other end is one of the job, as others may connect."""
    ends.settimeout(HANDSHAKE_SECONDS)
    said = b""
    with suppress(OSError):
        while len(said) < len(secret) and (more := ends.recv(len(secret) - len(said))):
            said += more
    return secrets.compare_digest(said, secret)


def _own_address() -> str:
    """Find an address of this machine that other machines reach."""
    known = os.environ.get("MASTER_ADDR", "")
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((known, 9))  # sends nothing: it only chooses the interface
        if (address := probe.getsockname()[0]) != "127.0.0.1":
            return address
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


@contextmanager
def fail_together(
    error: type[Exception], whole_job: bool = False, groups: object | None = None
) -> Iterator[None]:
    """Make a context for local work, such as reading files, that succeeds on all ranks of a model
    or on none. Before there is a model, or with whole_job, all ranks of the job take part. No
    collective may run inside. The log says when a rank waits for others.

    Args:
        groups: megatron-core's ProcessGroupCollection of the model; default core's own groups.

    Raises:
        error: on a rank whose work succeeded; the message is that of the first rank that failed,
            which raises its own exception.
    """
    call = sys._getframe(2).f_code.co_name  # after contextlib's frame
    own: Exception | None = None
    try:
        yield
    except Exception as raised:
        own = raised
    joined = _groups(whole_job, groups)
    failure = f"{own_member()}: {own}" if joined and own is not None else None
    for group in joined:
        met = exchange(f"in {call}()", failure, dist.get_process_group_ranks(group))
        failure = next(filter(None, (each for _, each in met)), None)
    if own is not None:
        raise own
    if failure is not None:
        raise error(failure)


def _groups(whole_job: bool, of_model: object | None) -> list[dist.ProcessGroup]:
    """List groups that together connect all ranks with parts of one model, or all of the job."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if of_model is not None:
        return _joined(of_model)
    if whole_job or not parallel_state.model_parallel_is_initialized():
        return [dist.group.WORLD]
    dense = parallel_state.get_model_parallel_group()
    experts = parallel_state.get_expert_tensor_model_pipeline_parallel_group(False)
    return [group for group in (dense, experts) if group is not None and group.size() > 1]
