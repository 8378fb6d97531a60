"""Datasets of rows: megatron-core's, with the lengths of the sequences in each row."""

import hashlib
import json
import logging
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from torch import Tensor

from megatron_hybrid.text.document_encoder import SPAN
from megatron_hybrid.training.data.index_files import SPANS, Sequences, content_of, count_labels

logger = logging.getLogger(__name__)


class DocumentRows(GPTDataset):
    """Rows cut from joined documents. With `config.reset_attention_mask` each piece of a document
    is a sequence of its own, otherwise the whole row is one."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Sequences:
        return Sequences(dataset_path)

    def _build_document_sample_shuffle_indices(self) -> Any:
        # Core finds a cached order of rows by a hash of the request, with the path of the dataset,
        # where another one may lie by now.
        self.unique_identifiers["content"] = content_of(self.dataset_path)
        description = json.dumps(
            self.unique_identifiers, indent=4, default=lambda part: part.unique_identifiers
        )
        self.unique_description = description
        self.unique_description_hash = hashlib.md5(
            description.encode(), usedforsecurity=False
        ).hexdigest()
        return super()._build_document_sample_shuffle_indices()

    def __getitem__(self, index: int | None) -> dict[str, Any]:
        item = super().__getitem__(index)
        tokens = item["tokens"]
        _check_tokens(tokens, self.config, self.dataset_path)
        ends = []
        if self.config.reset_attention_mask:
            ends = (torch.nonzero(tokens == self.config.tokenizer.eod).flatten() + 1).tolist()
        if not ends or ends[-1] < len(tokens):
            ends.append(len(tokens))
        row = {name: item[name] for name in ("tokens", "labels", "loss_mask")}
        return {**row, "lengths": np.diff([0, *ends]).tolist()}


class ConversationRows(MegatronDataset):
    """Rows packed with whole conversations, in another order in each epoch.

    A conversation of n tokens is a sequence of n - 1: each token but the last predicts the next
    one. Only the beginning of a conversation longer than a row is used, and a conversation without
    a label there is left out. The rest of a row is a sequence of padding.
    """

    group = 1
    """Conversations that stay together in a row, each in its own part of it."""

    def __init__(
        self,
        dataset: Sequences,
        dataset_path: str,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.unique_identifiers["content"] = content_of(dataset_path)
        self.spans = Sequences(dataset_path + SPANS)
        size, group = config.sequence_length // self.group, self.group
        part = "the sequence_length" if group == 1 else f"1/{group} of the sequence_length"
        groups = np.unique(indices // group)[:, None] * group + np.arange(group)
        has_labels = count_labels(dataset_path, size) > 0
        groups = groups[np.isin(groups, indices).all(1)]  # a split may divide one
        self.indices = groups[has_labels[groups].all(1)]
        if num_unlabelled := len(groups) - len(self.indices):
            logger.warning(
                "%s: %d of %d conversations are left out, which have no answer to train in their "
                "first %d tokens, %s.",
                *(dataset_path, num_unlabelled * group, groups.size, size, part),
            )
        lengths = np.asarray(dataset.sequence_lengths)[self.indices] - 1
        self.num_truncated = int((lengths > size).sum())
        """Conversations that are longer than their part of a row."""
        if self.num_truncated:
            logger.warning(
                "%s: %d of %d conversations are cut off after %d tokens, %s.",
                *(dataset_path, self.num_truncated, lengths.size, size, part),
            )
        self.lengths = np.minimum(lengths, size)
        self.rows: list[np.ndarray] = []
        """Places in `indices` of the groups of each row."""
        epoch = 0
        while not epoch or len(self.rows) < (num_samples or 0):
            seed = [config.random_seed, index_split.value, epoch]
            random = np.random.RandomState(seed)
            self.rows += pack(self.lengths.sum(1), config.sequence_length, random)
            epoch += 1

    @staticmethod
    def numel_low_level_dataset(dataset: Sequences) -> int:
        return len(dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Sequences:
        return Sequences(dataset_path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        size = self.config.sequence_length
        padding = max(self.config.tokenizer.pad, 0)
        tokens, labels = (torch.full((size,), padding) for _ in range(2))
        loss_mask = torch.zeros(size)
        start, lengths = 0, []
        places = self.rows[index]
        for number, length in zip(self.indices[places].flat, self.lengths[places].flat):
            length = int(length)
            piece = torch.from_numpy(self.dataset.get(number, 0, length + 1).astype(np.int64))
            part = slice(start, start + length)
            tokens[part], labels[part] = piece[:-1], piece[1:]
            for first, last, weight in self.spans[number].view(SPAN):
                loss_mask[part][max(0, first - 1) : max(0, last - 1)] = float(weight)
            lengths.append(length)
            start += length
        if start < size:
            lengths.append(size - start)
        _check_tokens(tokens, self.config, self.dataset_path)
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "lengths": lengths,
            "padding": size - start,
        }


class PreferenceRows(ConversationRows):
    """Rows packed with preferences: a chosen conversation, and after it the rejected one, each of
    at most half a row."""

    group = 2


def pack(lengths: np.ndarray, capacity: int, random: np.random.RandomState) -> list[np.ndarray]:
    """Pack sequences in rows by best fit, longest first; equal ones and the rows in random order.

    Args:
        lengths: int [n], each at most `capacity`.
        capacity: length of a row.
        random: decides the order, on which nothing else has an influence.

    Returns:
        Rows: places in `lengths` of their sequences, int64.
    """
    shuffled = random.permutation(len(lengths))
    order = shuffled[np.argsort(-lengths[shuffled].astype(np.int64), kind="stable")]
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit n: some row has room for exactly n more
    for place, length in zip(order.tolist(), lengths[order].tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(place)
        if left := room - length:
            by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return [np.array(rows[row]) for row in random.permutation(len(rows))]


def contents_of(dataset: Any) -> list[str]:
    """Return the digest of each dataset in a blend, or of the only one: see `content_of`."""
    parts = getattr(dataset, "datasets", [dataset])
    return [part.unique_identifiers["content"] for part in parts]


def _check_tokens(tokens: Tensor, config: GPTDatasetConfig, prefix: str) -> None:
    if (highest := int(tokens.max())) >= config.tokenizer.vocab_size:
        raise ValueError(
            f"{prefix} has token {highest}, the tokenizer has {config.tokenizer.vocab_size}: it "
            "was made with another tokenizer. Make it anew with `megatron-hybrid preprocess`."
        )
