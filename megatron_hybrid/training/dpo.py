"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.fields import Fields
from megatron_hybrid.training.losses import LossSums, sum_by_sequence
from megatron_hybrid.utils.validation import Range


@dataclass
class DpoFields(Fields):
    """Fields of the loss of preferences (`data.kind: preferences`). It compares with the model that
    the run begins with."""

    beta: Annotated[float, Range(gt=0)] = 0.1
    """Factor of the difference in log-probability from the reference policy, which makes it a
    reward. A larger one keeps the model nearer to the reference."""

    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Loss of the difference between the rewards of a pair. "sigmoid" is that of DPO, "hinge" that
    of SLiC (arXiv:2305.10425), and "ipo" is squared, of means over tokens (arXiv:2310.12036)."""


class DpoLoss:
    """The mean loss of a pair in a batch of preferences: chosen and rejected sequences in turn."""

    metrics: Sequence[str] = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    needs_reference = True
    counts_labels = False

    def __init__(self, fields: DpoFields):
        self.fields = fields

    def __call__(self, log_probs: Tensor, batch: Batch) -> LossSums:
        beta, mask = self.fields.beta, batch.loss_mask
        rewards = sum_by_sequence((log_probs - batch.columns["reference"]) * mask, batch)
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        margins = chosen - rejected
        if self.fields.loss == "sigmoid":
            losses = -F.logsigmoid(beta * margins)
        elif self.fields.loss == "hinge":
            losses = F.relu(1 - beta * margins)
        else:
            means = (rewards / sum_by_sequence(mask, batch)).view(-1, 2)
            losses = (means[:, 0] - means[:, 1] - 1 / (2 * beta)) ** 2
        count = mask.new_tensor(len(margins))
        told = (margins > 0).float(), beta * margins, beta * chosen, beta * rejected
        sums = [(each.detach().sum(), count) for each in told]
        return LossSums(losses.sum(), count, dict(zip(self.metrics, sums)))
