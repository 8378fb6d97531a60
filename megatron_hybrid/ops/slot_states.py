"""SlotStates: recurrent states in the live slots of a pool."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from megatron_hybrid.ops.checks import compute_dtype
from megatron_hybrid.ops.dispatch import Op
from megatron_hybrid.ops.ragged import RaggedLayout


class SlotStates(NamedTuple):
    """One state of one layer, and the slots of the sequences of a call.

    A recurrent op starts sequence r from `pool_S[slot_ids_R[r]]` and writes the state after its
    last token there.
    """

    pool_S: torch.Tensor
    """The state in every live slot, `[S, *shape]`: a view of the pool, with any strides."""
    slot_ids_R: torch.Tensor
    """int64 `[R]`, all different."""
    captured_n: torch.Tensor | None = None
    """Output for the states at the layout's captures, `[n, *shape]`; None without captures."""

    @classmethod
    def zeros(
        cls,
        num_sequences: int,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> SlotStates:
        """Make the states of sequences that start and are not kept."""
        pool = torch.zeros((num_sequences, *shape), dtype=dtype, device=device)
        return cls(pool, torch.arange(num_sequences, device=device))


class SlotOp(Op):
    """An op that continues states in live slots: its parameter `initial_states_...`, which takes
    `SlotStates` or None, and the next one, which is the layout.

    Args:
        name: its own.
        scan: the reference as a function of initial states, see `in_slots`.
        contracts, conditions: as of `Op`; the tensors whose first size is T are flat.
        state: contract of one state.
        has_steps_in_place: see `in_slots`.
    """

    def __init__(
        self,
        name: str,
        scan: Callable[..., tuple],
        contracts: Mapping[str, str],
        *,
        state: str,
        conditions: Mapping[str, str],
        has_steps_in_place: bool = False,
    ) -> None:
        parameters = list(inspect.signature(scan).parameters)
        place = parameters.index("layout") - 1
        states, (kind, sizes) = parameters[place], state.split(" ", 1)
        of_states = {
            f"{states}.pool_S": f"{kind} any {sizes} or None",
            f"{states}.slot_ids_R": "int R or None",
            f"{states}.captured_n": f"{kind} n {sizes} or None",
        }
        apart = {
            f"{x} is None or len({x}) < 2 or {x}.stride(0)": f"the states in {x} share memory, and "
            "each is written to: give each its own"
            for x in ("pool_S", "captured_n")
        }
        with_captures = {
            "captured_n is not None or not n": "captured_n is None, and the "
            f"layout has {{n}} captures: give a tensor [{{n}}, {sizes.replace(' ', ', ')}] for them"
        }
        reference = in_slots(scan, place, has_steps_in_place)
        super().__init__(
            name,
            reference,
            {**contracts, **of_states},
            {**conditions, **with_captures, **apart},
            reads_host=has_steps_in_place,
        )


def in_slots(
    scan: Callable[..., tuple], place: int, has_steps_in_place: bool = False
) -> Callable[..., Any]:
    """Make the reference of a recurrent op: `scan` on states that are gathered and scattered.

    Args:
        scan: a function; its argument number `place` is the initial states `[R, *shape]`, None for
            zeros, and the next one the layout. Returns `(outputs, final states, captured states)`.
        place: number of the argument `SlotStates`; None there starts from zeros, keeps nothing.
        has_steps_in_place: whether `scan` also takes `SlotStates`, for decodes alone and for chunks
            of one token; it then changes the states in the pool, writes those at the
            captures, and its last two results are None.
    """
    names = list(inspect.signature(scan).parameters)
    chunk_place = names.index("chunk_size") if "chunk_size" in names else len(names)

    @functools.wraps(scan)
    def run(*inputs: Any) -> torch.Tensor:
        states = inputs[place]
        if states is None:
            return scan(*inputs)[0]
        layout, by_token = inputs[place + 1], inputs[chunk_place : chunk_place + 1] == (1,)
        is_stepped = has_steps_in_place and (by_token or layout.num_steps == layout.num_sequences)
        if is_stepped and _are_steps_in_place(states, layout):
            return scan(*inputs)[0]
        pool_S, slot_ids_R, captured_n = states
        initial_R = pool_S.index_select(0, slot_ids_R)
        y, final_R, captured = scan(*inputs[:place], initial_R, *inputs[place + 1 :])
        pool_S[slot_ids_R] = final_R.to(pool_S.dtype)
        if captured_n is not None:
            captured_n.copy_(captured)
        return y

    return run


def states_or_zeros(
    states: torch.Tensor | SlotStates | None, shape: tuple[int, ...], like: torch.Tensor
) -> torch.Tensor | SlotStates:
    """Return the initial states; for None zeros of `shape` in the compute dtype of `like`."""
    if states is None:
        return torch.zeros(shape, dtype=compute_dtype(like), device=like.device)
    return states


def _are_steps_in_place(states: SlotStates, layout: RaggedLayout) -> bool:
    """Return whether steps may change their states in the pool, slot by slot: where the host can
    read the slots' numbers without a wait, and nobody needs the states before.

    It has the bits of `scan` on gathered states, and takes a third of the time: a state is in the
    cache from its first read to its last.
    """
    return (
        layout.starts is None  # else the step is recorded, and replayed with other slots
        and states.pool_S.device.type == "cpu"
        and not torch.is_grad_enabled()
    )
