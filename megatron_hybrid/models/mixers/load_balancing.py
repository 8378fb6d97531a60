"""Auxiliary losses of a router in training: megatron-core's fields, formulas and tracker.

They change no output. The backward pass adds the gradient of each, scaled as that of the main loss
(core's `MoEAuxLossAutoScaler`, whose scale core's schedules set), and core's tracker has the values
by name and layer.

Shape suffixes: n tokens, E experts, S sequences.
"""

from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from torch import Tensor

from megatron_hybrid.compat import record_aux_loss
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.recompute import is_recomputing, once
from megatron_hybrid.ops import RaggedLayout

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""A loss of `AUXILIARY_LOSSES` -> its name in core's tracker."""


def is_counting() -> bool:
    """Return whether a router in training counts the tokens and losses of this forward pass."""
    return torch.is_grad_enabled() and not is_recomputing()


class AuxiliaryLosses:
    """The losses of one router. All tensor-parallel ranks have the same tokens, and each has the
    whole gradient.

    Args:
        config: `moe_router_load_balancing_type`, `moe_aux_loss_coeff` and `moe_z_loss_coeff` name
            the losses and their coefficients.
        layer_number: from 1, within the pipeline stage.
        pg_collection: process groups; `pp` and, if given, `dp` are used.
    """

    def __init__(
        self, config: HybridConfig, layer_number: int, pg_collection: ProcessGroupCollection
    ):
        self._config = config
        stages = config.pattern.stages(pg_collection.pp.size())
        self.layer_number = layer_number + sum(map(len, stages[: pg_collection.pp.rank()]))
        """Number from 1, within the model."""
        self._dp_group = getattr(pg_collection, "dp", None)
        kinds, factors = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        if isinstance(kinds, str):
            kinds, factors = [kinds], [factors]
        self._factors = {
            kind: factor for kind, factor in zip(kinds, factors) if kind in _NAMES and factor
        }
        self.start_global_batch()

    def start_global_batch(self) -> None:
        """Forget the tokens of each expert that `global_aux_loss` has counted."""
        self._num_micro_batches, self._counts_E = 0, 0

    def attach_to_logits(self, logits_nE: Tensor, padding_n: Tensor | None) -> Tensor:
        """Return the logits, with the z-loss attached.

        Args:
            padding_n: bool, True for tokens that do not count; with None all count.
        """
        factor = self._config.moe_z_loss_coeff
        if not factor:
            return logits_nE
        num_tokens = len(logits_nE) if padding_n is None else (~padding_n).sum()
        loss = z_loss_func(logits_nE, factor, padding_n)
        return self._attach(logits_nE, "z_loss", loss, factor, num_tokens)

    def attach_to_weights(
        self,
        weights_nE: Tensor,
        logits_nE: Tensor,
        padding_n: Tensor | None,
        layout: RaggedLayout,
    ) -> Tensor:
        """Return the routing weights, with the losses of load balancing attached.

        Args:
            logits_nE: those that the experts are chosen by.
            padding_n: as above.
            layout: the sequences of the tokens, for `seq_aux_loss`. Each weighs as many as it has
                tokens, so that equal ones weigh as in core, which knows no others.
        """
        if not self._factors:
            return weights_nE
        config = self._config
        chosen_nE, scores_nE = compute_routing_scores_for_aux_loss(
            logits_nE,
            config.moe_router_topk,
            config.moe_router_score_function,
            padding_mask=padding_n,
        )
        num_tokens = len(logits_nE) if padding_n is None else (~padding_n).sum().clamp(min=1)
        for kind, factor in self._factors.items():
            is_global, in_all = kind == "global_aux_loss", num_tokens
            scores, counts_E = scores_nE, chosen_nE.sum(0)
            if is_global:
                counts_E, in_all = once(partial(self._count_globally, chosen_nE))
            elif kind == "seq_aux_loss":
                # Each token's scores by the shares of the experts in its own sequence.
                shares_nE = _shares_in_sequence(chosen_nE, config.moe_router_topk, layout)
                scores, counts_E = scores_nE * shares_nE * num_tokens, torch.ones_like(counts_E)
            loss = switch_load_balancing_loss_func(
                scores, counts_E, in_all, config.moe_router_topk, config.num_moe_experts, factor
            )
            weights_nE = self._attach(
                weights_nE, _NAMES[kind], loss, factor, num_tokens, is_part=is_global
            )
        return weights_nE

    def _count_globally(self, chosen_nE: Tensor) -> tuple[Tensor, Tensor]:
        """Count the tokens of each expert in a micro batch of all data-parallel ranks, on average
        over the micro batches of this global batch so far; and all tokens of this micro batch."""
        topk = self._config.moe_router_topk
        if self._dp_group is None:
            counts_E = chosen_nE.sum(0)
            num_tokens = counts_E.sum() / topk
        else:
            counts_E, _, num_tokens = get_tokens_per_expert_and_token_count(
                chosen_nE, self._dp_group, topk, with_padding_mask=True
            )
        self._counts_E = self._counts_E + counts_E
        self._num_micro_batches += 1
        return self._counts_E / self._num_micro_batches, num_tokens.clamp(min=1)

    def _attach(
        self,
        x: Tensor,
        name: str,
        loss: Tensor,
        factor: float,
        num_tokens: int | Tensor,
        is_part: bool = False,
    ) -> Tensor:
        """Return `x` with a loss, which is recorded without its factor.

        Args:
            is_part: whether the data-parallel ranks have parts of the loss, else each its own.
        """
        config = self._config
        if is_counting():
            num_ranks = 1 if is_part or self._dp_group is None else self._dp_group.size()
            num_layers = config.num_layers + (config.mtp_num_layers or 0)
            value = loss.detach() / (factor * num_ranks)
            record_aux_loss(name, value, self.layer_number, num_layers, self._dp_group)
        if config.calculate_per_token_loss:
            # core divides all gradients by the number of tokens.
            loss = loss * num_tokens
        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
            # Of the shape that core's schedules set, and that the default of its backward lacks.
            MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=x.device))
        return MoEAuxLossAutoScaler.apply(x, loss)


def _shares_in_sequence(chosen_nE: Tensor, topk: int, layout: RaggedLayout) -> Tensor:
    """Divide each expert's tokens in a token's sequence by all tokens there that count, [n, E]."""
    sequence_n = layout.sequence_ids(chosen_nE.device)
    counts_SE = chosen_nE.new_zeros(layout.num_sequences, chosen_nE.shape[1], dtype=torch.float32)
    counts_SE.index_add_(0, sequence_n, chosen_nE.float())
    num_tokens_S1 = counts_SE.sum(1, keepdim=True) / topk
    return (counts_SE / num_tokens_S1.clamp(min=1))[sequence_n]
