"""Checkpoints of a training run: folders of megatron-core's distributed format, whole or not there.

A save fills `iter_0000100.saving` and renames it to `iter_0000100` once all of it is on disk, so a
crash at any moment leaves earlier checkpoints as they were. A file next to the tensors lists the
sizes of all other files; a folder whose files differ is torn, and passed over.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from megatron_hybrid.checkpoints.tensor_files import CheckpointError
from megatron_hybrid.compat import quiet_core, start_save
from megatron_hybrid.distributed.ranks import fail_together
from megatron_hybrid.training.core_save_patch import patch_saves
from megatron_hybrid.training.fields import Fields
from megatron_hybrid.utils.child_lifetime import forks_end_with_us
from megatron_hybrid.utils.files import replace_file

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
"""File with the newest step, as in Megatron-LM."""
_FILES = "files.json"
_SAVING = ".saving"
_NAME = re.compile(r"iter_\d{7,}")

OPTIMIZER_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""Metadata that makes core name an optimizer's states after parameters, for any layout."""


@dataclass
class CheckpointFields(Fields):
    """Fields of the checkpoints of a run: when it saves, and how many it keeps."""

    every_steps: int = 1000
    """Steps between two checkpoints. With 0 there is one checkpoint, at the end."""

    keep: int = 2
    """Number of newest checkpoints that are kept; 0 keeps all."""

    asynchronous: bool = True
    """Write a checkpoint in a separate process while the training continues."""


class Checkpoints:
    """The checkpoints in one folder, shared by all ranks.

    Args:
        folder: the folder of the checkpoints, which the first one makes.
        keep: number of newest checkpoints that a save leaves; 0 leaves all.
        asynchronous: whether `save` returns while files are written.
    """

    def __init__(self, folder: Path, keep: int = 0, asynchronous: bool = False):
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self._queue = AsyncCallsQueue()
        patch_saves()

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint; every rank calls it.

        Args:
            step: the number of the checkpoint.
            state: a sharded state, see `megatron.core.dist_checkpointing`.

        Raises:
            OSError: the folder cannot be written; on all ranks.
            CheckpointError: files cannot be written, such as on a full disk; on all ranks.
        """
        self.finish()  # one at a time
        target = self.folder / f"iter_{step:07d}"
        partial = target.with_name(target.name + _SAVING)
        with fail_together(OSError, whole_job=True):
            if dist.get_rank() == 0:
                for unfinished in self.folder.glob(f"iter_*{_SAVING}"):
                    shutil.rmtree(unfinished)
                partial.mkdir(parents=True)
        with forks_end_with_us(), self._failures():
            with quiet_core():
                request = start_save(state, str(partial))
            request.add_finalize_fn(lambda: self._complete(step, partial, target))
            if self.asynchronous:
                self._queue.schedule_async_request(request)
            else:
                request.execute_sync()

    def finish(self, wait: bool = True) -> bool:
        """Complete the save under way, if its files are written; every rank calls it, also after
        each step. With `wait`, wait for the files.

        Returns:
            Whether a save is still under way.
        """
        with self._failures():
            self._queue.maybe_finalize_async_calls(blocking=wait)
        return self._queue.get_num_unfinalized_calls() > 0

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn core's error, which has whole tracebacks, into a short CheckpointError, and silence
        its logs. Core raises the error of any rank on all ranks."""
        logged = logging.getLogger(dist_checkpointing.__name__)
        level = logged.level
        try:
            logged.setLevel(logging.CRITICAL)
            yield
        except CheckpointException as error:
            free = shutil.disk_usage(self.folder).free >> 20  # torch reports a full disk as a bug
            raise CheckpointError(
                f"a save to {self.folder} has failed, the checkpoints before it are as they were: "
                f"{_last_line(error)} ({free:,} MiB are free on its disk)"
            ) from error
        finally:
            logged.setLevel(level)

    def _complete(self, step: int, partial: Path, target: Path) -> None:
        with fail_together(OSError, whole_job=True):
            if dist.get_rank():
                return
            sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
            (partial / _FILES).write_text(json.dumps(sizes))
            for path in [*partial.iterdir(), partial]:
                _flush(path)
            if target.exists():  # torn, or of a run that resumed before it
                shutil.rmtree(target)
            os.replace(partial, target)
            _flush(self.folder)
            replace_file(self.folder / LATEST, lambda path: path.write_text(str(step)))
            self._prune()

    def _prune(self) -> None:
        whole = [path for path in self._paths() if why_torn(path) is None]
        for path in whole[self.keep :] if self.keep else ():
            # Renamed first: a half removed one must not look whole.
            doomed = path.with_name(path.name + _SAVING)
            os.replace(path, doomed)
            shutil.rmtree(doomed)

    def _paths(self) -> list[Path]:
        """Return the folders of the checkpoints, newest first, whole or not."""
        found = [path for path in self.folder.glob("iter_*") if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("iter_")), reverse=True)

    def newest(self) -> Path | None:
        """Find the newest whole checkpoint, the same on all ranks, which all call it. A warning
        names torn ones."""
        found: list[Path | None] = [None]
        if dist.get_rank() == 0:
            for path in self.folder.glob(f"iter_*{_SAVING}"):
                logger.warning("%s is a save that was not finished: passed over", path)
            for path in self._paths():
                if (why := why_torn(path)) is None:
                    found = [path]
                    break
                logger.warning("%s is torn, %s: passed over", path, why)
        dist.broadcast_object_list(found, src=0)
        return found[0]


def why_torn(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None if it is whole."""
    try:
        sizes = json.loads((path / _FILES).read_text())
    except (OSError, ValueError):
        return f"{_FILES} is missing or broken"
    for name, size in sizes.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} of {size} bytes"
    return None


def read_common(path: Path) -> dict[str, Any]:
    """Read the values of a checkpoint that are not tensors.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    try:
        with quiet_core():
            return dist_checkpointing.load_common_state_dict(str(path))
    except Exception as error:
        raise CheckpointError(f"{path} is no checkpoint of a training run: {error}") from error


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Fill a sharded state with a checkpoint's values; every rank calls it.

    Raises:
        CheckpointError: the checkpoint does not fit, or cannot be read.
    """
    try:
        with torch.no_grad(), quiet_core():  # core writes into views of the parameters
            return dist_checkpointing.load(state, str(path))
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        raise CheckpointError(f"{path} cannot be loaded: {_last_line(error)}") from error


def _last_line(error: BaseException) -> str:
    """Return the last line of an error's message, since core's have whole tracebacks."""
    return str(error).strip().rpartition("\n")[2]


def random_state() -> ShardedObject:
    """Return this rank's random generators, as a part of a state to save or load."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    state["tracker"] = get_cuda_rng_tracker().get_states()
    size = dist.get_world_size()
    return ShardedObject(f"random_state_of_{size}", state, (size,), (dist.get_rank(),))


def set_random_state(state: dict[str, Any]) -> None:
    """Set this rank's random generators from a state of `random_state`."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if state["tracker"]:
        get_cuda_rng_tracker().set_states(state["tracker"])


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that a later rename cannot reach it before."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
