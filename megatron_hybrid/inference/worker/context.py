"""DynamicInferenceContext: one step's ragged batch, as the model sees it.

It lays out the tokens of a plan in rows (decodes first), gives the mixers their keys, values and
states, and keeps the states that they return. It decides nothing.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.cache.pages.allocator import NULL_PAGE
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.inference.memory.cache_pool import CachePool
from megatron_hybrid.inference.scheduling.step_plan import StepPlan, Work
from megatron_hybrid.inference.worker.mtp_context import PredictionContext
from megatron_hybrid.models.mixers.mixer_context import LatentHeads
from megatron_hybrid.ops import AttentionPattern, SlotStates, paged_attention
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT, RaggedLayout
from megatron_hybrid.ops.tape import Live
from megatron_hybrid.ops.to_device import to_device

_ALIGNMENT = 256
"""Alignment of arrays in bytes, as for torch's own allocations."""
Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each array at its largest, in the order of the block."""


def _sizes(fields: Fields) -> list[int]:
    return [math.prod(shape) * dtype.itemsize for shape, dtype in fields.values()]


def _ends(fields: Fields) -> list[int]:
    return list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in _sizes(fields)))


class StepBuffer:
    """Arrays in one block of pinned host memory, and their copies in one block on the device, which
    one copy mirrors. On a CPU both are the same memory.

    Args:
        fields: of the arrays.
        device: of the copies.

    Raises:
        RuntimeError: there is no memory for them.
    """

    @torch.inference_mode(False)  # a tensor made inside could not be written outside
    def __init__(self, fields: Fields, device: torch.device):
        sizes, ends = _sizes(fields), _ends(fields)
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=on_cuda)
        self._device = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._device = self._host
        self._copied = torch.cuda.Event() if on_cuda else None
        self.host: dict[str, np.ndarray] = {}
        """Arrays to write, between `begin` and `upload`."""
        self.device: dict[str, Tensor] = {}
        """Their copies."""
        self._starts = dict(zip(fields, (0, *ends)))
        for (name, (shape, dtype)), size in zip(fields.items(), sizes):
            start = self._starts[name]
            parts = [block[start : start + size] for block in (self._host, self._device)]
            host, copy = (part.view(dtype).view(shape) for part in parts)
            self.host[name], self.device[name] = host.numpy(), copy

    def begin(self) -> None:
        """Wait until the last upload has left host memory, when the device begins that step."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, last: str, used: int) -> None:
        """Copy all arrays up to the first `used` elements of `last`, without waiting."""
        if self._device is self._host:
            return
        end = self._starts[last] + used * self.host[last].itemsize
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device.device))


