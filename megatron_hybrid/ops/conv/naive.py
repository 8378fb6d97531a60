"""The causal convolution as it is written, token by token: the specification of
`ops.causal_conv1d`."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_hybrid.ops.activations import silu


def causal_conv1d(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor,
    tail_Ck: Tensor,
    activation: Callable[[Tensor], Tensor] = silu,
) -> tuple[Tensor, Tensor]:
    """Run one sequence: outputs, and the last K - 1 inputs after each token."""
    outputs, tails = [], []
    for x_C in x_TC:
        window_CK = torch.cat([tail_Ck, x_C[:, None]], dim=1)
        outputs.append(activation((window_CK * weight_CK).sum(1) + bias_C))
        tail_Ck = window_CK[:, 1:]
        tails.append(tail_Ck)
    return torch.stack(outputs), torch.stack(tails)
