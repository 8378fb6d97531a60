"""Losses of a run, as functions of the log-probabilities that the model gives to the labels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, Protocol, get_type_hints

import torch
from torch import Tensor

from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.reports import NAMES
from megatron_hybrid.utils.validation import check_field, shown


@dataclass(frozen=True)
class LossSums:
    """The loss of a micro-batch. All tensors are scalars."""

    total: Tensor
    """Sum over the items that the loss counts, fp32 with its gradient."""
    count: Tensor
    """Number of these items, or the sum of their weights. A step divides the totals of its global
    batch by that, so that accumulation and layouts change no result."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(sum, number of summed values) by the names in `Loss.metrics`. The log has the means."""


class Loss(Protocol):
    """The loss that a run minimises. Every rank of the last pipeline stage computes it."""

    metrics: Sequence[str]
    """Names of metrics that the log has in addition to the loss and the numbers of every run."""
    needs_reference: bool
    """Whether a batch needs the log-probabilities of the reference policy."""
    counts_labels: bool
    """Whether the items are the labels. Otherwise losses of routers and of multi-token prediction,
    which are weighed by labels, are refused."""

    def __call__(self, log_probs: Tensor, batch: Batch) -> LossSums:
        """Compute the loss of a micro-batch.

        Args:
            log_probs: fp32 [1, T], log-probabilities of the labels, in nats.
            batch: has labels, masks and sequences, and log-probabilities by the reference policy.
        """


def check_loss(loss: Any) -> None:
    """Raise ValueError if a loss lacks a field of `Loss`, or a metric has a name of the log."""
    for name, hint in get_type_hints(Loss).items():
        check_field(f"{name} of the loss {_name(loss)}", getattr(loss, name, None), hint)
    if taken := sorted(filter(NAMES.fullmatch, loss.metrics)):
        raise ValueError(f"the loss {_name(loss)} has metrics {taken}, names of the log: rename.")


def check_sums(loss: Loss, found: Any, log_probs: Tensor) -> None:
    """Raise ValueError if a run cannot train on what a loss has returned for a micro-batch."""
    device = log_probs.device
    try:
        pairs = [found.metrics[name] for name in loss.metrics]
        numbers = [found.total, found.count, *chain.from_iterable(pairs)]
        is_right = len(numbers) == 2 + 2 * len(found.metrics) and all(
            each.shape == () and each.device == device and not each.is_complex() for each in numbers
        )
        is_right = is_right and 0 <= found.count < math.inf
        if is_right and torch.is_grad_enabled():
            is_right = found.total.requires_grad
        if is_right and torch.is_grad_enabled():
            kept = {"retain_graph": True, "allow_unused": True}
            (gradient,) = torch.autograd.grad(found.total, log_probs, **kept)
            is_right = gradient is not None
    except (AttributeError, KeyError, TypeError):  # whatever it is
        is_right = False
    if not is_right:
        raise ValueError(
            f"the loss {_name(loss)} returned {' '.join(shown(found).split())}; it must be "
            f"LossSums of tensors of one number on {device}: a total with a gradient, by log_probs "
            "without detach(), a finite count of 0 or more, and as metrics (sum, number) by each "
            f"name of {[*loss.metrics]}."
        )


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)


class CrossEntropy:
    """The weighted mean loss of a label, as in pretraining and supervised fine-tuning."""

    metrics: Sequence[str] = ()
    needs_reference = False
    counts_labels = True

    def __call__(self, log_probs: Tensor, batch: Batch) -> LossSums:
        return LossSums(-(log_probs * batch.loss_mask).sum(), batch.loss_mask.sum())


def sum_by_sequence(values: Tensor, batch: Batch) -> Tensor:
    """Sum values [1, T] over each sequence, [sequences], except those that only fill a row."""
    sums = torch.stack([part.sum() for part in values[0].split(batch.lengths)])
    if batch.padding_mask is None:
        return sums
    starts = [end - length for end, length in zip(accumulate(batch.lengths), batch.lengths)]
    return sums[~batch.padding_mask[0, starts]]
