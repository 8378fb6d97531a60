"""The ranks of a server: how many its layout needs, and torch's elastic launcher for them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_hybrid.checkpoints.checkpoint import read_config
from megatron_hybrid.checkpoints.pretrained import checked_device, checked_folder
from megatron_hybrid.models.sharding.parallel_setup import ranks_needed
from megatron_hybrid.utils.child_lifetime import LAUNCHER
from megatron_hybrid.utils.daemon_threads import DaemonThreads

_POLL_SECONDS = 0.1
_HOST, _BACKEND = "127.0.0.1", "loopback"


def job_size() -> int | None:
    """Processes of the job that a launcher such as torchrun has started this one in; None: no
    launcher has."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size and "RANK" in os.environ else None


def check_layout(folder: str, sizes: Mapping[str, int], device: str | None) -> int:
    """The number of ranks that a model needs, which are started here or are there.

    Args:
        folder: of the model.
        sizes: fields of HybridConfig, such as tensor_model_parallel_size.
        device: that was asked for; None: the GPUs, if there are any.

    Raises:
        ValueError: the model does not divide so, this machine has too few GPUs for it, or the job
            of the launcher has another size.
    """
    needed, size = ranks_needed(read_config(checked_folder(folder), **sizes)), job_size()
    if size not in (None, needed):
        raise ValueError(
            f"this layout needs {needed} ranks, and WORLD_SIZE is {size}: start it with torchrun "
            f"--nproc-per-node {needed}, or without a launcher; a server has one model, so start "
            "another server for each replica"
        )
    if needed == 1:
        return needed
    if device not in (None, "cpu", "cuda"):
        raise ValueError(
            f"--device is {device!r}, and there are {needed} ranks: use cuda, where each takes the "
            "GPU of its number on its machine, or cpu"
        )
    checked_device(device)
    found, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", needed))
    if device != "cpu" and torch.cuda.is_available() and local > found:
        raise ValueError(
            f"{local} ranks on this machine need {local} GPUs, and it has {found}: use fewer "
            "ranks, --device cpu, or torchrun on several machines"
        )
    return needed


def take_rank(num_ranks: int, device: str | None) -> int | None:
    """The rank of this process, which takes its GPU, if there are several ranks; None: one. device:
    as for `check_layout`."""
    if num_ranks == 1:
        return None
    warnings.filterwarnings("ignore", "When using async grad allreduce")  # of training
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    return int(os.environ["RANK"])


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run Python on ranks on this machine, until all have ended, and pass on SIGTERM and Ctrl-C to
    them. If one fails, the others are ended.

    Args:
        arguments: after `python`.
        num_ranks: processes to start.

    Returns:
        The exit status, that of the first rank that failed; 1 if a signal has ended it; 0 after a
        SIGTERM to this process.
    """
    logging.disable(logging.CRITICAL)  # of torch: what it says about a failed rank is said here
    threads = max(1, torch.get_num_threads() // num_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ[LAUNCHER] = str(os.getpid())  # so that ranks notice its end before they look for it
    asked: list[int] = []
    others = psutil.Process().children()
    numbers = signal.SIGINT, signal.SIGTERM
    before = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in numbers}
    try:
        with TemporaryDirectory() as folder:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_ranks,
                run_id="megatron_hybrid",
                rdzv_backend=_BACKEND,
                local_addr=_HOST,
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
            # Not in the main thread: there it would take the signals, and give ranks 30 s.
            run = partial(elastic_launch(config, sys.executable), *arguments)
            job, told = DaemonThreads("launcher", 1).submit(run), 0
            while not job.done():
                time.sleep(_POLL_SECONDS)
                if told == len(asked):
                    continue
                if ranks := [each for each in psutil.Process().children() if each not in others]:
                    for rank in ranks:
                        with suppress(psutil.NoSuchProcess):
                            rank.send_signal(asked[told])
                    told += 1
            job.result()
    except ChildFailedError as error:
        return _status(*error.get_first_failure(), asked)
    finally:
        del os.environ[LAUNCHER]
        for number, handler in before.items():
            signal.signal(number, handler)
        logging.disable(logging.NOTSET)
    return 0


def _status(rank: int, failure: ProcessFailure, asked: Sequence[int]) -> int:
    """The exit status after the failure of a rank, which is told unless it was asked for."""
    for number in asked:  # before the rank had taken its signals
        if failure.exitcode in (-number, 128 + number):
            return 0 if number == signal.SIGTERM else 128 + number
    was_killed = failure.exitcode < 0
    how = f"was ended by {failure.signal_name()}" if was_killed else "has failed, as it says above"
    print(
        f"megatron-hybrid: rank {rank} (process {failure.pid}) {how}: the server has ended",
        file=sys.stderr,
    )
    return 1 if was_killed else failure.exitcode


class _Loopback(RendezvousHandler):
    """The meeting of the only launcher with itself. torch's own ones listen on all addresses of the
    machine, and ranks read what they find there."""

    def __init__(self, run_id: str):
        self._run_id = run_id
        server = socket.create_server((_HOST, 0))
        self._port = server.getsockname()[1]
        self._store = dist.TCPStore(
            _HOST,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_HOST, self._port))

    def get_backend(self) -> str:
        return _BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _loopback(parameters: RendezvousParameters) -> RendezvousHandler:
    return _Loopback(parameters.run_id)


rendezvous_handler_registry.register(_BACKEND, _loopback)
