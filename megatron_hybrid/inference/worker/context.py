"""DynamicInferenceContext: one step's ragged batch, as the model sees it.

It lays out the tokens of a plan in rows (decodes first), gives the mixers their keys, values and
states, and keeps the states that they return. It decides nothing. It also implements the dynamic
context of megatron-core's own attention.
"""

import math
import operator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.cache.pages.allocator import NULL_PAGE
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.compat import (
    BaseInferenceContext,
    apply_rotary_pos_emb,
    inference_context_arguments,
)
from megatron_hybrid.inference.memory.cache_memory import CacheMemory
from megatron_hybrid.inference.scheduling.step_plan import StepPlan, Work
from megatron_hybrid.inference.worker.mtp_context import PredictionContext
from megatron_hybrid.inference.worker.step_buffer import Fields, StepBuffer, buffer_bytes
from megatron_hybrid.models.mixers.mixer_context import LatentHeads
from megatron_hybrid.ops import AttentionPattern, SlotStates, paged_attention
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT, RaggedLayout


def input_fields(
    spec: CacheSpec,
    max_requests: int,
    max_tokens: int,
    max_sequence_length: int,
    max_captures: int,
    max_drafts: int = 0,
) -> Fields:
    """Inputs of a step at their largest; the block tables are the last ones."""
    num_sequences = max_requests * (1 + max_drafts)
    columns = sum(spec.pages_per_block)
    max_blocks = -(-max_sequence_length // spec.block_size_tokens)
    num_tokens = min(max_tokens, max_requests * max_sequence_length)
    num_rows = -(-num_tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT
    int32, int64 = torch.int32, torch.int64
    return {
        "ready_slots": ((max_requests,), int64),
        "slots": ((num_sequences,), int64),
        "live_slots": ((num_sequences,), int64),
        "last_rows": ((num_sequences,), int64),
        "first_slots": ((num_sequences,), int64),
        "first_rows": ((num_sequences,), int64),
        "cu_queries": ((num_sequences + 1,), int32),
        "cu_keys": ((num_sequences + 1,), int32),
        "kv_lengths": ((num_sequences,), int32),
        "starts": ((num_sequences,), int32),
        "capture_rows": ((min(max_captures, num_tokens),), int64),
        "input_ids": ((num_rows,), int64),
        "positions": ((num_rows,), int64),
        "write_pages": ((columns, num_rows), int64),
        "write_rows": ((num_rows,), int64),
        "logit_rows": ((num_tokens,), int64),
        # Last, as only its used part is copied: the tables of a step side by side. On the
        # device they are spread, so that a row's address does not follow from the others.
        "tables": ((columns * num_sequences * max_blocks,), int32),
    }


def input_bytes(fields: Fields, device: torch.device) -> tuple[int, int]:
    """Bytes that a context takes: (in host memory, on the device). Both have block tables of all
    slots; a CPU has the buffer of a step once."""
    (num_entries,), dtype = fields["tables"]
    tables, buffer = num_entries * dtype.itemsize, buffer_bytes(fields)
    return tables + (0 if device.type == "cpu" else buffer), tables + buffer


def _captured_rows(num_tokens: int, num_rows: int) -> list[int]:
    """`RaggedLayout.captures` of decodes of so many rows each: behind all but their last ones."""
    return [row for row in range(1, num_tokens) if row % num_rows]


class DynamicInferenceContext(BaseInferenceContext):
    """The inference context of a hybrid model.

    The inputs of a step are views of tensors that are made once, at their largest: they keep their
    addresses, and a step overwrites those of the step before.

    Args:
        memory: pool and live slots.
        max_requests: rows of the block tables (live slots).
        max_tokens: of a step.
        max_sequence_length: tokens of one request, prompt and answer.
        max_captures: states captured inside a step's forward.
        max_drafts: of a request in a step.
        num_model_layers: those in front of the part for multi-token prediction, whose layers the
            memory has, too; None: it has none.

    A decode with drafts is laid out as so many decodes, each of which continues the one before it
    (`RaggedLayout.depths`): all have the bits of decodes in steps of their own.

    Rows that fill up a recorded step (`begin_step`) use a live slot of their own, number
    `max_requests`, which only a memory for recorded steps has.
    """

    use_flashinfer_fused_rope = False
    num_speculative_tokens = 0

    same_tokens_on_expert_ranks = True  # see MixerContext

    def __init__(
        self,
        memory: CacheMemory,
        max_requests: int,
        max_tokens: int,
        max_sequence_length: int,
        max_captures: int,
        max_drafts: int = 0,
        num_model_layers: int | None = None,
    ):
        super().__init__(*inference_context_arguments())
        self.memory = memory
        self.prediction = (
            None if num_model_layers is None else PredictionContext(self, num_model_layers)
        )
        """The same batch for the part for multi-token prediction; None: it keeps nothing."""
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
        max_blocks = -(-max_sequence_length // self.block_size_tokens)
        shape = bounds[-1], len(memory.slots), max_blocks
        sizes = max_requests, max_tokens, max_sequence_length, max_captures, max_drafts
        self._tables = np.full(shape, NULL_PAGE, dtype=np.int32)
        self._known_tables: list[list[np.ndarray]] = [[]] * shape[1]  # in `_tables`, by slot
        self._buffer = StepBuffer(input_fields(spec, *sizes), memory.device)
        self._inputs: dict[str, Tensor] = {}  # the used parts of the last step's, by name
        with torch.inference_mode(False):
            self._step_tables = torch.zeros(
                (shape[0], max_requests * (1 + max_drafts), max_blocks),
                dtype=torch.int32,
                device=memory.device,
            )
        self._staging = memory.staging(0)
        # Writes to the null page, as no blocks are in its table.
        self._filler = Work(-1, max_requests, 0, np.zeros(1, np.int32), 0, [], num_logits=1)
        # By number of decodes, and of rows of each.
        self._fixed_layouts: dict[tuple[int, int], RaggedLayout] = {}
        self._fixed_staging: Tensor | None = None
        self._max_recorded = min(max_requests, max_tokens // (1 + max_drafts))
        self.first_captures: list[int] = []
        """Of each `StepPlan.work` of the last step, where its states begin in
        `captured_states`."""

    # Laying out a step -------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan, num_decodes: int | None = None, num_rows: int = 1) -> None:
        """Build the batch of `plan`, after its restores.

        Args:
            num_decodes: for a recorded step of so many decodes: those of the plan, which has
                nothing else, and rows of no request behind each and behind them all. All that a
                forward reads then has shapes and addresses that depend on this number and
                `num_rows` alone, and the host tells it bounds of positions.
            num_rows: of each of these decodes: one, or with `max_drafts` drafts.
        """
        self._buffer.begin()
        num_ready = len(plan.ready)
        self._buffer.host["ready_slots"][:num_ready] = [ready.slot for ready in plan.ready]
        self._ready_slots = self._buffer.device["ready_slots"][:num_ready]
        if num_decodes is not None:
            works = plan.work + [self._filler] * (num_decodes - len(plan.work))
            filled = [[work, *[self._filler] * (num_rows - len(work.tokens))] for work in works]
            self._lay_out([work for group in filled for work in group], num_rows)
        elif plan.work:
            self._lay_out(plan.work)
        else:
            self._buffer.upload("slots", 0)
            self._staging = self.memory.staging(0)

    def begin_pass(self) -> None:
        """Begin a forward over a batch that is laid out: what an earlier one worked out from the
        positions may be of other ones."""
        self._layout.forget_derived()

    def _fixed_layout(self, num_sequences: int, num_rows: int, num_padding: int) -> RaggedLayout:
        """The layout of a recorded step; always the same one, as it holds tensors."""
        key = num_sequences // num_rows, num_rows
        if key not in self._fixed_layouts:
            last = self.max_sequence_length - 1
            depths = tuple(range(num_rows)) * key[0] if num_rows > 1 else ()
            self._fixed_layouts[key] = RaggedLayout(
                (1,) * num_sequences,
                (last,) * num_sequences,
                tuple(_captured_rows(num_sequences, num_rows)),
                num_padding,
                self._buffer.device["starts"][:num_sequences],
                depths,
            )
        return self._fixed_layouts[key]

    def _fixed_states(self, count: int) -> Tensor:
        """Room for the captures of a recorded step; always the same one."""
        if self._fixed_staging is None:
            self._fixed_staging = self.memory.staging(self.max_drafts * self._max_recorded)
        return self._fixed_staging[:count]

    def forget_layouts(self) -> None:
        """Drop what recorded steps have made for their layouts."""
        self._fixed_layouts.clear()
        self._fixed_staging = None

    def _lay_out(self, works: list[Work], num_rows_each: int | None = None) -> None:
        """num_rows_each: as `begin_step`, of a recorded step; None: any other one."""
        is_recorded = num_rows_each is not None
        block = self.block_size_tokens
        lengths = [len(work.tokens) for work in works]
        counts, depths = lengths, ()
        starts = np.asarray([work.start for work in works], dtype=np.int64)
        slots = live_slots = [work.slot for work in works]
        if any(work.draft_draws for work in works):
            rows_of = [len(work.tokens) if work.draft_draws else 1 for work in works]
            depths = [depth for rows in rows_of for depth in range(rows)]
            starts = np.repeat(starts, rows_of) + depths
            slots = np.repeat(slots, rows_of).tolist()
            counts = [
                count
                for work, length in zip(works, lengths)
                for count in ([1] * length if work.draft_draws else [length])
            ]
        num_sequences, num_tokens = len(counts), sum(lengths)
        num_rows = -(-num_tokens // ROW_ALIGNMENT) * ROW_ALIGNMENT
        ends = np.cumsum(counts, dtype=np.int64)
        offsets = ends - counts
        work_ends = np.cumsum(lengths, dtype=np.int64)

        captures, self.first_captures = [], []
        for work, offset in zip(works, (work_ends - lengths).tolist()):
            self._update_tables(work.slot, work.tables)
            self.first_captures.append(len(captures))
            # The state at the end of the chunk is the live slot itself, after the forward.
            captures += [offset + position - work.start for position in work.captures]
        num_padding = num_rows - num_tokens
        if is_recorded:
            begins = (work_ends - lengths)[[work is not self._filler for work in works]]
            self.first_captures = (begins // num_rows_each * (num_rows_each - 1)).tolist()
            captures = _captured_rows(num_tokens, num_rows_each)
            # Each row is the last one of a work, or of none; and the first one likewise.
            own_slots = [work.slot for work in works]
            live_slots, first_slots = (np.full(num_tokens, self._filler.slot) for _ in range(2))
            live_slots[work_ends - 1] = first_slots[work_ends - lengths] = own_slots
            last_rows = np.arange(num_tokens)
            first_rows = np.full(num_tokens, num_rows)
            first_rows[work_ends - lengths] = work_ends - lengths
            self._layout = self._fixed_layout(num_sequences, num_rows_each, num_padding)
        else:
            first_slots, first_rows, last_rows = live_slots, work_ends - lengths, work_ends - 1
            self._layout = RaggedLayout(
                tuple(counts), tuple(starts.tolist()), tuple(captures), num_padding, depths=depths
            )
        self._counts = counts

        host, inputs = self._buffer.host, self._inputs

        def array(name: str, length: int) -> np.ndarray:
            """The used part of an input, to fill; `_inputs` has it on the device."""
            before = inputs.get(name)
            if before is None or before.shape[-1] != length:
                inputs[name] = self._buffer.device[name].narrow(-1, 0, length)
            return host[name][..., :length]

        host["input_ids"][num_tokens:num_rows] = host["positions"][num_tokens:num_rows] = 0
        token_ids = array("input_ids", num_rows)
        np.concatenate(
            [work.tokens for work in works], out=token_ids[:num_tokens], casting="unsafe"
        )
        positions = array("positions", num_rows)
        np.add(
            np.arange(num_tokens),
            np.repeat(starts - offsets, counts),
            out=positions[:num_tokens],
        )
        # Targets of each token's K and V: (page of its block, row in it). For tokens whose KV is
        # shared or copied, and for padding, the null page: no shared block is ever written.
        slot_of_token = np.repeat(np.asarray(slots, dtype=np.int64), counts)
        write_pages = array("write_pages", num_rows)
        write_pages[:, :num_tokens] = self._tables[
            :, slot_of_token, positions[:num_tokens] // block
        ]
        write_pages[:, num_tokens:] = NULL_PAGE
        shared = np.repeat(
            np.asarray([work.shared_tokens for work in works], dtype=np.int64), lengths
        )
        suppressed = np.flatnonzero(positions[:num_tokens] < shared)
        write_pages[: self._full_columns, suppressed] = NULL_PAGE
        np.remainder(positions, block, out=array("write_rows", num_rows))

        kv_lengths = array("kv_lengths", num_sequences)
        np.add(starts, counts, out=kv_lengths, casting="unsafe")
        array("starts", num_sequences)[:] = starts
        array("cu_queries", num_sequences + 1)[1:] = ends  # behind a zero, always
        np.cumsum(kv_lengths, out=array("cu_keys", num_sequences + 1)[1:])
        array("slots", num_sequences)[:] = slots
        array("live_slots", len(live_slots))[:] = live_slots
        array("last_rows", len(last_rows))[:] = last_rows
        array("first_slots", len(first_slots))[:] = first_slots
        array("first_rows", len(first_rows))[:] = first_rows
        np.subtract(captures, 1, out=array("capture_rows", len(captures)), casting="unsafe")
        rows = [
            np.arange(end - work.num_logits, end) for work, end in zip(works, work_ends.tolist())
        ]
        num_logits = sum(map(len, rows))
        np.concatenate(rows, out=array("logit_rows", num_logits))

        shape = len(self._tables), num_sequences, -(-int(kv_lengths.max()) // block)
        num_entries = math.prod(shape)
        np.take(
            self._tables[:, :, : shape[2]],
            slots,
            axis=1,
            out=host["tables"][:num_entries].reshape(shape),
            mode="clip",
        )
        self._buffer.upload("tables", num_entries)
        tables = self._step_tables[:, :num_sequences]
        used = tables[:, :, : shape[2]]
        used.copy_(self._buffer.device["tables"][:num_entries].view(shape))
        self._block_tables = tables if is_recorded else used
        if is_recorded and captures:
            self._staging = self._fixed_states(len(captures))
        else:
            self._staging = self.memory.staging(len(captures))

    @property
    def input_ids(self) -> Tensor:
        """Tokens of the step, int64 [1, T padded]."""
        return self._inputs["input_ids"][None]

    def _update_tables(self, slot: int, tables: list[np.ndarray]) -> None:
        """Update the block tables of a slot."""
        known = self._known_tables[slot]
        if len(known) == len(tables) and all(map(operator.is_, known, tables)):
            return
        self._known_tables[slot] = tables
        for (first, last), table in zip(self._columns, tables):
            self._tables[first:last, slot, : len(table)] = table.T

    def captured_states(self) -> Tensor:
        """Slot bytes of the states captured inside the last forward, uint8 [n, slot_bytes]: those
        of each `Work.captures`, from `first_captures` on."""
        return self._staging

    # For the model -----------------------------------------------------------------------------

    def is_static_batching(self) -> bool:
        return False

    def is_decode_only(self) -> bool:
        return all(count == 1 for count in self._counts)

    def ragged_layout(self) -> RaggedLayout:
        return self._layout

    def token_positions(self) -> Tensor:
        """Absolute position of each row, int64 [T padded]."""
        return self._inputs["positions"]

    @property
    def position_ids(self) -> Tensor:
        return self.token_positions()[None]

    def states(self, layer_number: int, name: str) -> SlotStates:
        """One state of one layer in all live slots, the step's slots, and room for captures."""
        captured = None
        if len(self._staging):
            captured = self.memory.state(layer_number, name, self._staging)
        return SlotStates(self.memory.state(layer_number, name), self._inputs["slots"], captured)

    def attend(
        self,
        layer_number: int,
        q_THD: Tensor,
        k_TKD: Tensor | None,
        v_TKP: Tensor | None,
        pattern: AttentionPattern,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention over the pages of one layer, [T padded, H, P]; see `MixerContext`."""
        if k_TKD is not None:
            self.append_key_value_cache(layer_number, k_TKD.unsqueeze(1), v_TKP.unsqueeze(1))
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
        """Attention over the latents: one key/value head whose values are a part of its keys,
        [T padded, H, P]; see `MixerContext`."""
        self.append_key_value_cache(layer_number, latents_TL[:, None, None], None)
        pages, _, block_table = self.key_value_cache(layer_number)
        values = pages[..., : heads.rank]
        q_THr = heads.absorb(q_THD)
        o_THr = paged_attention(q_THr, pages, values, block_table, self._layout, pattern)
        return heads.values(o_THr)

    def append_key_value_cache(self, layer_number: int, key: Tensor, value: Tensor | None) -> None:
        """Store K [T padded, 1, K, D] (after RoPE) and V [T padded, 1, K, P] of the step's tokens.

        Raises:
            ValueError: values for a layer without (`KVShape.value_dim` 0), or None for one with
                values.
        """
        key_pages, value_pages = self.memory.kv_pages(layer_number)
        if (value is None) != (value_pages.shape[-1] == 0):
            raise ValueError(
                f"layer {layer_number} keeps {value_pages.shape[-1]} value dimensions, and its "
                f"values are {'None' if value is None else list(value.shape)}: pass None where "
                "KVShape.value_dim is 0, and only there"
            )
        write_pages, write_rows = self._inputs["write_pages"], self._inputs["write_rows"]
        index = write_pages[self._column(layer_number)], write_rows
        key_pages[index] = key[:, 0].to(key_pages.dtype)
        if value is not None:
            value_pages[index] = value[:, 0].to(value_pages.dtype)

    def key_value_cache(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor]:
        """(K pages [n, B, K, D], V pages [n, B, K, P], block table int32 [R, M]) of any layer. P is
        0 if the layer keeps no values."""
        return (*self.memory.kv_pages(layer_number), self._block_tables[self._column(layer_number)])

    def _column(self, layer_number: int) -> int:
        local_group, column = self.memory.table_of_layer[layer_number]
        return column if local_group is None else self._columns[1 + local_group][0] + column

    def mamba_states_cache(
        self, layer_number: int, intermediate: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(convolution, recurrent) live-slot views of one layer, [slots, ...]."""
        if intermediate:
            raise ValueError("intermediate states are captured in-pass: see `captured_states()`")
        return tuple(
            self.memory.state(layer_number, name) for name in self.memory.state_names(layer_number)
        )

    def cu_query_lengths(self) -> tuple[Tensor, int]:
        """(cumulative query lengths int32 [R + 1], longest)."""
        return self._inputs["cu_queries"], max(self._counts)

    def cu_kv_lengths(self) -> tuple[Tensor, Tensor, int]:
        """(cumulative KV lengths int32 [R + 1], KV lengths int32 [R], longest)."""
        return self._inputs["cu_keys"], self._inputs["kv_lengths"], self._layout.last_end

    def apply_rotary_emb_query(
        self, query, query_emb, config, cu_seqlens_q, cp_group, mscale: float = 1.0
    ) -> Tensor:
        """RoPE at each row's position; query [T padded, 1, H, D], query_emb [S, 1, 1, D]."""
        freqs = query_emb[self.token_positions()]
        return apply_rotary_pos_emb(query, freqs, config, mscale=mscale, cp_group=cp_group)

    def apply_rotary_emb_key(self, key, key_emb, config, cp_group, mscale: float = 1.0) -> Tensor:
        return self.apply_rotary_emb_query(key, key_emb, config, None, cp_group, mscale)

    def last_token_logits(self, hidden_1TH: Tensor) -> Tensor:
        """Return the rows that need logits, [n, H], and save the last hidden states.

        Rows in the order of `plan.work` (`num_logits` each), then one for each of `plan.ready`,
        from its checkpoint.
        """
        hidden_TH, inputs = hidden_1TH[0], self._inputs
        live = self.memory.hidden()
        live[inputs["live_slots"]] = hidden_TH[inputs["last_rows"]].to(live.dtype)
        if len(self._staging):
            self.memory.hidden(self._staging).copy_(hidden_TH[inputs["capture_rows"]])
        return torch.cat([hidden_TH[inputs["logit_rows"]], self.ready_hidden().to(hidden_TH.dtype)])

    def previous_hidden(self, hidden_Th: Tensor) -> Tensor:
        """For each row, the hidden state of the token before, [T padded, H]: of the row before or,
        for the first one of a request, `live_hidden`. Call it before `last_token_logits`."""
        previous_Th = torch.cat((hidden_Th[:1], hidden_Th))  # the last one is of no row
        live_nH = self.live_hidden().to(hidden_Th.dtype)
        return previous_Th.index_copy_(0, self._inputs["first_rows"], live_nH)[:-1]

    def live_hidden(self) -> Tensor:
        """The hidden states in the requests' live slots, [n, H]: of the token before the first one
        of the step; zeros where there is none."""
        return self.memory.hidden()[self._inputs["first_slots"]]

    def ready_hidden(self) -> Tensor:
        """Last hidden states of the plan's ready requests, [n, H]."""
        return self.memory.hidden()[self._ready_slots]

    # Inspection ---------------------------------------------------------------------------------

    @property
    def active_token_count(self) -> int:
        return self._layout.num_tokens

    @property
    def request_query_lengths(self) -> list[int]:
        return list(self._counts)

    @property
    def request_kv_length_offsets(self) -> list[int]:
        """Absolute position of each request's first token: its KV length before this step."""
        return list(self._layout.start_positions)
