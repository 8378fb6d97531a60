"""Batches: the same rows in any layout, resumed at any row."""

import multiprocessing
import os
import signal
import subprocess

import pytest
import torch
from small_models import small_model
from torch.utils.data import Dataset
from waiting import LIMIT_S

from megatron_hybrid.training.data.batches import Batch, batches


class Numbered(Dataset):
    """Row i is filled with i; its sequences are of i % 7 + 1 tokens and of the rest."""

    def __len__(self):
        return 50

    def __getitem__(self, i):
        tokens = torch.full((8,), i)
        lengths = [n for n in (i % 7 + 1, 7 - i % 7) if n]
        return {"tokens": tokens, "labels": -tokens, "loss_mask": torch.ones(8), "lengths": lengths}


def read(size, rank=0, ranks=1, **more):
    found = batches(
        Numbered(),
        micro_batch_size=size,
        global_batch_size=12,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        **more,
    )
    return [batch.tokens[0, ::8].tolist() for batch in found]


@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (3, 1), (1, 4), (2, 3), (6, 2)])
def test_every_layout_reads_the_same_global_batches(size, ranks):
    by_rank = [read(size, rank, ranks) for rank in range(ranks)]
    steps = 12 // (size * ranks)
    assert {len(own) for own in by_rank} == {4 * steps}
    for step in range(4):
        own = slice(step * steps, (step + 1) * steps)
        samples = [i for rank in by_rank for micro_batch in rank[own] for i in micro_batch]
        assert sorted(samples) == list(range(step * 12, step * 12 + 12))


def test_a_run_goes_on_where_it_stopped():
    assert read(3, consumed_samples=24) == read(3)[8:]
    assert read(2, 1, 2, consumed_samples=12) == read(2, 1, 2)[3:]


def test_reading_ahead_changes_nothing():
    assert read(3, workers=2) == read(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_is_that_of_the_data(workers):
    class Broken(Numbered):
        def __getitem__(self, i):
            raise ValueError("a.bin: is cut")

    found = batches(Broken(), micro_batch_size=1, global_batch_size=12, workers=workers)
    with pytest.raises(ValueError, match=r"^a.bin: is cut$"):
        next(found)


class FromProcess(Numbered):
    """Rows filled with the number of the process that reads them."""

    def __getitem__(self, i):
        return {**super().__getitem__(i), "tokens": torch.full((8,), os.getpid())}


@pytest.fixture
def worker():
    """An iterator of batches, and the number of the process that reads them."""
    found = batches(FromProcess(), micro_batch_size=1, global_batch_size=12, workers=1)
    number = int(next(found).tokens[0, 0])
    assert number != os.getpid()
    return found, number


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_workers_outlive_signals_to_all_processes(worker, kind):
    found, number = worker
    # From another process than theirs.
    subprocess.run(["sh", "-c", f"kill -{kind.value} {number}"], check=True)
    assert len(list(found)) == 47


def test_workers_end_by_their_process(worker):
    _, number = worker
    (process,) = (one for one in multiprocessing.active_children() if one.pid == number)
    process.terminate()
    process.join(LIMIT_S)
    assert process.exitcode == 0


def test_reading_draws_no_random_numbers():
    state = torch.get_rng_state()
    read(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_sequences_are_cut_without_moving_a_token():
    batch = Batch.of([Numbered()[i] for i in (2, 6)])
    cut = batch.cut(3)
    assert cut.lengths == [3, 3, 2, 3, 3, 1, 1] and torch.equal(cut.tokens, batch.tokens)
    assert batch.cut(8).lengths == batch.lengths


@pytest.mark.parametrize("most", [8, 3])
def test_a_model_takes_a_batch_as_sequences_that_are_alone(most):
    model = small_model()
    batch = Batch.of([Numbered()[i] for i in (2, 6)]).cut(most)
    batch.labels, params = batch.tokens.roll(-1), batch.packed_seq_params()
    assert params.cu_seqlens_q.dtype == torch.int32 and params.qkv_format == "thd"
    loss = model(batch.tokens, labels=batch.labels, packed_seq_params=params)
    parts = zip(batch.tokens.split(batch.lengths, 1), batch.labels.split(batch.lengths, 1))
    alone = torch.cat([model(tokens, labels=labels) for tokens, labels in parts], 1)
    torch.testing.assert_close(loss, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"micro_batch_size": 5}, "global_batch_size is 12, no multiple of the 10 rows of micro_b"),
        ({"consumed_samples": 39}, "after 39 of 50 rows there is no global batch of 12"),
        ({"consumed_samples": -1}, "after -1 of 50"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    good = {"micro_batch_size": 3, "global_batch_size": 12, "data_parallel_size": 2}
    with pytest.raises(ValueError, match=match):
        batches(Numbered(), **{**good, **arguments})
