"""The ranks of a server: how many its layout needs, and their processes."""

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_hybrid.checkpoints.checkpoint import read_config
from megatron_hybrid.checkpoints.pretrained import checked_device, checked_folder
from megatron_hybrid.models.sharding.parallel_setup import ranks_needed
from megatron_hybrid.utils.child_lifetime import GRACE_SECONDS, LAUNCHER, end_signals

_POLL_SECONDS = 0.1
_HOST = "127.0.0.1"


def job_size() -> int | None:
    """Return the number of processes in the job of a launcher such as torchrun, or None if no
    launcher has started this process."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size and "RANK" in os.environ else None


def check_layout(folder: str, sizes: Mapping[str, int], device: str | None) -> int:
    """Return the number of ranks that a model needs, after checks of the layout and the machine.

    Args:
        folder: that of the model.
        sizes: fields of HybridConfig, such as tensor_model_parallel_size.
        device: that was asked for; None means the GPUs, if there are any.

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
    """Return the rank of this process, and take its GPU; or None if there is one rank. `device` is
    that of `check_layout`."""
    if num_ranks == 1:
        return None
    warnings.filterwarnings("ignore", "When using async grad allreduce")  # of training
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    return int(os.environ["RANK"])


def launch(arguments: Sequence[str], num_ranks: int) -> int:
    """Run Python on ranks on this machine until all have ended, and pass on signals to them. If one
    fails, the others are ended.

    Args:
        arguments: those after `python`.
        num_ranks: processes to start.

    Returns:
        The exit status: that of the first rank that failed, 1 if a signal has ended that rank, or 0
        after a SIGTERM to this process.
    """
    server = socket.create_server((_HOST, 0))
    port = server.getsockname()[1]
    # The ranks' store is here, so that nobody takes its port before rank 0 would.
    store = dist.TCPStore(
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    shared = {
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // num_ranks)),
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "megatron_hybrid",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        LAUNCHER: str(os.getpid()),  # so that ranks notice its end before they look for it
    }
    asked: list[int] = []
    numbers = signal.SIGINT, *end_signals()
    before = {n: signal.signal(n, lambda number, _: asked.append(number)) for n in numbers}
    ranks: list[subprocess.Popen] = []
    try:
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, *arguments]
            # A session of its own: a terminal's Ctrl-C comes once, from here.
            ranks.append(subprocess.Popen(command, env=shared | own, start_new_session=True))
        return _wait(ranks, asked)
    finally:
        _end(ranks)
        del store
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen], asked: Sequence[int]) -> int:
    """Wait until all ranks have ended, or one has failed, and pass on the signals in `asked` as
    they come. Return the exit status."""
    num_told = 0
    while True:
        statuses = [each.poll() for each in ranks]
        for rank, status in enumerate(statuses):
            if status:
                return _status(rank, ranks[rank], asked)
        if None not in statuses:
            return 0
        if num_told < len(asked):
            for each in ranks:
                each.send_signal(asked[num_told])
            num_told += 1
        time.sleep(_POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    """Terminate the ranks that run, and kill those that take longer than `GRACE_SECONDS`."""
    for each in ranks:
        each.terminate()
    last = time.monotonic() + GRACE_SECONDS
    for each in ranks:
        try:
            each.wait(max(0, last - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.kill()
            each.wait()


def _status(rank: int, process: subprocess.Popen, asked: Sequence[int]) -> int:
    """Return the exit status after a rank has failed. Report that, unless a signal asked for it."""
    status = process.returncode
    for number in asked:  # before the rank had taken its signals
        if status in (-number, 128 + number):
            return 128 + number if number == signal.SIGINT else 0
    how = "has failed, as it says above"
    if status < 0:
        how = f"was ended by {signal.Signals(-status).name}"
    print(
        f"megatron-hybrid: rank {rank} (process {process.pid}) {how}: the server has ended",
        file=sys.stderr,
    )
    return 1 if status < 0 else status
