"""Losses of a run, as functions of the log-probabilities that the model gives to the labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from megatron_hybrid.training.data.batches import Batch


@dataclass(frozen=True)
class LossSums:
    """The loss of a micro-batch. All are scalars."""

    total: Tensor
    """Sum over the items that the loss counts, fp32 with its gradient."""
    count: Tensor
    """Number of these items, or the sum of their weights. A step divides the totals of its global
    batch by that, so that accumulation and layouts change no result."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(sum, number of what was summed) by the names in `Loss.metrics`. The log has the means."""


class Loss(Protocol):
    """What a run minimises. It is computed on the last pipeline stage, on every rank of it."""

    metrics: Sequence[str]
    """Names of what the log has in addition to the loss."""
    needs_reference: bool
    """Whether a batch needs the log-probabilities of the reference policy."""
    counts_labels: bool
    """Whether the items are the labels; losses of routers and of multi-token prediction, which
    count by them, are refused otherwise."""

    def __call__(self, log_probs: Tensor, batch: Batch) -> LossSums:
        """Compute the loss of a micro-batch.

        Args:
            log_probs: fp32 [1, T], of the labels, in nats.
            batch: its labels, masks and sequences, and what the reference policy says.
        """


class CrossEntropy:
    """The mean loss of a label, by weight, as of pretraining and supervised fine-tuning."""

    metrics: Sequence[str] = ()
    needs_reference = False
    counts_labels = True

    def __call__(self, log_probs: Tensor, batch: Batch) -> LossSums:
        return LossSums(-(log_probs * batch.loss_mask).sum(), batch.loss_mask.sum())


def sum_by_sequence(values: Tensor, batch: Batch) -> Tensor:
    """Sum values [1, T] over each sequence, [sequences], but those that only fill a row."""
    sums = torch.stack([part.sum() for part in values[0].split(batch.lengths)])
    if batch.padding_mask is None:
        return sums
    starts = [end - length for end, length in zip(accumulate(batch.lengths), batch.lengths)]
    return sums[~batch.padding_mask[0, starts]]