def input_fields(
    spec: CacheSpec,
    max_requests: int,
    max_tokens: int,
    max_sequence_length: int,
    max_captures: int,
    max_drafts: int = 0,
) -> Fields:
    """Return the inputs of a step at their largest; the block tables are the last ones."""
    columns = sum(spec.pages_per_block)
    max_blocks = -(-(max_sequence_length + max_drafts) // spec.block_size_tokens)
    num_tokens = min(max_tokens, max_requests * max_sequence_length)
    num_rows = -(-num_tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT
    int32, int64 = torch.int32, torch.int64
    return {
        "ready_slots": ((max_requests,), int64),
        "slots": ((max_requests,), int64),
        "last_rows": ((max_requests,), int64),
        "first_rows": ((max_requests,), int64),
        "starts": ((max_requests,), int32),
        "capture_rows": ((min(max_captures, num_tokens),), int64),
        "input_ids": ((num_rows,), int64),
        "positions": ((num_rows,), int64),
        "adapter_slots": ((num_rows,), int64),
        "write_pages": ((columns, num_rows), int64),
        "write_rows": ((num_rows,), int64),
        "logit_rows": ((num_tokens,), int64),
        # Last, as only its used part is copied: the tables of a step side by side. On the
        # device they are spread, so that a row's address does not follow from the others.
        "tables": ((columns * max_requests * max_blocks,), int32),
    }


def input_bytes(fields: Fields, device: torch.device) -> tuple[int, int]:
    """Count the bytes that a context takes: (in host memory, on the device). Both have block tables
    of all slots; a CPU has the buffer of a step once."""
    (num_entries,), dtype = fields["tables"]
    tables, buffer = num_entries * dtype.itemsize, _ends(fields)[-1]
    return tables + (0 if device.type == "cpu" else buffer), tables + buffer


class DynamicInferenceContext:
    """The `MixerContext` of a served model.

    The inputs of a step are views of tensors that are made once, at their largest. They keep their
    addresses, and a step overwrites those of the step before.

    Args:
        memory: pool and live slots.
        max_requests: rows of the block tables (live slots).
        max_tokens: of a step.
        max_sequence_length: tokens of one request, prompt and answer.
        max_captures: states captured inside a step's forward.
        max_drafts: of a request in a step.
        num_model_layers: layers before the MTP head, if the memory has those of the head, too.
        row_alignment: the rows of a step are a multiple of it; it divides `ROW_ALIGNMENT`.

    Sequences of a step are in the order of its works. The tokens of decodes have the bits of steps
    of their own, also those of drafts (`RaggedLayout.num_decodes`).

    Sequences that fill up a recorded step (`begin_step`) use a live slot of their own, number
    `max_requests`, which only a memory for recorded steps has.
    """

    same_tokens_on_expert_ranks = True  # see MixerContext

    def __init__(
        self,
        memory: CachePool,
        max_requests: int,
        max_tokens: int,
        max_sequence_length: int,
        max_captures: int,
        max_drafts: int = 0,
        num_model_layers: int | None = None,
        has_adapters: bool = False,
        row_alignment: int = ROW_ALIGNMENT,
    ):
        self.memory = memory
        self.adapter_slots: Tensor | None = None
        """The slot of each row's adapter, int64 [T], below 0 for none, if any row has one."""
        self._has_adapters, self._row_alignment = has_adapters, row_alignment
        self.prediction = (
            None if num_model_layers is None else PredictionContext(self, num_model_layers)
        )
        """The same batch for the MTP head, if the memory has its layers."""
        self.max_requests = max_requests
        self.max_drafts = max_drafts
        self.max_sequence_length = max_sequence_length
        self.block_size_tokens = memory.spec.block_size_tokens
        spec = memory.spec
        self._full_columns = spec.kv_pages_per_block
        local_columns = [spec.pages_per_block[group] for group in spec.local_groups]
        bounds = np.cumsum([0, self._full_columns, *local_columns]).tolist()
        self._columns = list(pairwise(bounds))  # full attention, then each local group
        # Positional block tables, one plane for each page column: [columns, slots, blocks].
        # Rows that fill up a decode with fewer drafts lie after its last token.
        max_blocks = -(-(max_sequence_length + max_drafts) // self.block_size_tokens)
        shape = bounds[-1], len(memory.slots), max_blocks
        sizes = max_requests, max_tokens, max_sequence_length, max_captures, max_drafts
        self._tables = np.full(shape, NULL_PAGE, dtype=np.int32)
        self._known_tables: list[list[np.ndarray]] = [[]] * shape[1]  # in `_tables`, by slot
        self._buffer = StepBuffer(input_fields(spec, *sizes), memory.device)
        self._inputs: dict[str, Tensor] = {}  # the used parts of the last step's, by name
        self._rows: tuple | None = None  # arguments of the last `_fill_rows`
        self._filled: tuple | None = None  # slots and shape of the last `_fill_tables`
        with torch.inference_mode(False):
            self._step_tables = torch.zeros(
                (shape[0], max_requests, max_blocks), dtype=torch.int32, device=memory.device
            )
        self._staging = memory.staging(0)
        # Writes to the null page, as no blocks are in its table.
        self._filler = Work(-1, max_requests, 0, np.zeros(1, np.int32), 0, [], num_logits=1)
        # By number of decodes, and of rows of each.
        self._fixed_layouts: dict[tuple[int, int], RaggedLayout] = {}
        self._fixed_staging: Tensor | None = None
        self._max_recorded = min(max_requests, max_tokens // (1 + max_drafts))
        self.drawn_tokens: Tensor | None = None
        """Tokens that the last step drew, int64 [draws], of `mark_failures`; see `Work.source`."""
        self.first_captures: list[int] = []
        """Place in `captured_states` of the first state of each `Work` of the last step."""
        self._recorded_layout: RaggedLayout | None = None
        self._live: Live | None = None

    # Laying out a step -------------------------------------------------------------------------

    def begin_step(
        self,
        plan: StepPlan,
        num_decodes: int | None = None,
        num_rows: int = 1,
        padded_to: int = 0,
    ) -> None:
        """Build the batch of `plan`, after its restores.

        Args:
            padded_to: least number of rows of a step that is not recorded; rows after its tokens
                belong to no token.
            num_decodes: decodes of a recorded step: those of the plan, whose other work is left
                out, and decodes of no request after them. All rows have logits. All that a forward
                reads then has shapes and addresses that depend on this number and `num_rows` alone,
                and the host has bounds of positions.
            num_rows: rows of each of these decodes: one, or 1 + `max_drafts`. A decode with fewer
                is filled up with rows of drafts that are taken back, see `end_recorded`.
        """
        self._buffer.begin()
        ready_slots = [ready.slot for ready in plan.ready] if num_decodes is None else []
        num_ready = len(ready_slots)
        self._buffer.host["ready_slots"][:num_ready] = ready_slots
        self._ready_slots = self._buffer.device["ready_slots"][:num_ready]
        if num_decodes is not None:
            works = plan.work + [self._filler] * (num_decodes - len(plan.work))
            self._lay_out(works, num_rows)
        elif plan.work:
            self._lay_out(plan.work, padded_to=padded_to)
        else:
            self._buffer.upload("slots", 0)
            self._staging = self.memory.staging(0)

    def begin_pass(self) -> None:
        """Begin a forward over a batch that is laid out, and forget what an earlier forward has
        computed from other positions."""
        self._layout.forget_derived()

    def end_recorded(self, plan: StepPlan) -> None:
        """Set the slots of a recorded step's decodes that were filled up to the states after their
        own tokens."""
        num_rows, firsts = self._layout.lengths[0], self.first_captures
        places = {
            work.slot: first + len(work.tokens) - 1
            for work, first in zip(plan.work, firsts)
            if len(work.tokens) < num_rows
        }
        self.take_back(places)

    def take_back(self, places: dict[int, int]) -> None:
        """Set live slots to the states at these places of `captured_states`."""
        if places:
            slots_n, places_n = to_device(list(zip(*places.items())), self.memory.device)
            # As words: copies of single bytes take several times as long.
            states = self._staging.view(torch.int64).index_select(0, places_n)
            self.memory.slots.view(torch.int64).index_copy_(0, slots_n, states)

    def _fixed_layout(self, num_decodes: int, num_rows: int) -> RaggedLayout:
        """Return the layout of a recorded step, always the same object, as it holds tensors."""
        key = num_decodes, num_rows
        if key not in self._fixed_layouts:
            num_tokens = num_decodes * num_rows
            self._fixed_layouts[key] = RaggedLayout(
                (num_rows,) * num_decodes,
                (self.max_sequence_length - 1,) * num_decodes,
                # After all rows but the last one of each decode.
                tuple(row for row in range(1, num_tokens) if row % num_rows),
                -num_tokens % self._row_alignment,
                self._buffer.device["starts"][:num_decodes],
                num_decodes,
            )
        return self._fixed_layouts[key]

    def forget_layouts(self) -> None:
        """Drop the layouts of recorded steps, and the room for their captures."""
        self._fixed_layouts.clear()
        self._fixed_staging = None

    def _lay_out(self, works: list[Work], num_rows: int | None = None, padded_to: int = 0) -> None:
        """Lay out works in rows. num_rows: as for `begin_step`, if the step is a recorded one."""
        for work in works:
            self._update_tables(work.slot, work.tables)
        if num_rows is not None:
            self._layout = self._fixed_layout(len(works), num_rows)
            self.first_captures = [i * (num_rows - 1) for i in range(len(works))]
        else:
            self._layout = self._new_layout(works, padded_to)
        self._fill_inputs(works, num_rows is not None, num_rows is not None or padded_to > 0)
        self._fill_tables(num_rows is not None)
        if drawn := [(row, work) for row, work in enumerate(works) if work.source >= 0]:
            self._take_drawn(*zip(*drawn))  # single tokens come first
        num_captures = len(self._layout.captures)
        if num_rows is None or not num_captures:
            self._staging = self.memory.staging(num_captures)
            return
        if self._fixed_staging is None:  # a recorded step always writes to the same place
            self._fixed_staging = self.memory.staging(self.max_drafts * self._max_recorded)
        self._staging = self._fixed_staging[:num_captures]

    def _new_layout(self, works: list[Work], padded_to: int) -> RaggedLayout:
        captures, self.first_captures, begin, num_decodes = [], [], 0, 0
        for number, work in enumerate(works, start=1):
            self.first_captures.append(len(captures))
            # The state at the end is the live slot itself, after the forward.
            if work.saves or work.draft_draws:
                captures += [begin + position - work.start for position in work.captures]
            if work.draft_draws:
                num_decodes = number
            begin += len(work.tokens)
        lengths, starts = [len(work.tokens) for work in works], [work.start for work in works]
        padding = max(-begin % self._row_alignment, padded_to - begin)
        return RaggedLayout(lengths, starts, captures, padding, num_decodes=num_decodes)

    def _input(self, name: str, length: int) -> np.ndarray:
        """Return the used part of an input, to fill; `_inputs` has it on the device."""
        before = self._inputs.get(name)
        if before is None or before.shape[-1] != length:
            self._inputs[name] = self._buffer.device[name].narrow(-1, 0, length)
        return self._buffer.host[name][..., :length]

    def _fill_inputs(self, works: list[Work], is_recorded: bool, has_adapters: bool) -> None:
        """Write all inputs of a step but the block tables. has_adapters: whether rows have slots of
        adapters even if no work has an adapter."""
        layout, array = self._layout, self._input
        counts = [len(work.tokens) for work in works]
        wanted = layout.lengths if is_recorded else [work.num_logits for work in works]
        rows = layout.num_rows, layout.lengths, layout.captures, counts, wanted
        if rows != self._rows:  # decodes have those of the step before
            self._rows = None
            self._fill_rows(*rows)
            self._rows = rows
        own, numbers = self._own, [(w.start, w.slot, w.shared_tokens) for w in works]
        starts, slots, shared = np.asarray(numbers, dtype=np.int64).T
        array("starts", len(works))[:] = starts
        array("slots", len(works))[:] = slots
        array("input_ids", layout.num_rows)[own] = np.concatenate([work.tokens for work in works])
        positions = array("positions", layout.num_rows)
        positions[: layout.num_tokens] = starts[self._owners] + self._offsets
        self._fill_targets(positions, slots, shared)
        self.adapter_slots = None
        adapters = [work.adapter_slot for work in works] if self._has_adapters else []
        if adapters and (has_adapters or max(adapters) >= 0):
            filled = array("adapter_slots", layout.num_rows)
            filled[layout.num_tokens :] = -1
            filled[: layout.num_tokens] = np.asarray(adapters)[self._owners]
            self.adapter_slots = self._inputs["adapter_slots"]

    def _fill_rows(
        self,
        num_rows: int,
        lengths: Sequence[int],
        captures: Sequence[int],
        counts: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        """Write what depends on rows alone: num_rows, all of them; lengths, those of each work;
        captures, those before which states are kept; counts, those with tokens; wanted, the last
        ones, with logits."""
        array, lengths, counts, wanted = self._input, *map(np.asarray, (lengths, counts, wanted))
        begins = np.cumsum(lengths) - lengths
        self._owners = owners = np.repeat(np.arange(len(lengths)), lengths)
        self._offsets = offsets = np.arange(len(owners)) - begins[owners]
        self._own = slice(0, len(owners))
        if (counts < lengths).any():  # a recorded step, some of whose decodes are filled up
            self._own = np.flatnonzero(offsets < counts[owners])
        array("input_ids", num_rows)[:] = array("positions", num_rows)[:] = 0
        array("write_pages", num_rows)[:] = NULL_PAGE
        array("first_rows", len(lengths))[:] = begins
        array("last_rows", len(lengths))[:] = begins + counts - 1
        capture_rows = array("capture_rows", len(captures))
        np.subtract(captures, 1, out=capture_rows, casting="unsafe")
        row_ends, num_logits = np.cumsum(wanted), int(wanted.sum())
        firsts = np.repeat(begins + lengths - row_ends, wanted)  # less their places among all
        np.add(firsts, np.arange(num_logits), out=array("logit_rows", num_logits))
        write_rows = self._buffer.device["write_rows"][:num_rows]
        self._targets = [(page, write_rows) for page in self._inputs["write_pages"].unbind(0)]

    def _fill_targets(self, positions: np.ndarray, slots: np.ndarray, shared: np.ndarray) -> None:
        """Write the targets of each token's K and V: (page of its block, row in it). Tokens whose
        KV is shared or copied, and padding, get the null page, so that no shared block is ever
        written. slots, shared: of each sequence, int64 [R], see `Work`."""
        block, own = self.block_size_tokens, self._own
        owners, positions_n = self._owners[own], positions[own]
        targets = self._tables[:, slots[owners], positions_n // block]
        targets[: self._full_columns, np.flatnonzero(positions_n < shared[owners])] = NULL_PAGE
        self._input("write_pages", len(positions))[:, own] = targets
        np.remainder(positions, block, out=self._input("write_rows", len(positions)))

    def _fill_tables(self, is_recorded: bool) -> None:
        """Upload all inputs with the block tables of the sequences."""
        slots, starts = self._buffer.host["slots"], self._buffer.host["starts"]
        count = self._layout.num_sequences
        last_end = int((starts[:count] + self._layout.lengths).max())
        shape = len(self._tables), count, -(-last_end // self.block_size_tokens)
        num_entries = math.prod(shape)
        filled = slots[:count].tolist(), shape, is_recorded
        if has_changed := filled != self._filled:
            self._filled = None
            np.take(
                self._tables[:, :, : shape[2]],
                slots[:count],
                axis=1,
                out=self._buffer.host["tables"][:num_entries].reshape(shape),
                mode="clip",
            )
        self._buffer.upload("tables", num_entries)
        if has_changed:
            tables = self._step_tables[:, :count]
            used = tables[:, :, : shape[2]]
            used.copy_(self._buffer.device["tables"][:num_entries].view(shape))
            self._column_tables = (tables if is_recorded else used).unbind(0)
            self._filled = filled

    def _take_drawn(self, rows: Sequence[int], works: Sequence[Work]) -> None:
        """Write the tokens of rows of a step that was launched ahead, on the device. A row becomes
        one of no request if its token has ended the request, or will be drawn again."""
        inputs = self._inputs
        most = max(len(work.stops) for work in works)
        stops = [work.stops + (-1,) * (most - len(work.stops)) for work in works]
        columns = [rows, [work.source for work in works], *zip(*stops)]
        rows_n, sources_n, *stops_n = to_device(columns, self.memory.device)
        tokens_n = self.drawn_tokens.index_select(0, sources_n)
        is_void_n = tokens_n < 0
        for stop_n in stops_n:
            is_void_n |= tokens_n == stop_n
        inputs["input_ids"].index_copy_(0, rows_n, tokens_n.masked_fill(is_void_n, 0))
        for name, filler in (("slots", self._filler.slot), ("write_pages", NULL_PAGE)):
            own = inputs[name].index_select(-1, rows_n).masked_fill_(is_void_n, filler)
            inputs[name].index_copy_(-1, rows_n, own)

    @property
    def input_ids(self) -> Tensor:
        """Tokens of the step, int64 [1, T padded]."""
        return self._inputs["input_ids"][None]

    def _update_tables(self, slot: int, tables: list[np.ndarray]) -> None:
        known = self._known_tables[slot]
        if len(known) == len(tables) and all(map(operator.is_, known, tables)):
            return
        self._known_tables[slot], self._filled = tables, None
        for (first, last), table in zip(self._columns, tables):
            self._tables[first:last, slot, : len(table)] = table.T

    def captured_states(self) -> Tensor:
        """Return the slot bytes of the states captured inside the last forward, uint8 [n,
        slot_bytes]: those of each `Work.captures`, from `first_captures` on."""
        return self._staging

    # For the model -----------------------------------------------------------------------------

    @contextmanager
    def recording(self, layout: RaggedLayout) -> Iterator[Live]:
        """Make a context in which a step that is laid out is recorded, for steps with as many rows.
        It yields the values that are live in these.

        layout: of the step, with bounds of its positions; values that are not live depend on it.
        """
        layout.forget_derived()
        self._recorded_layout, live = layout, Live()
        for one in (layout, self._layout):
            live.add(one, lambda: self._layout)
        for column, table in enumerate(self._column_tables):
            live.add(table, lambda column=column: self._column_tables[column])
        self._live = live
        try:
            yield live
        finally:
            self._recorded_layout = self._live = None

    def single_decodes(self) -> RaggedLayout:
        """Return the layout of a step of decodes of one row each, for `recording`."""
        return self._fixed_layout(self._layout.num_sequences, 1)

    def one_prompt(self, num_rows: int) -> tuple[StepPlan, RaggedLayout]:
        """Make a step of one prompt of no request, and its layout for `recording`."""
        tokens = np.zeros(num_rows, np.int32)
        work = Work(-1, self.max_requests, 0, tokens, num_rows, [], num_logits=0)
        bounds = (self.max_sequence_length - 1,)
        starts = self._buffer.device["starts"][:1]
        return StepPlan(work=[work]), RaggedLayout((num_rows,), bounds, starts=starts)

    def ragged_layout(self) -> RaggedLayout:
        return self._recorded_layout or self._layout

    def token_positions(self) -> Tensor:
        """Return the absolute position of each row, int64 [T padded]."""
        return self._inputs["positions"]

    def states(self, layer_number: int, name: str) -> SlotStates:
        """Return a layer's state in all live slots, the step's slots, and room for captures."""
        captured = None
        if len(self._staging):
            captured = self.memory.state(layer_number, name, self._staging)
        pool_S = self.memory.state(layer_number, name)
        found = SlotStates(pool_S, self._inputs["slots"], captured)
        if self._live is not None:
            self._live.add(found, partial(self.states, layer_number, name))
        return found

    def attend(
        self,
        layer_number: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKP: Tensor | None,
        pattern: AttentionPattern,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attend to the pages of one layer, and return [T padded, H, P]; see `MixerContext`."""
        if k_TKD is not None:
            self._keep(layer_number, k_TKD, v_TKP)
        pages = self.key_value_cache(layer_number)
        return paged_attention(q_THD, *pages, self._layout, pattern, sinks_H)

    def attend_latents(
        self,
        layer_number: int,
        q_THD: Tensor,
        latents_TL: Tensor,
        heads: LatentHeads,
        pattern: AttentionPattern,
    ) -> Tensor:
        """Attend to the latents, one key/value head whose values are a part of its keys, and return
        [T padded, H, P]; see `MixerContext`."""
        self._keep(layer_number, latents_TL[:, None], None)
        pages, _, block_table = self.key_value_cache(layer_number)
        values = pages[..., : heads.rank]
        q_THr = heads.absorb(q_THD)
        o_THr = paged_attention(q_THr, pages, values, block_table, self._layout, pattern)
        return heads.values(o_THr)

    def _keep(self, layer_number: int, k_TKD: Tensor, v_TKP: Tensor | None) -> None:
        """Store K [T padded, K, D] (after RoPE) and V [T padded, K, P] of the step's tokens.

        Raises:
            ValueError: values are given for a layer that keeps none (`KVShape.value_dim` 0), or are
                None for one that does.
        """
        key_pages, value_pages = self.memory.kv_pages(layer_number)
        if (v_TKP is None) != (value_pages.shape[-1] == 0):
            raise ValueError(
                f"layer {layer_number} keeps {value_pages.shape[-1]} value dimensions, and its "
                f"values are {'None' if v_TKP is None else list(v_TKP.shape)}: pass None where "
                "KVShape.value_dim is 0, and only there"
            )
        target = self._targets[self._column(layer_number)]
        key_pages.index_put_(target, k_TKD.to(key_pages.dtype))
        if v_TKP is not None:
            value_pages.index_put_(target, v_TKP.to(value_pages.dtype))

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (K pages [n, B, K, D], V pages [n, B, K, P], block table int32 [R, M]) of a layer.
        P is 0 if the layer keeps no values."""
        table = self._column_tables[self._column(layer_number)]
        return (*self.memory.kv_pages(layer_number), table)

    def _column(self, layer_number: int) -> int:
        local_group, column = self.memory.table_of_layer[layer_number]
        return column if local_group is None else self._columns[1 + local_group][0] + column

    def last_token_logits(self, hidden_1TH: Tensor) -> Tensor:
        """Return the rows that need logits, [n, H], and save the last hidden states.

        Rows are in the order of `plan.work` (`num_logits` each), then one for each of `plan.ready`,
        from its checkpoint.
        """
        hidden_TH, inputs = hidden_1TH[0], self._inputs
        live = self.memory.hidden()
        live[inputs["slots"]] = hidden_TH[inputs["last_rows"]].to(live.dtype)
        if len(self._staging):
            self.memory.hidden(self._staging).copy_(hidden_TH[inputs["capture_rows"]])
        return torch.cat([hidden_TH[inputs["logit_rows"]], self.ready_hidden().to(hidden_TH.dtype)])

    def previous_hidden(self, hidden_Th: Tensor) -> Tensor:
        """Return the hidden state of the token before each row, [T padded, H]: of the row before
        or, for the first one of a request, `live_hidden`. Call it before `last_token_logits`."""
        previous_Th = torch.cat((hidden_Th[:1], hidden_Th))  # the last one precedes no row
        live_nH = self.live_hidden().to(hidden_Th.dtype)
        return previous_Th.index_copy_(0, self._inputs["first_rows"], live_nH)[:-1]

    def live_hidden(self) -> Tensor:
        """Return the hidden states in the requests' live slots, [n, H]: those of the token before
        the first one of the step, or zeros."""
        return self.memory.hidden()[self._inputs["slots"]]

    def ready_hidden(self) -> Tensor:
        """Return the last hidden states of the plan's ready requests, [n, H]."""
        return self.memory.hidden()[self._ready_slots]
