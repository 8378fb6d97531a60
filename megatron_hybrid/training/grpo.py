"""Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.fields import Fields
from megatron_hybrid.training.losses import LossSums, sum_by_sequence
from megatron_hybrid.utils.validation import Range


@dataclass
class GrpoFields(Fields):
    """Fields of reinforcement learning on prompts (`data.kind: prompts`). Completions are drawn by
    an engine on the weights that are trained, with temperature 1; `run.global_batch_size` counts
    them."""

    reward: str
    """The function that rewards completions, as `module:function`. It is called as TRL does: with
    lists `prompts`, `completions` and `completion_ids`, and a list for each other field of the
    records; it returns a list of numbers. Modules in the present folder are found."""

    group_size: Annotated[int, Range(ge=2)] = 8
    """Completions of a prompt. The advantage of each is its reward less the mean of the group."""

    scale_rewards: bool = True
    """Divide the advantages by the standard deviation of the rewards in the group."""

    max_tokens: Annotated[int, Range(ge=1)] = 256
    """Most tokens of a completion."""

    updates: Annotated[int, Range(ge=1)] = 1
    """Steps on the same completions. A run that stops between two of them draws anew."""

    clip: Annotated[float, Range(gt=0, lt=1)] = 0.2
    """Clip of the ratio of a token's probability to the one it was drawn with: the ratio counts
    down to 1 - clip, and up to 1 + clip."""

    clip_high: Annotated[float, Range(gt=0)] | None = None
    """Upper clip. The default is `clip`."""

    beta: Annotated[float, Range(ge=0)] = 0.0
    """Factor of the KL divergence from the model that the run begins with; 0 leaves it out."""

    mean_over: Literal["tokens", "sequences"] = "tokens"
    """Items of equal weight in the loss: tokens, as in DAPO (arXiv:2503.14476), or completions, by
    the mean of their tokens, as in GRPO."""

    cache_bytes: Annotated[int, Range(ge=1)] = 1 << 30
    """Bytes of the engine's cache on each rank, which are free while it does not draw."""


class GrpoLoss:
    """The clipped loss of drawn tokens, by a batch's columns "advantage", "drawn" (the engine's
    log-probabilities) and "reward". The KL divergence is estimated as in the paper."""

    def __init__(self, fields: GrpoFields):
        self.fields = fields
        self.needs_reference = fields.beta > 0
        self.counts_labels = fields.mean_over == "tokens"
        self.metrics: Sequence[str] = ("reward", "length", "ratio_error", "clipped")
        if self.needs_reference:
            self.metrics = (*self.metrics, "kl")

    def __call__(self, log_probs: Tensor, batch: Batch) -> LossSums:
        fields, mask, columns = self.fields, batch.loss_mask, batch.columns
        high = fields.clip if fields.clip_high is None else fields.clip_high
        ratio = ((log_probs - columns["drawn"]) * mask).exp()
        gain = ratio * columns["advantage"]
        bounded = ratio.clamp(1 - fields.clip, 1 + high) * columns["advantage"]
        losses = -torch.minimum(gain, bounded)
        told = {"ratio_error": (ratio - 1).abs(), "clipped": (bounded < gain).float()}
        if self.needs_reference:
            difference = (columns["reference"] - log_probs) * mask
            told["kl"] = difference.exp() - difference - 1
            losses = losses + fields.beta * told["kl"]
        sizes = sum_by_sequence(mask, batch)
        number, tokens = mask.new_tensor(len(sizes)), mask.sum()
        rewards = sum_by_sequence(columns["reward"] * mask, batch) / sizes
        metrics = {name: ((each.detach() * mask).sum(), tokens) for name, each in told.items()}
        metrics |= {"reward": (rewards.sum(), number), "length": (tokens, number)}
        if self.counts_labels:
            return LossSums((losses * mask).sum(), tokens, metrics)
        return LossSums((sum_by_sequence(losses * mask, batch) / sizes).sum(), number, metrics)
