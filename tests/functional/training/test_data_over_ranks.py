"""Datasets on two ranks: built once, read alike, and refused on both."""

import pytest
import torch
from index_folders import write_documents
from rank_processes import train_on_ranks

from megatron_hybrid.checkpoints.pretrained import DEMO_FOLDER
from megatron_hybrid.compat import parallel_state
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data.batches import batches
from megatron_hybrid.training.data.config import DataFields
from megatron_hybrid.training.data.datasets import build_datasets

SIZES = {"micro_batch_size": 2, "global_batch_size": 8}
LENGTH = 32


def fields(folder, **more):
    blend = [[2, str(folder / "a")], [1, str(folder / "b")]]
    return DataFields(LENGTH, train=blend, valid=[str(folder / "a")], **more)


def read(folder, ranks):
    """Rows of this rank's batches, and the error of a dataset that the second rank lacks. The
    ranks have replicas of a model."""
    parallel_state.initialize_model_parallel()
    rank = torch.distributed.get_rank()
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    own = fields(folder, cache_path=folder / "cache")
    train, valid, _ = build_datasets(own, tokenizer, (64, 8, 0))
    found = batches(train, **SIZES, data_parallel_rank=rank, data_parallel_size=ranks)
    rows = [batch.tokens.view(-1, LENGTH).tolist() for batch in found]
    if rank == 1:
        own.valid = [str(folder / "missing")]
    try:
        build_datasets(own, tokenizer, (64, 8, 0))
    except ValueError as error:
        return rows, len(valid), str(error)
    return rows, len(valid), None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    for name, base in (("a", 100), ("b", 1000)):
        documents = [[base + i] * (i % 40 + 1) + [tokenizer.eod] for i in range(60)]
        write_documents(path / name, documents, tokenizer)
    return path


def test_two_ranks_read_what_one_reads_and_fail_together(folder, tmp_path):
    found = train_on_ranks(read, 2, tmp_path, folder, 2)
    train, valid, _ = build_datasets(fields(folder), Tokenizer.from_folder(DEMO_FOLDER), (64, 8, 0))
    alone = [batch.tokens.view(-1, LENGTH).tolist() for batch in batches(train, **SIZES)]
    assert len(alone) == 32 and all(len(rows) == 16 for rows, _, _ in found)
    for step in range(8):
        expected = [row for rows in alone[4 * step : 4 * step + 4] for row in rows]
        own = slice(2 * step, 2 * step + 2)
        by_rank = [row for rows, _, _ in found for each in rows[own] for row in each]
        assert sorted(by_rank) == sorted(expected)
    assert [size for _, size, _ in found] == [len(valid)] * 2
    assert "missing.idx does not exist" in found[1][2] and "rank 1 on " in found[0][2]
    assert list((folder / "cache").glob("*shuffle_index.npy"))
