"""RMSNorm without a gate, and of a sum, by the kernel of gated norms."""

import torch
from torch import Tensor

from megatron_hybrid.ops.norm.triton import MAX_CHANNELS, launch

_FORM = dict.fromkeys(("SILU", "NORM_FIRST", "ZERO_CENTERED", "ROUNDS_NORM"), False)


def verify(x: Tensor, weight_C: Tensor, eps: float, added: Tensor | None) -> str | None:
    if (channels := x.shape[-1]) > MAX_CHANNELS:
        return f"rows have {channels} channels; a program holds {MAX_CHANNELS}"
    if x.dim() not in (2, 3) or not x.numel():
        return f"x has shape {list(x.shape)}; it takes rows, or rows of heads"
    if added is not None and added.dtype != x.dtype:
        return "x and what is added differ in dtype"
    return None


def run(x: Tensor, weight_C: Tensor, eps: float, added: Tensor | None) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = None if added is None else torch.empty_like(y)
    tensors = [t if t is None or t.dim() == 3 else t.unsqueeze(1) for t in (x, added, y, sums)]
    x_TGC, added_TGC, y_TGC, sum_TGC = tensors
    launch(x_TGC, added_TGC, None, weight_C, y_TGC, sum_TGC, eps, _FORM)
    return y, x if sums is None else sums
