"""Pairs of a token and one of its experts: how tokens come to experts and their outputs back.

Shape suffixes: as in `ops.experts`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class ExpertPairs:
    """The pairs of each token with its experts, or with some of them, expert by expert.

    Args:
        chosen_nE: the experts of each token, bool, at most k for each token.
        num_chosen: k.
        experts: range of the experts to take; None: all. Pairs with others are left out.
    """

    def __init__(self, chosen_nE: Tensor, num_chosen: int, experts: range | None = None):
        experts = experts or range(chosen_nE.shape[1])
        own_nE = chosen_nE[:, experts.start : experts.stop]
        self._expert_m, self._token_m = own_nE.t().nonzero(as_tuple=True)
        self._first = experts.start
        self.counts_E = torch.bincount(self._expert_m, minlength=len(experts))
        """Pairs of each expert, int64 on the device of `chosen_nE`."""
        # The pair of each token's experts, in the order of their numbers; m where it is left out.
        num_pairs = len(self._token_m)
        pair_nE = torch.full(chosen_nE.shape, num_pairs, device=chosen_nE.device)
        pair_nE[self._token_m, self._expert_m + self._first] = torch.arange(
            num_pairs, device=chosen_nE.device
        )
        shape = len(chosen_nE), num_chosen
        pairs = pair_nE[chosen_nE]
        has_all = len(pairs) == math.prod(shape)
        self._pair_nk = pairs.view(shape) if has_all else pair_nE.sort(1).values[:, :num_chosen]
        self._is_whole = has_all and len(experts) == chosen_nE.shape[1]

    def tokens(self, hidden_nh: Tensor) -> Tensor:
        """Each pair's token, [m, h]."""
        return hidden_nh[self._token_m]

    def weights(self, weights_nE: Tensor) -> Tensor:
        """Each pair's weight, [m, 1]."""
        return weights_nE[self._token_m, self._expert_m + self._first].unsqueeze(-1)

    def sum(self, y_mh: Tensor) -> Tensor:
        """Each token's sum over its pairs, [n, h]; 0 for a token without any. The order is that of
        the experts, so a row's bits do not depend on other tokens."""
        if not self._is_whole:
            y_mh = torch.cat((y_mh, y_mh.new_zeros(1, y_mh.shape[1])))
        parts = y_mh[self._pair_nk].unbind(1)
        y_nh = parts[0]
        for part in parts[1:]:
            y_nh = y_nh + part
        return y_nh
