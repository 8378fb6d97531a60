"""The selective scan of Mamba-1 (Gu and Dao 2023, arXiv 2312.00752, equation 2)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from megatron_hybrid.ops.checks import compute_dtype, join, pad_rows, tokens_of, without_autocast
from megatron_hybrid.ops.dispatch import planning
from megatron_hybrid.ops.permutation import Permutation, Waves
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.scan import ragged_scan
from megatron_hybrid.ops.slot_states import states_or_zeros

BLOCK_BYTES = 1 << 20
"""Bytes of states, and as many of decays, that the forward handles at once, to fit a CPU's
cache."""


@without_autocast
def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    A_CN: torch.Tensor,
    B_TN: torch.Tensor,
    C_TN: torch.Tensor,
    D_C: torch.Tensor,
    initial_states_RCN: torch.Tensor | None,
    layout: RaggedLayout,
    chunk_size: int = 32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute h_t = exp(dt_t A) h_{t-1} + (dt_t x_t) (x) B_t; y_t = h_t C_t + D x_t, by sequence.

    Each channel of each state has its own decay, so there is no form by matrix products as for
    Mamba-2. The plain recurrence runs over one row of all sequences at a time: it needs each
    exponential once (all at most 1), a scan in chunks would need them twice. So outputs do not
    depend on how a sequence is cut into calls.

    This function also takes states `[R, C, N]`, and returns final and captured ones after y: see
    `in_slots`.

    Args:
        x_TC: values `[T, C]`.
        dt_TC: step sizes `[T, C]`, after softplus and bias.
        A_CN: `[C, N]`, negative.
        B_TN, C_TN: `[T, N]`.
        D_C: skip connection `[C]`.
        initial_states_RCN: `SlotStates` `[C, N]`, fp32 or bf16; None starts from zeros and
            keeps nothing.
        layout: lengths and captures of the sequences (positions do not matter here).
        chunk_size: the backward keeps every `chunk_size`-th state of a sequence and computes those
            between again; the result does not depend on it.

    Returns:
        y `[T, C]` in the dtype of x, zeros in padding rows. All arithmetic is fp32, whatever the
        inputs are (float64 for float64 inputs). Captures change neither y nor the states in any
        bit. Differentiable once.

    Raises:
        TypeError: fp16 states, or inputs that are not floating-point.
        ValueError: shapes that do not fit the layout or each other, or chunk_size below 1.
    """
    shape = (layout.num_sequences, *A_CN.shape)
    states_RCN = states_or_zeros(initial_states_RCN, shape, like=x_TC)
    dtype = compute_dtype(x_TC)
    x_f, dt_f, B_f, C_f = tokens_of(layout, dtype, x_TC, dt_TC, B_TN, C_TN)
    A_CN = A_CN.to(dtype)
    y_TC, final_RCN, captured_nCN = ragged_scan(
        lambda *inputs: _step(A_CN, *inputs),
        lambda *inputs: _scan(A_CN, chunk_size, *inputs),
        (dt_f * x_f, dt_f, B_f, C_f),
        states_RCN,
        layout,
        lambda: TimeOrder.of(layout, x_TC.device),
        layout.num_steps,
    )
    y_TC = torch.addcmul(y_TC, x_f, D_C.to(dtype))
    return pad_rows(y_TC.to(x_TC.dtype), layout), final_RCN, captured_nCN


