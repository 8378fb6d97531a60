"""MLPs of experts by torch's grouped matrix products, or by those that unpack weights inside.

On GPUs of compute capability 9 and 10 these are one kernel in bf16. Elsewhere torch reads the ends
back, and takes one product after the other.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.dispatch import planning
from megatron_hybrid.ops.experts.reference import PerExpert, activated
from megatron_hybrid.ops.kernels import input_refusal
from megatron_hybrid.ops.packed import packed_linear, unpack
from megatron_hybrid.ops.packed.reference import FEW_ROWS, GROUPED_ROW_BYTES

MISSING = (
    None
    if hasattr(F, "grouped_mm")
    else f"torch {torch.__version__} has no torch.nn.functional.grouped_mm; torch 2.10 has"
)


def verify(*inputs: Any) -> str | None:
    x_mh, _, fc1_Egh, fc1_bias_Eg, fc2_Ehf, fc2_bias_Eh, _ = inputs
    layers = [one for one in (fc1_Egh, fc1_bias_Eg, fc2_Ehf, fc2_bias_Eh) if one is not None]
    layers = [one for one in layers if not hasattr(one, "parts")]  # which packed ones have
    if not all(isinstance(layer, Tensor) for layer in layers):
        return "the experts' parameters are not stacked"
    if (reason := input_refusal(x_mh, *layers)) is not None:
        return reason
    if len(dtypes := {one.dtype for one in (x_mh, *layers)}) > 1:
        return f"it takes tensors of one dtype, not of {' and '.join(sorted(map(str, dtypes)))}"
    if torch.is_autocast_enabled(x_mh.device.type):
        return "autocast does not know it"
    for layer in (fc1_Egh, fc2_Ehf):
        if num_bytes := layer.shape[2] * x_mh.element_size() % GROUPED_ROW_BYTES:
            return (
                f"matrices have rows of {layer.shape[2]} numbers, which end {num_bytes} bytes "
                f"after a multiple of {GROUPED_ROW_BYTES}"
            )
    return None


def run(*inputs: Any) -> Tensor:
    x_mh, ends_E, fc1_Egh, fc1_bias_Eg, fc2_Ehf, fc2_bias_Eh, activate = inputs
    x_mg = _product(x_mh, fc1_Egh, ends_E)
    expert_m = None
    if fc1_bias_Eg is not None or fc2_bias_Eh is not None:
        rows_m = torch.arange(len(x_mh), dtype=torch.int32, device=x_mh.device)
        expert_m = torch.searchsorted(ends_E, rows_m, right=True)
    x_mf = activated(activate, _biased(x_mg, fc1_bias_Eg, expert_m), fc2_Ehf)
    y_mh = _product(x_mf, fc2_Ehf, ends_E)
    return _biased(y_mh, fc2_bias_Eh, expert_m)


def _product(x_mi: Tensor, weight_Eoi: PerExpert, ends_E: Tensor) -> Tensor:
    if not isinstance(weight_Eoi, Tensor):
        if len(x_mi) <= FEW_ROWS * len(weight_Eoi):
            return packed_linear(x_mi, *weight_Eoi.parts, ends_E)
        weight_Eoi = unpack(*weight_Eoi.parts, x_mi.dtype)
    if planning.get() is not None:  # keeps as much, and takes all dtypes
        return x_mi @ weight_Eoi[0].mT
    return F.grouped_mm(x_mi, weight_Eoi.mT, offs=ends_E)


def _biased(x_mg: Tensor, bias_Eg: Tensor | None, expert_m: Tensor | None) -> Tensor:
    # Rows of no expert get a bias of zero, which takes what their gradients happen to be.
    return x_mg if bias_Eg is None else x_mg + F.pad(bias_Eg, (0, 0, 0, 1))[expert_m]
