"""Pairs of a token and one of its experts: how tokens come to experts and their outputs back.

Shape suffixes: as in `ops.experts`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.checks import compute_dtype
from megatron_hybrid.ops.ragged import row_alignment


class ExpertPairs:
    """The pairs of each token with its experts, or with some of them, as rows: expert by expert,
    those of each from a multiple of `alignment` on.

    Nothing waits for the device: m is the most rows that so many pairs can take, whatever the
    experts. Rows between and after those of pairs have zeros for a token.

    Args:
        chosen_nE: the experts of each token, bool, k for each token.
        num_chosen: k.
        experts: range of the experts to take; None means all. Pairs with others are left out.
        may_lack: whether tokens may have fewer than k experts.
        alignment: of the first row of each expert, a power of 2; None means `row_alignment`.
    """

    def __init__(
        self,
        chosen_nE: Tensor,
        num_chosen: int,
        experts: range | None = None,
        may_lack: bool = False,
        alignment: int | None = None,
    ):
        (n, num_all), device = chosen_nE.shape, chosen_nE.device
        alignment = alignment or row_alignment(device)
        self._experts = experts or range(num_all)
        self._may_lack = may_lack or len(self._experts) < num_all
        own_nE = chosen_nE[:, self._experts.start : self._experts.stop]
        k, E = min(num_chosen, len(self._experts)), len(self._experts)
        self._num_rows = m = n * k + min(E, n * k) * (alignment - 1)
        # A scan along the last dimension is fast.
        place_En = own_nE.t().contiguous().cumsum(1, dtype=torch.int32)
        counts_E = place_En[:, -1:].sum(1, dtype=torch.int32)  # there may be no tokens
        sizes_E = (counts_E + (alignment - 1)) & -alignment
        self.ends_E = sizes_E.cumsum(0, dtype=torch.int32)
        """The row after those of each expert, int32 on the device of `chosen_nE`."""
        row_En = place_En + (self.ends_E - sizes_E - 1).unsqueeze(1)
        # Rows ascend by expert. In place of those that a token lacks stands m.
        rows = row_En.t().masked_fill(~own_nE, m).topk(k, dim=1, largest=False)
        self._row_nk, self._expert_nk = rows.values.long(), rows.indices
        token_m = torch.full((m + 1,), n, device=device)
        tokens = torch.arange(n, device=device).repeat_interleave(k)
        self._token_m = token_m.scatter_(0, self._row_nk.flatten(), tokens)[:m]

    def tokens(self, hidden_nh: Tensor) -> Tensor:
        """Return each row's token, [m, h]. Gradients of rows without one go nowhere."""
        return F.pad(hidden_nh, (0, 0, 0, 1))[self._token_m]

    def weights(self, weights_nE: Tensor) -> Tensor:
        """Return each row's weight, [m, 1]; 0 where there is no token."""
        weights_m = weights_nE.new_zeros(self._num_rows + 1)
        weights_m = weights_m.scatter(0, self._row_nk.flatten(), self._chosen(weights_nE).flatten())
        return weights_m[:-1].unsqueeze(-1)

    def sum(self, y_mh: Tensor, weights_nE: Tensor | None = None) -> Tensor:
        """Sum over each token's pairs, [n, h]; 0 for a token without any. The order is that of the
        experts, so a row's bits do not depend on other tokens.

        Args:
            y_mh: what is in rows without a token does not matter.
            weights_nE: of the pairs; None means 1.
        """
        dtype = compute_dtype(y_mh)
        if self._may_lack:
            lacks_nk1 = (self._row_nk == self._num_rows).unsqueeze(-1)
            y_nkh = y_mh[self._row_nk.clamp(max=self._num_rows - 1)].masked_fill(lacks_nk1, 0)
        else:
            y_nkh = y_mh[self._row_nk]
        y_nkh = y_nkh.to(dtype)
        if weights_nE is not None:
            y_nkh = y_nkh * self._chosen(weights_nE).to(dtype).unsqueeze(-1)
        parts = y_nkh.unbind(1)
        y_nh = parts[0]
        for part in parts[1:]:
            y_nh = y_nh + part
        return y_nh.to(y_mh.dtype)

    def _chosen(self, weights_nE: Tensor) -> Tensor:
        """Take the weights of each token's experts, [n, k]."""
        own_nE = weights_nE[:, self._experts.start : self._experts.stop]
        return own_nE.gather(1, self._expert_nk)
