"""Checkpoints of a run: whole or not there, whenever the process is killed."""

import json
import multiprocessing
import os
import queue
import resource
import shutil
import signal
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from rank_processes import join_ranks, rank_context
from stock_megatron import core_groups
from waiting import LIMIT_S, is_running, wait_until

from megatron_hybrid.training import checkpoints as module
from megatron_hybrid.training.checkpoints import Checkpoints, load, why_torn
from megatron_hybrid.training.core_cpu_patch import core_cpu_patch
from megatron_hybrid.training.core_save_patch import SaveResults


def state(step):
    weights = torch.full((64, 32), float(step))
    return {"step": step, "weights": ShardedTensor.from_rank_offsets("weights", weights)}


def steps_of(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*") if "." not in path.name)


@pytest.fixture(autouse=True)
def on_cpu():
    core_groups()
    with core_cpu_patch():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the steps 1 and 2."""
    core_groups()
    folder = tmp_path_factory.mktemp("saved")
    with core_cpu_patch():
        for step in (1, 2):
            Checkpoints(folder).save(step, state(step))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def check_newest(folder, *allowed):
    """The newest whole checkpoint is one of these, and has what was saved."""
    path = Checkpoints(folder).newest()
    step = int(path.name[5:])
    assert step in allowed
    loaded = load(path, state(0))
    assert loaded["step"] == step and (loaded["weights"] == step).all()


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert Checkpoints(tmp_path).newest() is None
    assert Checkpoints(tmp_path / "missing").newest() is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_ones_are_kept(folder, asynchronous):
    checkpoints = Checkpoints(folder, keep=2, asynchronous=asynchronous)
    for step in (3, 4):
        checkpoints.save(step, state(step))
    while checkpoints.finish(wait=False):
        pass
    assert steps_of(folder) == [3, 4]
    assert not list(folder.glob("*.saving"))
    check_newest(folder, 4)


def test_saves_leave_neither_processes_nor_files_behind(folder, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    before = set(multiprocessing.active_children())  # of other tests
    checkpoints = Checkpoints(folder, asynchronous=True)
    checkpoints.save(3, state(3))
    checkpoints.finish()
    assert set(multiprocessing.active_children()) <= before
    assert list((tmp_path / "elsewhere").iterdir()) == []
    check_newest(folder, 3)


def test_results_are_taken_once():
    results = SaveResults()
    for value in ({0: ["written"]}, RuntimeError("disk full")):
        results.put(value)
        assert repr(results.get_nowait()) == repr(value)
        with pytest.raises(queue.Empty):
            results.get_nowait()


def test_a_torn_one_does_not_count_as_kept(folder):
    torn = folder / "iter_0000002"
    (torn / "__0_0.distcp").unlink()
    Checkpoints(folder, keep=2).save(3, state(3))
    assert why_torn(folder / "iter_0000001") is None  # the second whole one


@pytest.mark.parametrize(
    ("tear", "why"),
    [
        (lambda path: os.truncate(path / "__0_0.distcp", 100), "__0_0.distcp has 100 of"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda path: (path / "files.json").unlink(), "files.json is missing"),
        (lambda path: path.rename(f"{path}.saving"), "a save that was not finished"),
    ],
)
def test_a_torn_one_is_named_and_passed_over(folder, caplog, tear, why):
    tear(folder / "iter_0000002")
    check_newest(folder, 1)
    (record,) = [one for one in caplog.records if one.name == module.__name__]
    assert "iter_0000002" in record.message and why in record.message
    assert "passed over" in record.message


class Killed(BaseException):
    """In the place of a kill, which leaves the same on the disk."""


def save_until(folder, call, die, asynchronous=False):
    """Save step 3, and die at this call of what changes the disk."""
    calls = 0

    def counted(function):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                die()
            return function(*args, **kwargs)

        return wrapped

    with (
        mock.patch.object(module, "_flush", counted(module._flush)),
        mock.patch.object(os, "replace", counted(os.replace)),
        mock.patch.object(shutil, "rmtree", counted(shutil.rmtree)),
    ):
        checkpoints = Checkpoints(folder, keep=2, asynchronous=asynchronous)
        checkpoints.save(3, state(3))
        if asynchronous:
            die()


def check_after_death(folder):
    check_newest(folder, 2, 3)
    Checkpoints(folder, keep=2).save(4, state(4))
    check_newest(folder, 4)
    assert steps_of(folder) in ([2, 4], [3, 4])


def test_death_at_any_call_leaves_a_whole_one(saved, tmp_path):
    """Calls: the disk for each file and the folder, the rename, the disk for it, the number of the
    newest, the removal of the oldest."""
    for call in range(1, 30):
        folder = shutil.copytree(saved, tmp_path / str(call))
        try:
            save_until(folder, call, mock.Mock(side_effect=Killed))
            break
        except Killed:
            check_after_death(folder)
    assert call > 8 and steps_of(folder) == [2, 3]


def kill_itself():
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    Path("processes").write_text(json.dumps(pids))
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_be_killed(folder, rendezvous, asynchronous):
    os.chdir(folder.parent)
    join_ranks(0, 1, rendezvous)
    hangs = mock.patch.object(os, "fsync", lambda descriptor: time.sleep(600))
    with core_cpu_patch(), hangs if asynchronous else nullcontext():
        save_until(folder, 3, kill_itself, asynchronous)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_leaves_a_whole_one_and_no_process(folder, tmp_path, asynchronous):
    arguments = (folder, str(tmp_path / "rendezvous"), asynchronous)
    process = rank_context().Process(target=save_and_be_killed, args=arguments)
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == -signal.SIGKILL
    left = json.loads((tmp_path / "processes").read_text())
    assert len(left) >= asynchronous
    wait_until(lambda: not any(map(is_running, left)))
    check_after_death(folder)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_without_room_on_the_disk_is_one_error(folder, capfd, asynchronous):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(folder, asynchronous=asynchronous)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            module.CheckpointError, match=r"run has failed, .* MiB are free on its disk\)$"
        ):
            checkpoints.save(3, state(3))
            checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capfd.readouterr() == ("", "")
    check_newest(folder, 2)


def test_one_that_does_not_fit_is_an_error(folder):
    other = {"other": ShardedTensor.from_rank_offsets("other", torch.zeros(3))}
    with pytest.raises(module.CheckpointError, match="iter_0000002 cannot be loaded"):
        load(folder / "iter_0000002", other)
