"""Datasets of a test, written by megatron-core's own builder."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_hybrid.text.document_encoder import SPAN
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.training.data.index_files import SPANS, Description


def write_index(prefix: Path | str, items: Sequence[Sequence[int]], dtype=np.uint16) -> None:
    """PREFIX.bin and PREFIX.idx."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for item in items:
        builder.add_item(torch.as_tensor(item, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], tokenizer: Tokenizer) -> str:
    """A dataset for pretraining, as preprocess writes it. Returns its prefix."""
    write_index(prefix, documents)
    _describe(prefix, "pretraining", documents, tokenizer)
    return str(prefix)


def write_conversations(
    prefix: Path,
    conversations: Sequence[Sequence[int]],
    answers: Sequence[Sequence[tuple]],
    tokenizer: Tokenizer,
    kind: str = "sft",
) -> str:
    """A dataset of this kind; answers: (start, end, weight=1) in each conversation."""
    write_index(prefix, conversations)
    whole = [np.array([(*span, 1.0)[:3] for span in spans], SPAN) for spans in answers]
    write_index(f"{prefix}{SPANS}", [spans.view(np.int32) for spans in whole], np.int32)
    _describe(prefix, kind, conversations, tokenizer)
    return str(prefix)


def _describe(prefix: Path, kind: str, documents: Sequence, tokenizer: Tokenizer) -> None:
    tokens = sum(map(len, documents))
    sizes = tokenizer.vocab_size, tokenizer.eod, len(documents), tokens
    Description(kind, tokenizer.fingerprint, *sizes).write(Path(f"{prefix}.json"))
