"""Batches of packed sequences, in an order that no layout of ranks changes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class _Columns(dict[str, Tensor]):
    def __missing__(self, name: str) -> Tensor:
        raise ValueError(
            f"a loss asks for the column {name!r} of a batch that has {[*self]}: rows of a dataset "
            'give "columns", and `needs_reference = True` of the loss gives "reference"'
        )


@dataclass
class Batch:
    """A micro-batch: one row of T = micro_batch_size * sequence_length tokens."""

    tokens: Tensor
    """int64 [1, T]."""
    labels: Tensor
    """int64 [1, T]: for each token the next one of its sequence, or any token for the last one."""
    loss_mask: Tensor
    """fp32 [1, T]: weights of the labels. Those of weight 0, which may be all, do not count."""
    lengths: list[int]
    """Lengths of the sequences in the row; their sum is T."""
    padding_mask: Tensor | None = None
    """bool [1, T]: True for tokens that only fill the row; None if there are none."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """Further inputs of a loss, [1, T] by name. "reference" are fp32 log-probabilities of the
    labels by the reference policy."""

    def __post_init__(self) -> None:
        self.columns = _Columns(self.columns)

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> Batch:
        """Join rows of a dataset, such as one of `build_datasets`. Rows may have "columns", too."""
        tokens, labels, loss_mask = (
            torch.cat([row[name] for row in rows])[None]
            for name in ("tokens", "labels", "loss_mask")
        )
        padding_mask = None
        if any(row.get("padding") for row in rows):
            sizes = [(len(row["tokens"]), row.get("padding", 0)) for row in rows]
            padding_mask = torch.cat([torch.arange(n) >= n - fill for n, fill in sizes])[None]
        lengths = [n for row in rows for n in row["lengths"]]
        columns = {
            name: torch.cat([row["columns"][name] for row in rows])[None]
            for name in rows[0].get("columns", ())
        }
        return cls(tokens, labels, loss_mask, lengths, padding_mask, columns)

    def packed_seq_params(self) -> PackedSeqParams:
        """Return the boundaries of the sequences in host memory, where the model reads them."""
        boundaries = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        longest = max(self.lengths)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to a device."""
        own = {name: one.to(device) for name, one in vars(self).items() if isinstance(one, Tensor)}
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return replace(self, **own, columns=columns)

    def cut(self, most: int) -> Batch:
        """Cut the same tokens into sequences of at most `most` tokens, for a warm-up of the
        sequence length (Li et al. 2022, arXiv:2108.06084)."""
        pieces = ([*[most] * (n // most), n % most] for n in self.lengths)
        return replace(self, lengths=[n for n in chain.from_iterable(pieces) if n])


def count_micro_batches(
    global_batch_size: int, micro_batch_size: int, data_parallel_size: int
) -> int:
    """Count a rank's micro-batches in a global batch. Raise ValueError if it does not divide."""
    rows = micro_batch_size * data_parallel_size
    if rows < 1 or global_batch_size < 1 or global_batch_size % rows:
        raise ValueError(
            f"global_batch_size is {global_batch_size}, no multiple of the {rows} rows of "
            f"micro_batch_size={micro_batch_size} on {data_parallel_size} data-parallel ranks. "
            "Change one of them."
        )
    return global_batch_size // rows


def batches(
    dataset: Dataset,
    *,
    micro_batch_size: int,
    global_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    consumed_samples: int = 0,
    workers: int = 0,
) -> Iterator[Batch]:
    """Iterate over the micro-batches of one data-parallel rank.

    A global batch is the next global_batch_size rows of the dataset in any layout, which only
    decides who reads which of them. So a run needs only consumed_samples to go on. A global batch
    gives every rank global_batch_size / (micro_batch_size * data_parallel_size) micro-batches. The
    iterator ends when the dataset has no whole global batch left.

    Args:
        consumed_samples: rows to leave out, of all ranks together.
        workers: processes that read ahead; with 0 rows are read when they are asked for.

    Raises:
        ValueError: the global batch does not divide over ranks and micro-batches, or the dataset
            has no whole global batch left.
    """
    count_micro_batches(global_batch_size, micro_batch_size, data_parallel_size)
    step = micro_batch_size * data_parallel_size
    last = len(dataset) - global_batch_size
    if not 0 <= consumed_samples <= last:
        raise ValueError(
            f"after {consumed_samples} of {len(dataset)} rows there is no global batch of "
            f"{global_batch_size}: build the dataset with more samples."
        )
    own = data_parallel_rank * micro_batch_size
    starts = (
        first + own
        for batch in range(consumed_samples, last + 1, global_batch_size)
        for first in range(batch, batch + global_batch_size, step)
    )
    loader = DataLoader(
        dataset,
        batch_sampler=(list(range(start, start + micro_batch_size)) for start in starts),
        collate_fn=Batch.of,
        num_workers=workers,
        worker_init_fn=_outlive_signals,
        generator=torch.Generator(),  # otherwise it draws from torch's own
    )
    return _with_plain_errors(loader)


def _with_plain_errors(loader: DataLoader) -> Iterator[Batch]:
    """Yield batches. Raise a worker's error as it was, without the trace that torch adds."""
    try:
        yield from loader
    except ValueError as error:
        if loader.num_workers:
            *_, line = str(error).strip().splitlines()
            raise ValueError(line.partition(": ")[2] or line) from error
        raise


def _outlive_signals(_: int) -> None:
    """Ignore a terminal's Ctrl-C and a launcher's SIGTERM in a worker: a run that ends after its
    step still reads. Only a SIGTERM of its rank, which the rank sends at its end, ends a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        threading.Thread(target=_end_by, args=(os.getppid(),), daemon=True).start()


def _end_by(rank: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != rank:
        pass
    os._exit(0)
