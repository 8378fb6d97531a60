"""Processes for the ranks of a test, forked from one that has imported everything."""

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_hybrid.training.core_cpu_patch import core_cpu_patch

PRELOADED = [
    "megatron_hybrid.inference.engine",
    "megatron_hybrid.checkpoints.pretrained",
    "megatron_hybrid.training.trainer",
    "torch._dynamo",  # which optimizers import
    "pytest",
]


def rank_context():
    """The `multiprocessing` context of rank processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start_ranks(worker: Callable, num_ranks: int, *args: Any) -> list:
    """Start `worker(rank, *args)` on each of as many new processes, and return these."""
    context = rank_context()
    processes = [context.Process(target=worker, args=(n, *args)) for n in range(num_ranks)]
    for process in processes:
        process.start()
    return processes


def run_ranks(worker, arguments: tuple, num_ranks: int) -> None:
    """Run `worker(rank, *arguments)` on all ranks; if one fails, this fails with its error."""
    rank_context()
    mp.start_processes(worker, arguments, num_ranks, start_method="forkserver")


def told_by_torchrun(rank: int, num_ranks: int, port: int) -> None:
    """Set what torchrun tells a rank of this machine."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    names |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), num_ranks)
    os.environ.update({name: str(value) for name, value in names.items()})


def join_ranks(rank: int, num_ranks: int, rendezvous: str) -> None:
    """Join the ranks of a worker on gloo, with one thread each. rendezvous: path of a new file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=120),
    )


def on_ranks(work: Callable, num_ranks: int, folder: Path, *args: Any) -> list[Any]:
    """Return what `work(*args)` does on each of as many new processes on gloo.

    Args:
        work: a function at the top of a module.
        num_ranks: processes to start, of one thread each.
        folder: an empty one, for the rendezvous and the results; made if it is not there.
        args: what can be pickled.
    """
    folder.mkdir(exist_ok=True)
    run_ranks(_run_rank, (num_ranks, folder, work, args), num_ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _run_rank(rank: int, num_ranks: int, folder: Path, work: Callable, args: tuple) -> None:
    join_ranks(rank, num_ranks, f"{folder}/rendezvous")
    torch.save(work(*args), folder / f"{rank}.pt")
    dist.destroy_process_group()


def train_on_ranks(work: Callable, num_ranks: int, folder: Path, *args: Any) -> list[Any]:
    """As `on_ranks`, under `core_cpu_patch`."""
    return on_ranks(_train, num_ranks, folder, work, args)


def _train(work: Callable, args: tuple) -> Any:
    with core_cpu_patch():
        return work(*args)


def run_micro_batches(step: Callable, model: torch.nn.Module, batches: list, length: int) -> list:
    """Run core's schedule, forward and backward, over micro batches of one row of this length.
    Returns the reports of its forward steps."""
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=length,
        micro_batch_size=1,
        forward_only=False,
    )
