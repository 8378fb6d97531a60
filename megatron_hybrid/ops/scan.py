"""Parts shared by the scans of all recurrent mixers: decays, the split in steps and scans, and the
recurrence token by token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from megatron_hybrid.ops.checks import join, rows_between
from megatron_hybrid.ops.gradients import with_gradient
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotStates

ROWS = 64
"""Tokens that are laid out at once for a recurrence token by token."""


def ragged_scan(
    step: Callable[..., Any],
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    inputs_T: tuple[torch.Tensor, ...],
    states_R: torch.Tensor | SlotStates,
    layout: RaggedLayout,
    plan: Callable[[], Any],
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run the first sequences by `step` and all others by `scan`.

    Args:
        step: `(*inputs of a token of each sequence, states) -> (outputs, states after them)`; or
            `(*inputs of tokens, [(state before, state after) of each]) -> outputs`, and writes the
            states after them, one after the other, in the dtype of `states_R`.
        scan: `(*inputs of the rest, states, plan()) -> (outputs, final, captured states)`.
        inputs_T: flat tensors; padding rows are not read.
        states_R: initial states, one per sequence, of any dtype; or where they are, to be changed
            by `step`.
        layout: lengths, positions and captures.
        plan: makes the last argument of `scan` from the layout; called only if `scan` is.
        num_steps: sequences that `step` takes: those that `layout` says, or all, whose tokens have
            the same bits in every cut and batch then. Of all gradients are those of `scan`.

    Returns:
        Outputs of the tokens (no padding rows), final states `[R, ...]`, captures `[n, ...]`; in
        place of these two None where the states were changed in place.
    """
    num_tokens, first = layout.num_tokens, layout.cu_seqlens[num_steps]
    if isinstance(states_R, SlotStates):
        states = [states_R.pool_S[slot] for slot in states_R.slot_ids_R.tolist()]
        return _token_by_token(step, inputs_T, states, layout, states_R.captured_n), None, None
    if first > num_steps == layout.num_sequences:

        def steps(states_R: torch.Tensor, *inputs_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
            final_R = states_R.clone()
            captured_n = states_R.new_empty(len(layout.captures), *states_R.shape[1:])
            output = _token_by_token(step, inputs_T, list(final_R), layout, captured_n)
            return output, final_R, captured_n

        def again(states_R: torch.Tensor, *inputs_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return ragged_scan(step, scan, inputs_T, states_R, layout, plan, layout.num_steps)

        return with_gradient(steps, again, (states_R, *inputs_T))
    outputs, finals, captured = [], [], []
    calculated_R = states_R.to(inputs_T[0].dtype)
    counts = [count for count in layout.captures if count <= first]
    if first > num_steps:
        final = states_R[:num_steps].clone()
        captured.append(states_R.new_empty(len(counts), *states_R.shape[1:]))
        outputs.append(_token_by_token(step, inputs_T, list(final), layout, captured[0]))
        finals.append(final)
    elif num_steps:
        output, final = step(*(t[:num_steps] for t in inputs_T), calculated_R[:num_steps])
        outputs.append(output)
        finals.append(final)
        # A sequence of one token that is captured is captured at its end.
        captured += [final[count - 1 : count] for count in counts]
    if num_steps < layout.num_sequences:
        rest = (rows_between(t, first, num_tokens) for t in inputs_T)
        output, final, captured_scan = scan(*rest, calculated_R[num_steps:], plan())
        outputs.append(output)
        finals.append(final)
        captured.append(captured_scan)
    if not captured:
        captured.append(states_R[:0])
    return join(outputs), join(finals), join(captured)


def _token_by_token(
    step: Callable[..., torch.Tensor],
    inputs_T: tuple[torch.Tensor, ...],
    states: list[torch.Tensor],
    layout: RaggedLayout,
    captured_n: torch.Tensor | None,
) -> torch.Tensor:
    """Run all tokens of the first sequences, whose states it changes. Those at captures are written
    where they are kept, and read from there by the next token."""
    captured = {}
    if captured_n is not None:
        captured = dict(zip(layout.captures, captured_n.unbind()))
    moves = list(zip(states, states)) if layout.num_singles >= len(states) else []
    if not moves:  # of each token: the state before, the state after
        for state, (first, end) in zip(states, pairwise(layout.cu_seqlens)):
            inner = [captured.get(count, state) for count in range(first + 1, end)]
            moves += zip((state, *inner), (*inner, state))
    outputs = [
        step(
            *(rows_between(t, i, min(i + ROWS, len(moves))) for t in inputs_T), moves[i : i + ROWS]
        )
        for i in range(0, len(moves), ROWS)
    ]
    for end, state in zip(layout.cu_seqlens[1:], states if captured else ()):
        if end in captured:
            captured[end].copy_(state)
    return join(outputs)


def decay_matrix(cum_L: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute exp(cum[i] - cum[j]) for i >= j, 0 above the diagonal: `[..., L]` -> `[..., L, L]`.

    `cum_L` is a float64 running sum of log decays. After a strong decay the sums are in the
    hundreds, where the spacing of fp32 alone means an error of 1e-5 in later decays. So the sum is
    split in a rounded part and its rest: the difference of two nearby rounded parts is exact in
    fp32, and decays between distant ones vanish.
    """
    high = cum_L.to(dtype)
    diff = high.unsqueeze(-1) + (-high).unsqueeze(-2)
    if dtype != cum_L.dtype:
        low = (cum_L.detach() - high.detach()).to(dtype)
        diff.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))
    length = cum_L.shape[-1]
    future = torch.full((length, length), -torch.inf, dtype=dtype, device=cum_L.device).triu_(1)
    return diff.add_(future).exp_()
