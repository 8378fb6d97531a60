"""Processes for the ranks of a test, forked from one that has imported everything."""

import multiprocessing
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ["megatron_hybrid.inference.engine", "megatron_hybrid.checkpoints.pretrained"]


def rank_context():
    """The `multiprocessing` context of rank processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_ranks(worker, arguments: tuple, num_ranks: int) -> None:
    """Run `worker(rank, *arguments)` on all ranks; if one fails, this fails with its error."""
    rank_context()
    mp.start_processes(worker, arguments, num_ranks, start_method="forkserver")


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
