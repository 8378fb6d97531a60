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
    by_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Run the leading single tokens by `step` and all other sequences by `scan`.

    Args:
        step: `(*inputs of the steps, states) -> (outputs, states after them)`; or
            `(*inputs, list of R states) -> outputs`, and changes the states, one after the other.
        scan: `(*inputs of the rest, states, plan()) -> (outputs, final, captured states)`.
        inputs_T: flat tensors; padding rows are not read.
        states_R: initial states, one per sequence; or where they are, to be changed by `step`.
        layout: lengths, positions and captures.
        plan: makes the last argument of `scan` from the layout; called only if `scan` is.
        by_token: take all tokens by `step`, on a list of states: a token then has the same bits in
            every cut and batch. Gradients are those of `scan`.

    Returns:
        Outputs of the tokens (no padding rows), final states `[R, ...]`, captures `[n, ...]`; in
        place of these two None where the states were changed in place.
    """
    num_steps, num_tokens = layout.num_steps, layout.num_tokens
    if isinstance(states_R, SlotStates):
        states = [states_R.pool_S[slot] for slot in states_R.slot_ids_R.tolist()]
        return _token_by_token(step, inputs_T, states, layout, states_R.captured_n), None, None
    if by_token:

        def steps(states_R: torch.Tensor, *inputs_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
            final_R = states_R.clone()
            captured_n = states_R.new_empty(len(layout.captures), *states_R.shape[1:])
            output = _token_by_token(step, inputs_T, list(final_R), layout, captured_n)
            return output, final_R, captured_n

        def again(states_R: torch.Tensor, *inputs_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return ragged_scan(step, scan, inputs_T, states_R, layout, plan)

        return with_gradient(steps, again, (states_R, *inputs_T))
    outputs, finals, captured = [], [], []
    if num_steps:
        output, final = step(*(t[:num_steps] for t in inputs_T), states_R[:num_steps])
        outputs.append(output)
        finals.append(final)
        # A sequence of one token that is captured is captured at its end.
        captured += [final[count - 1 : count] for count in layout.captures if count <= num_steps]
    if num_steps < layout.num_sequences:
        rest = (rows_between(t, num_steps, num_tokens) for t in inputs_T)
        output, final, captured_scan = scan(*rest, states_R[num_steps:], plan())
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
    """Outputs of all tokens. Changes the states, and writes those at the captures."""
    states_T = [s for s, length in zip(states, layout.lengths, strict=True) for _ in range(length)]
    places = {count: place for place, count in enumerate(layout.captures)}
    ends = {*range(ROWS, layout.num_tokens, ROWS), layout.num_tokens, *places}
    outputs = []
    for first, end in pairwise((0, *sorted(ends))):
        outputs.append(step(*(rows_between(t, first, end) for t in inputs_T), states_T[first:end]))
        if end in places:
            captured_n[places[end]] = states_T[end - 1]
    return join(outputs)


def decay_matrix(cum_L: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp(cum[i] - cum[j]) for i >= j and 0 above the diagonal: `[..., L]` -> `[..., L, L]`.

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
