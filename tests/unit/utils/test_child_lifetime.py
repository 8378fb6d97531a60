"""Processes of a run end with those that need them, and so does the lock of its folder."""

import multiprocessing
import os
import select
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
from forks import forked
from waiting import LIMIT_S

from megatron_hybrid.commands.layout import run_on_ranks
from megatron_hybrid.distributed.ranks import RankError
from megatron_hybrid.training.run_lock import LOCK, RunLock
from megatron_hybrid.utils import child_lifetime
from megatron_hybrid.utils.child_lifetime import (
    EndSignal,
    end_with_parent,
    ends_with_launcher,
    forks_end_with_us,
)


def live_on():
    """A signal between two naps is taken; one just before a long sleep waits for its end."""
    while True:
        time.sleep(0.05)


def read_until_closed(descriptor):
    """What was written to a pipe until no process has its other end."""
    text = b""
    while part := os.read(descriptor, 100):
        text += part
    return text


@pytest.fixture
def pipe():
    reads, writes = os.pipe()
    yield reads, writes
    os.close(reads)


def test_forks_are_killed_with_the_process_that_forked_them(pipe):
    reads, writes = pipe

    def fork_twice_and_die():
        with forks_end_with_us():
            forked(lambda: (forked(live_on), live_on()))
        os.kill(os.getpid(), signal.SIGKILL)

    pid = forked(fork_twice_and_die)
    os.close(writes)
    assert select.select([reads], [], [], LIMIT_S)[0]
    assert read_until_closed(reads) == b""
    os.waitpid(pid, 0)


def test_a_rank_ends_whose_launcher_was_killed_before_it_looked(pipe, monkeypatch):
    reads, writes = pipe
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    gone = forked(lambda: None)
    os.waitpid(gone, 0)
    monkeypatch.setenv(child_lifetime.LAUNCHER, str(gone))

    def rank():
        signal.signal(signal.SIGTERM, lambda *_: os.write(writes, b"asked to end"))
        with ends_with_launcher():
            live_on()

    pid = forked(rank)
    os.close(writes)
    assert os.read(reads, 100) == b"asked to end"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_rank_ends_when_its_launcher_was_killed(pipe, monkeypatch, ignored):
    reads, writes = pipe
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(child_lifetime, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(child_lifetime, "GRACE_SECONDS", 0.1)

    def rank():
        def note(number, frame):
            os.write(writes, b"asked to end")

        signal.signal(signal.SIGTERM, note if ignored else signal.SIG_DFL)
        with ends_with_launcher():
            os.write(writes, b"runs, ")
            live_on()

    def launcher():
        forked(rank)
        os.read(started[0], 1)
        os.kill(os.getpid(), signal.SIGKILL)

    started = os.pipe()
    pid = forked(launcher)
    os.close(writes)
    assert os.read(reads, 100) == b"runs, "
    os.write(started[1], b"x")
    assert read_until_closed(reads) == (b"asked to end" if ignored else b"")
    os.waitpid(pid, 0)
    for end in started:
        os.close(end)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_signal_ends_a_server_with_status_0_at_any_time(is_held, number, capfd, pipe):
    """At once while it loads; later it is noted, and a fork that serves nobody ends by it."""
    reads, writes = pipe

    def server():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
        with EndSignal():
            signal.raise_signal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with EndSignal() as end:
            if is_held:
                end.hold()
                pid = forked(lambda: (os.write(writes, b"x"), live_on()))
                os.read(reads, 1)  # a signal that comes while Python forks is lost
                os.kill(pid, number)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (128 + number, -number)
                assert not end.was_sent
            signal.raise_signal(number)
            os._exit(5 if is_held and end.was_sent else 6)

    status = os.waitstatus_to_exitcode(os.waitpid(forked(server), 0)[1])
    os.close(writes)
    assert status == (5 if is_held else 0)
    told = capfd.readouterr().err
    assert ("ended by a signal while the model was loading" in told) != is_held


@pytest.mark.parametrize(("was_sent", "serves", "status"), [(0, 0, 1), (1, 0, 0), (1, 1, 1)])
def test_the_end_of_another_rank_is_orderly_where_all_were_asked(
    was_sent, serves, status, capsys, monkeypatch
):
    """Unless answers were lost with it."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    end = EndSignal()
    end.was_sent, end.serves = was_sent, serves

    monkeypatch.setattr("megatron_hybrid.serving.run.log_lines", lambda rank: None)

    def first():
        raise RankError("rank 0 has ended")

    options = SimpleNamespace(tp=1, pp=1, ep=1)
    assert run_on_ranks(options, [], first, first, end) == status
    assert capsys.readouterr().err == "megatron-hybrid: rank 0 has ended\n" * status


def run_until_killed(writes):
    end_with_parent()
    os.write(writes.fileno(), b"runs")
    time.sleep(600)


def test_a_process_ends_with_its_parent_also_where_a_fork_lives_on():
    """The fork has the pipe by which processes of `multiprocessing` see their parent's end."""
    reads, writes = multiprocessing.Pipe(duplex=False)

    def parent():
        process = multiprocessing.get_context("fork").Process(
            target=run_until_killed, args=(writes,)
        )
        process.start()
        forked(lambda: (writes.close(), time.sleep(600)))
        os.write(started[1], b"x")
        time.sleep(600)

    started = os.pipe()
    pid = forked(parent)
    writes.close()
    assert os.read(reads.fileno(), 4) == b"runs" and os.read(started[0], 1) == b"x"
    _, fork = sorted(psutil.Process(pid).children(), key=lambda each: each.create_time())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_until_closed(reads.fileno()) == b""
    fork.kill()
    for each in started:
        os.close(each)


def test_the_lock_of_a_dead_run_is_taken_over_though_its_forks_live(tmp_path, pipe):
    reads, writes = pipe

    def lock_and_die():
        RunLock(tmp_path)
        forked(lambda: (os.close(writes), os.read(reads, 1)))
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(forked(lock_and_die), 0)
    assert (tmp_path / LOCK).exists()
    RunLock(tmp_path).release()
    os.close(writes)
