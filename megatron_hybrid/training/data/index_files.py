"""Files of a dataset: megatron-core's PREFIX.bin and PREFIX.idx, and PREFIX.json, which says what
made them. Conversations have PREFIX.spans.bin and PREFIX.spans.idx, too."""

import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path

from megatron_hybrid.text.document_encoder import SPAN
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.utils.files import digest_of_files

SPANS = ".spans"
"""Suffix of the prefix of files with the answers of each conversation: `SPAN`, as int32."""
_OPTIONS = {
    "pretraining": "without --chat and --preferences",
    "sft": "with --chat",
    "preferences": "with --preferences",
}
_AGAIN = "Remove it, and run `megatron-hybrid preprocess` again."


class Sequences(IndexedDataset):
    """An indexed dataset whose .bin is read, not mapped: a file that is cut meanwhile is an error,
    not a signal that ends the process."""

    def __init__(self, prefix: str):
        super().__init__(prefix, mmap=False)

    def initialize(self, path_prefix: str, *options, **more) -> None:
        super().initialize(path_prefix, *options, **more)
        self.bin_reader = self

    def __del__(self) -> None:
        pass  # core's fails if the index could not be read

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """Read a part of the .bin."""
        path = get_bin_path(self.path_prefix)
        values = np.fromfile(path, dtype, count, offset=offset)
        if len(values) < count:
            raise ValueError(
                f"{path} was cut while it is read: {count} tokens from byte {offset} on are "
                f"{len(values)}. Put the whole file back, or run preprocess again."
            )
        return values


def content_of(prefix: str) -> str:
    """Compute a digest of a dataset's files, which differs if the dataset was made anew."""
    both = [of(each) for each in (prefix, prefix + SPANS) for of in (get_idx_path, get_bin_path)]
    return digest_of_files(path for path in both if os.path.exists(path))


def count_labels(prefix: str, sequence_length: int) -> np.ndarray:
    """Count the labels in the row of each conversation: tokens of its answers, except its first
    token and those that are cut off."""
    sizes = _check_index(prefix + SPANS) // len(SPAN)
    spans = np.fromfile(get_bin_path(prefix + SPANS), SPAN)
    counts = np.minimum(spans["end"], sequence_length + 1) - np.maximum(spans["start"], 1)
    conversations = np.repeat(np.arange(len(sizes)), sizes)
    return np.bincount(conversations, np.maximum(counts, 0), len(sizes))


@dataclass(frozen=True)
class Description:
    """Content of PREFIX.json."""

    kind: str
    """"pretraining", "sft" or "preferences", as in `DataFields`."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    end_token: int | None
    """Id of the token that ends a document; None if the tokenizer has none."""
    documents: int
    """Number of documents or conversations."""
    tokens: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def check_dataset(prefix: str, tokenizer: Tokenizer, kind: str, ends_documents: bool) -> np.ndarray:
    """Check a dataset's files against each other and against the tokenizer.

    Args:
        kind: "pretraining", "sft" or "preferences".
        ends_documents: whether documents must end with the tokenizer's `eod`.

    Returns:
        Tokens of each document, int32.

    Raises:
        ValueError: a file is missing, torn or empty, or was made with another tokenizer or for
            another kind of training.
    """
    lengths = _check_index(prefix)
    path = Path(f"{prefix}.json")
    if path.exists():  # Megatron's own tools write none
        _check_description(prefix, path, tokenizer, kind, lengths)
    elif kind != "pretraining":
        raise ValueError(f"{path} is missing: {prefix} is not a dataset of {kind}")
    if kind != "pretraining":
        spans = _check_index(prefix + SPANS)
        if len(spans) != len(lengths):
            raise ValueError(
                f"{prefix}{SPANS}.idx has {len(spans)} conversations, {prefix}.idx has "
                f"{len(lengths)}. {_AGAIN}"
            )
    if ends_documents and kind == "pretraining":
        _check_ends(prefix, tokenizer, lengths)
    return lengths


def _check_index(prefix: str) -> np.ndarray:
    """Return the lengths of an indexed dataset's sequences. Raise ValueError for torn files."""
    idx, bin_ = Path(get_idx_path(prefix)), Path(get_bin_path(prefix))
    for path, other in ((idx, bin_), (bin_, idx)):
        if not path.is_file():
            lacking = f", though {other} does: the dataset is not whole" if other.exists() else ""
            raise ValueError(
                f"{path} does not exist{lacking}. Run `megatron-hybrid preprocess ... --output "
                f"{prefix.removesuffix(SPANS)}`, or correct the prefix."
            )
    try:
        index = Sequences(prefix).index
    except (AssertionError, ValueError, OverflowError, struct.error) as error:  # core's
        raise ValueError(f"{idx} is not a whole index of a dataset: {error}. {_AGAIN}") from error
    lengths = np.array(index.sequence_lengths)
    total = int(lengths.sum(dtype=np.int64))
    if not total:
        raise ValueError(f"{prefix} has no tokens: its input was empty.")
    expected, size = total * index.dtype_size, bin_.stat().st_size
    if size != expected:
        raise ValueError(
            f"{bin_} has {size} bytes, {expected} belong to the {total} tokens of {idx}. {_AGAIN}"
        )
    return lengths


def _check_description(
    prefix: str, path: Path, tokenizer: Tokenizer, kind: str, lengths: np.ndarray
) -> None:
    try:
        found = Description(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} does not describe a dataset: {error}. {_AGAIN}") from error
    if found.kind != kind:
        raise ValueError(
            f"{prefix} was made for {found.kind}, not for {kind}: make it anew {_OPTIONS[kind]}."
        )
    if found.tokenizer != tokenizer.fingerprint:
        raise ValueError(
            f"{prefix} was made with another tokenizer: {path} has the fingerprint "
            f"{found.tokenizer} ({found.vocab_size} tokens), the model's tokenizer has "
            f"{tokenizer.fingerprint} ({tokenizer.vocab_size} tokens). Make it anew with "
            "`megatron-hybrid preprocess --tokenizer` and the model's tokenizer."
        )
    counts = len(lengths), int(lengths.sum(dtype=np.int64))
    if (found.documents, found.tokens) != counts:
        raise ValueError(
            f"{path} counts {found.documents} documents and {found.tokens} tokens, {prefix}.idx "
            f"has {counts[0]} and {counts[1]}: they are of different runs. {_AGAIN}"
        )


def _check_ends(prefix: str, tokenizer: Tokenizer, lengths: np.ndarray) -> None:
    remedy = "Make it anew with --append-eod, or set reset_at_documents to False."
    if tokenizer.eod is None:
        raise ValueError(
            "the tokenizer has no end-of-document token, so the documents of a row cannot be "
            "separated. Give it an eos_token in tokenizer_config.json, or set reset_at_documents "
            "to False."
        )
    filled, documents = np.flatnonzero(lengths), Sequences(prefix)
    for what, index in (("first", filled[0]), ("last", filled[-1])):
        if (last := documents[index][-1]) != tokenizer.eod:
            raise ValueError(
                f"the {what} document of {prefix} ends with token {last}, not with the "
                f"end-of-document token {tokenizer.eod}. {remedy}"
            )
