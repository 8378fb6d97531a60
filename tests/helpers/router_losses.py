"""Core's tracker of the losses of routers, which lives as long as the process."""

import warnings

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_hybrid.compat import forget_aux_losses


def forget_losses():
    """No loss is tracked, and their scale is 1."""
    forget_aux_losses()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def take_losses(of_all_ranks: bool = False) -> dict[str, torch.Tensor]:
    """{name: loss of each layer} since the last call: what this rank gives to it, or the whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if of_all_ranks:
            moe_utils.reduce_aux_losses_tracker_across_ranks()
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        found = {name: entry["values"].clone() for name, entry in tracker.items()}
        moe_utils.clear_aux_losses_tracker()
    return {name: values for name, values in found.items() if values.any()}
