"""Processes of a run end with those that need them, and so does the lock of its folder."""

import os
import signal
import socket
import time

import pytest

from megatron_hybrid import process_life
from megatron_hybrid.process_life import ends_with_launcher, forks_end_with_us
from megatron_hybrid.training.run_lock import LOCK, RunLock


def in_fork(work):
    """Run `work()` in a fork. Returns its pid."""
    if (pid := os.fork()) == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


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
            in_fork(lambda: (in_fork(lambda: time.sleep(600)), time.sleep(600)))
        os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    pid = in_fork(fork_twice_and_die)
    os.close(writes)
    assert read_until_closed(reads) == b""
    assert time.monotonic() - began < 60
    os.waitpid(pid, 0)


def test_a_rank_ends_whose_launcher_was_killed_before_it_looked(pipe, monkeypatch):
    reads, writes = pipe
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    gone = in_fork(lambda: None)
    os.waitpid(gone, 0)
    monkeypatch.setenv(process_life.LAUNCHER, str(gone))

    def rank():
        signal.signal(signal.SIGTERM, lambda *_: os.write(writes, b"asked to end"))
        with ends_with_launcher():
            time.sleep(60)  # a signal does not end it

    pid = in_fork(rank)
    os.close(writes)
    assert os.read(reads, 100) == b"asked to end"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_rank_ends_when_its_launcher_was_killed(pipe, monkeypatch, ignored):
    reads, writes = pipe
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(process_life, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(process_life, "GRACE_SECONDS", 0.1)

    def rank():
        def note(number, frame):
            os.write(writes, b"asked to end")

        signal.signal(signal.SIGTERM, note if ignored else signal.SIG_DFL)
        with ends_with_launcher():
            os.write(writes, b"runs, ")
            while True:
                time.sleep(1)

    def launcher():
        in_fork(rank)
        os.read(started[0], 1)
        os.kill(os.getpid(), signal.SIGKILL)

    started = os.pipe()
    pid = in_fork(launcher)
    os.close(writes)
    assert os.read(reads, 100) == b"runs, "
    os.write(started[1], b"x")
    assert read_until_closed(reads) == (b"asked to end" if ignored else b"")
    os.waitpid(pid, 0)
    for end in started:
        os.close(end)


def test_a_second_run_is_refused_with_pid_host_and_age_of_the_first(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(OSError) as error:
        RunLock(tmp_path)
    holder = f"by process {os.getpid()} on {socket.gethostname()}, since 00:00:0"
    assert holder in str(error.value) and f"the folder {tmp_path} belongs to" in str(error.value)
    lock.release()
    assert not (tmp_path / LOCK).exists()
    RunLock(tmp_path).release()


def test_the_lock_of_a_dead_run_is_taken_over_though_its_forks_live(tmp_path, pipe):
    reads, writes = pipe

    def lock_and_die():
        RunLock(tmp_path)
        in_fork(lambda: (os.close(writes), os.read(reads, 1)))
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_fork(lock_and_die), 0)
    assert (tmp_path / LOCK).exists()
    RunLock(tmp_path).release()
    os.close(writes)