def _step(
    A_CN: torch.Tensor,
    dtx_RC: torch.Tensor,
    dt_RC: torch.Tensor,
    B_RN: torch.Tensor,
    C_RN: torch.Tensor,
    h_RCN: torch.Tensor | list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """Run one token for each of R sequences, with the sums of `_scan`. Given a list of states
    before and after, write the latter, with the same bits, and return outputs alone."""
    decay_RCN = (dt_RC.unsqueeze(-1) * A_CN).exp_()
    new_RCN = dtx_RC.unsqueeze(-1) * B_RN.unsqueeze(1)
    if not isinstance(h_RCN, list):
        new_RCN.addcmul_(h_RCN, decay_RCN)
        return _outputs(C_RN, new_RCN.mT.contiguous()), new_RCN
    for (before_CN, h_CN), new_CN, decay_CN in zip(h_RCN, new_RCN, decay_RCN):
        h_CN.copy_(new_CN.addcmul_(before_CN.to(new_CN.dtype), decay_CN))
    return _outputs(C_RN, new_RCN.mT.contiguous())


def _outputs(C_TN: torch.Tensor, h_TNC: torch.Tensor) -> torch.Tensor:
    """Compute h C of each token, `[T, C]`. MKL rounds one product otherwise than several."""
    if len(h_TNC) == 1:
        return _outputs(C_TN.expand(2, -1), h_TNC.expand(2, -1, -1))[:1]
    return (C_TN.unsqueeze(1) @ h_TNC).squeeze(1)


def _scan(
    A_CN: torch.Tensor,
    chunk_size: int,
    dtx_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    B_TN: torch.Tensor,
    C_TN: torch.Tensor,
    h_RCN: torch.Tensor,
    order: TimeOrder,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run chunks of rows in order, with states transposed to `[N, C]`: N is small, and loops over
    C, the last dimension, run at full speed."""
    inputs_T = [order.tokens.apply(t) for t in (dtx_TC, dt_TC, B_TN, C_TN)]
    A_NC = A_CN.t().contiguous()
    h_RNC = order.sequences.apply(h_RCN.mT)
    ys, finals, captured, first = [], [], [], 0
    for j in range(0, len(order.row_sizes), chunk_size):
        sizes = order.row_sizes[j : j + chunk_size]
        end = first + sum(sizes)
        if sizes[0] < len(h_RNC):
            finals.append(h_RNC[sizes[0] :])
            h_RNC = h_RNC[: sizes[0]]
        wanted = [place - first for place in order.captured if first <= place < end]
        inputs = (t[first:end] for t in inputs_T)
        y, h_RNC, captured_nNC = _Rows.apply(h_RNC, *inputs, A_NC, sizes, wanted)
        ys.append(y)
        captured.append(captured_nNC)
        first = end
    finals.append(h_RNC)
    return (
        order.tokens.invert(join(ys)),
        order.sequences.invert(join(finals[::-1])).mT.contiguous(),
        order.captures.invert(join(captured)).mT.contiguous(),
    )


class _Rows(torch.autograd.Function):
    """Some rows of all sequences. Saves its inputs and initial states for backward, no other
    state."""

    @staticmethod
    def forward(ctx, h_RNC, dtx_TC, dt_TC, B_TN, C_TN, A_NC, sizes, captures):
        ctx.save_for_backward(h_RNC, dtx_TC, dt_TC, B_TN, C_TN, A_NC)
        ctx.sizes, ctx.captures = sizes, captures
        if planning.get() is not None:  # sizes alone, which need no loop
            return torch.empty_like(dtx_TC), torch.empty_like(h_RNC), h_RNC[:0].clone()
        h, ys, ends, captured = h_RNC, [], [], []
        for first, end, rows in _blocks(sizes, BLOCK_BYTES // h_RNC[0].nbytes):
            inputs = (t[first:end] for t in (dtx_TC, dt_TC, B_TN))
            _, h_TNC, ended = _advance(h, *inputs, A_NC, rows)
            h = h_TNC[len(h_TNC) - rows[-1] :]
            ends += ended
            ys.append(_outputs(C_TN[first:end], h_TNC))
            captured += [h_TNC[place - first] for place in captures if first <= place < end]
        ends.append(h)
        captured_nNC = torch.stack(captured) if captured else h_RNC[:0].clone()
        return torch.cat(ys), torch.cat(ends[::-1]), captured_nNC

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y_TC, grad_end_RNC, grad_captured_nNC):
        h_RNC, dtx_TC, dt_TC, B_TN, C_TN, A_NC = ctx.saved_tensors
        sizes = ctx.sizes
        decay_TNC, h_TNC, _ = _advance(h_RNC, dtx_TC, dt_TC, B_TN, A_NC, sizes)
        # Gradients of the states: first from the output of their own token.
        grad_TNC = grad_y_TC.unsqueeze(1) * C_TN.unsqueeze(2)
        if ctx.captures:
            grad_TNC[ctx.captures] += grad_captured_nNC
        grad_C_TN = (h_TNC @ grad_y_TC.unsqueeze(2)).squeeze(2)
        # Then, from the last row to the first, from later tokens. Gradients of the log decays
        # replace the decays.
        before = [h_RNC, *h_TNC.split(sizes)[:-1]]
        grad_RNC = grad_end_RNC.clone()
        rows = zip(sizes, grad_TNC.split(sizes), decay_TNC.split(sizes), before, strict=True)
        for size, grad, decay, h_before in reversed(list(rows)):
            grad.add_(grad_RNC[:size])
            torch.mul(grad, decay, out=grad_RNC[:size])
            torch.mul(grad_RNC[:size], h_before[:size], out=decay)
        return (
            grad_RNC,
            (B_TN.unsqueeze(1) @ grad_TNC).squeeze(1),
            (decay_TNC * A_NC).sum(1),
            (grad_TNC @ dtx_TC.unsqueeze(2)).squeeze(2),
            grad_C_TN,
            (decay_TNC * dt_TC.unsqueeze(1)).sum(0),
            None,
            None,
        )


def _blocks(sizes: list[int], limit: int) -> Iterator[tuple[int, int, list[int]]]:
    """Yield runs of rows, of at most `limit` tokens or one row: (first token, end, their sizes)."""
    first, rows = 0, []
    for size in sizes:
        if rows and sum(rows) + size > limit:
            yield first, first + sum(rows), rows
            first, rows = first + sum(rows), []
        rows.append(size)
    yield first, first + sum(rows), rows


def _advance(
    h_RNC: torch.Tensor,
    dtx_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    B_TN: torch.Tensor,
    A_NC: torch.Tensor,
    sizes: list[int],
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return tokens' decays, states after them, and final states of sequences that end earlier."""
    decay_TNC = (dt_TC.unsqueeze(1) * A_NC).exp_()
    h_TNC = dtx_TC.unsqueeze(1) * B_TN.unsqueeze(2)
    ended = []
    for size, h_row, decay in zip(sizes, h_TNC.split(sizes), decay_TNC.split(sizes), strict=True):
        if size < len(h_RNC):
            ended.append(h_RNC[size:])
            h_RNC = h_RNC[:size]
        h_RNC = h_row.addcmul_(h_RNC, decay)
    return decay_TNC, h_TNC, ended


class TimeOrder:
    """The tokens of all sequences after the leading steps, row by row: see `Waves`. No row is
    padded.
    """

    @classmethod
    def of(cls, layout: RaggedLayout, device: torch.device | str) -> TimeOrder:
        """Return the order of a layout, made once per device and cached in the layout."""
        return layout.cached(("time_order", torch.device(device)), lambda: cls(layout, device))

    def __init__(self, layout: RaggedLayout, device: torch.device | str) -> None:
        waves, num_tokens = (
            Waves(layout.lengths[layout.num_steps :], device),
            layout.num_step_tokens,
        )
        self.row_sizes, self.tokens, self.sequences = waves.sizes, waves.items, waves.sequences
        tokens = [count - 1 - num_tokens for count in layout.captures if count > num_tokens]
        places = waves.places[tokens] if tokens else np.arange(0)
        in_time = np.argsort(places)
        self.captured: list[int] = places[in_time].tolist()
        """Places of the captured tokens in time order, ascending."""
        self.captures = Permutation(in_time, device)
