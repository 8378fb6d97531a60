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
from megatron_hybrid.ops.to_device import to_device


class SlotStates(NamedTuple):
    """One state of one layer, and the slots of the sequences of a call.

    A recurrent op starts sequence r from `pool_S[slot_ids_R[r]]` and writes the state after its
    last token there.
    """

    pool_S: torch.Tensor
    """The state in every live slot, `[S, *shape]`: a view of the pool, with any strides."""
    slot_ids_R: torch.Tensor
    """int64 `[R]`, all different but for those of other depths."""
    captured_n: torch.Tensor | None = None
    """Output for the states at the layout's captures, `[n, *shape]`; None: the layout has none."""

    @classmethod
    def zeros(
        cls,
        num_sequences: int,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> SlotStates:
        """States of sequences that start and are not kept."""
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
        self._place = parameters.index("layout") - 1
        self._flat = [
            parameters.index(own) for own, text in contracts.items() if text.startswith("T ")
        ]
        states, (kind, sizes) = parameters[self._place], state.split(" ", 1)
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
            f"captured_n is not None or not n or {states} is None": "captured_n is None, and the "
            f"layout has {{n}} captures: give a tensor [{{n}}, {sizes.replace(' ', ', ')}] for them"
        }
        reference = in_slots(scan, self._place, has_steps_in_place)
        super().__init__(
            name, reference, {**contracts, **of_states}, {**conditions, **with_captures, **apart}
        )

    def _serve(self, *inputs: Any) -> Any:
        """Run as `Op._serve`; where sequences continue each other, a depth after the other, by the
        same steps that they would take in a call each."""
        states, layout = inputs[self._place], inputs[self._place + 1]
        if not layout.depths:
            return super()._serve(*inputs)
        own, outputs = list(inputs), None
        for part in layout.passes(inputs[0].device):
            for number in self._flat:
                own[number] = inputs[number].index_select(0, part.rows_T)
            captured = None
            if part.layout.captures:
                captured = torch.empty_like(states.captured_n[: len(part.layout.captures)])
            slots_R = states.slot_ids_R.index_select(0, part.sequences_R)
            own[self._place] = SlotStates(states.pool_S, slots_R, captured)
            own[self._place + 1] = part.layout
            y = super()._serve(*own)
            if outputs is None:
                outputs = y.new_zeros(layout.num_rows, *y.shape[1:])
            outputs.index_copy_(0, part.rows_T, y)
            if captured is not None:
                states.captured_n.index_copy_(0, part.captures_n, captured)
        return outputs


def in_slots(
    scan: Callable[..., tuple], place: int, has_steps_in_place: bool = False
) -> Callable[..., Any]:
    """The reference of a recurrent op: `scan` on states that are gathered and scattered.

    Args:
        scan: a function; its argument number `place` is the initial states `[R, *shape]`, None for
            zeros, and the next one the layout. Returns `(outputs, final states, captured states)`.
        place: number of the op's argument `SlotStates`; None there: start from zeros, keep nothing.
        has_steps_in_place: whether `scan` also takes `SlotStates`, for sequences of one token each
            and for chunks of one token; it then changes the states in the pool, writes those at the
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
        if is_stepped and _are_steps_in_place(inputs, states, layout):
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
    """The initial states in the compute dtype of `like`, zeros of `shape` for None; those in slots
    as they are."""
    if states is None:
        return torch.zeros(shape, dtype=compute_dtype(like), device=like.device)
    return states.to(compute_dtype(like)) if isinstance(states, torch.Tensor) else states


def _are_steps_in_place(inputs: tuple, states: SlotStates, layout: RaggedLayout) -> bool:
    """Return whether steps may change their states in the pool, slot by slot: where the host can
    read the slots' numbers without a wait, and nobody needs the states before.

    It has the bits of `scan` on gathered states where these are in fp32 in both, and takes a third
    of the time: a state is in the cache from its first read to its last.
    """
    pool_S = states.pool_S
    return (
        layout.starts is None  # else the step is recorded, and replayed with other slots
        and pool_S.device.type == "cpu"
        and pool_S.dtype == torch.float32 == compute_dtype(inputs[0])
        and not torch.is_grad_enabled()
    )


def capture_steps(states: SlotStates, layout: RaggedLayout) -> None:
    """Copy the captures among the leading steps of a layout, whose states are in the pool: a
    sequence of one token is captured at its end."""
    rows = [count - 1 for count in layout.captures if count <= layout.num_steps]
    if rows:
        rows_n = layout.cached(
            ("captured_steps", states.pool_S.device),
            lambda: to_device(rows, states.pool_S.device),
        )
        slots_n = states.slot_ids_R.index_select(0, rows_n)
        states.captured_n[: len(rows)] = states.pool_S.index_select(0, slots_n)


def step_rows(layout: RaggedLayout) -> int:
    """Rows that a kernel of the leading steps writes: with the padding, where nothing else does."""
    return layout.num_rows if layout.num_steps == layout.num_sequences else layout.num_steps
