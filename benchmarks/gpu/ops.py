"""Times each op by the backend that serves it, against its roofline and other ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench, Row
from megatron_hybrid.ops import AttentionPattern, RaggedLayout, SlotStates, dispatch, unpack
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT
from megatron_hybrid.ops.slot_states import SlotOp
from megatron_hybrid.tools.roofline import Attention, Work

BLOCK = 16
"""Tokens of a KV block."""
CAPTURED = 4
"""States inside of a prefill."""
Sizes = dict[str, int]
Makers = dict[str, Callable[[], Callable[[], object]]]


@dataclass(frozen=True)
class Family:
    """An op in the sizes of one model."""

    op: str
    model: str
    sizes: Sizes
    toy: Sizes
    inputs: Callable[[Sizes, RaggedLayout, torch.device, torch.dtype], tuple]
    """Arguments of the op for any layout: model sizes, layout, device, dtype."""
    work: Callable[[Sizes, RaggedLayout], Work]
    """At least, in bf16 with fp32 states."""
    others: Callable[[Sizes, RaggedLayout, tuple], Makers] = lambda sizes, layout, inputs: {}
    """Other ways: for one sequence from position 0, or for a token each of several sequences."""

    @property
    def is_recurrent(self) -> bool:
        return isinstance(dispatch.OPS[self.op], SlotOp)

    @property
    def name(self) -> str:
        return f"{self.op} of {self.model}"


def run(bench: Bench, op: str | None = None) -> Iterator[Row]:
    """All ops, or one: decodes, a prefill, and what captures cost."""
    for family in FAMILIES:
        if op in (None, family.op):
            for what, layout in _layouts(bench, family).items():
                name = f"{family.name}, {what}"
                yield from bench.guarded(name, _measured(bench, family, name, layout))
                bench.free()


def _layouts(bench: Bench, family: Family) -> dict[str, RaggedLayout]:
    tokens, batch, context = bench.size((8192, 64, 8192), (48, 4, 40))
    if bench.once:  # several of these share a GPU
        context //= 4
    layouts = {
        f"decode {batch} at {context:,}": decode_layout(batch, context),
        f"decode 1 at {context:,}": decode_layout(1, context),
        f"prefill {tokens:,}": prefill_layout(tokens),
    }
    if family.is_recurrent:
        step = tokens // (CAPTURED + 1)
        captures = tuple(step * i + 1 for i in range(1, CAPTURED + 1))  # in no grid
        layouts[f"prefill {tokens:,}, {CAPTURED} captures"] = RaggedLayout(
            (tokens,), (0,), captures
        )
    return layouts


def prefill_layout(tokens: int) -> RaggedLayout:
    """One prompt."""
    return RaggedLayout((tokens,), (0,))


def decode_layout(batch: int, context: int) -> RaggedLayout:
    """A token each, of requests that are as long with it as the context."""
    return RaggedLayout((1,) * batch, (context - 1,) * batch)


def _measured(bench: Bench, family: Family, what: str, layout: RaggedLayout) -> Iterator[Row]:
    op, sizes = dispatch.OPS[family.op], bench.size(family.sizes, family.toy)
    work = family.work(sizes, layout)
    with torch.inference_mode():
        sets = [
            family.inputs(sizes, layout, bench.device, torch.bfloat16)
            for _ in range(bench.sets(work))
        ]
        timing = bench.timing(*(partial(op, *inputs) for inputs in sets))
        others = {} if layout.captures else family.others(sizes, layout, sets[0])
        row = Row(
            what,
            timing.seconds,
            bench.bound(work),
            bench.others(others),
            timing.numbers(),
            note=next(name for name, reason in op.refusals(*sets[0]).items() if reason is None),
        )
    yield row


# Inputs --------------------------------------------------------------------------------------


def _randn(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def _states(layout: RaggedLayout, shape: tuple[int, ...], device, dtype=torch.float32):
    """States in slots of a pool, the last one first; zeros before position 0."""
    count = layout.num_sequences
    pool = torch.randn(count, *shape, device=device).to(dtype)
    for slot, start in enumerate(reversed(layout.start_positions)):
        if start == 0:
            pool[slot] = 0
    captured = None
    if layout.captures:
        captured = torch.empty(len(layout.captures), *shape, device=device, dtype=dtype)
    return SlotStates(pool, torch.arange(count - 1, -1, -1, device=device), captured)


def ssd_inputs(sizes: Sizes, layout: RaggedLayout, device, dtype) -> tuple:
    T, H, P, G, N = layout.num_rows, *(sizes[name] for name in "HPGN")
    return (
        _randn(device, dtype, T, H, P),
        F.softplus(torch.randn(T, H, device=device) - 3),
        -torch.rand(H, device=device) - 0.5,
        _randn(device, dtype, T, G, N),
        _randn(device, dtype, T, G, N),
        torch.randn(H, device=device),
        _states(layout, (H, P, N), device),
        layout,
        sizes["chunk"],
    )


def selective_scan_inputs(sizes: Sizes, layout: RaggedLayout, device, dtype) -> tuple:
    T, C, N = layout.num_rows, sizes["C"], sizes["N"]
    return (
        _randn(device, dtype, T, C),
        F.softplus(torch.randn(T, C, device=device) - 3),
        -torch.rand(C, N, device=device) - 0.5,
        _randn(device, dtype, T, N),
        _randn(device, dtype, T, N),
        torch.randn(C, device=device),
        _states(layout, (C, N), device),
        layout,
        32,
    )


def delta_inputs(sizes: Sizes, layout: RaggedLayout, device, dtype) -> tuple:
    """Make inputs of the gated delta rule, and with `per_channel` of Kimi Delta Attention."""
    T, H, H_qk, N, P = layout.num_rows, *(sizes[name] for name in ("H", "H_qk", "N", "P"))
    decays = (T, H, N) if sizes.get("per_channel") else (T, H)
    return (
        _randn(device, dtype, T, H_qk, N),
        _randn(device, dtype, T, H_qk, N),
        _randn(device, dtype, T, H, P),
        -torch.rand(*decays, device=device),
        torch.rand(T, H, device=device).to(dtype),
        _states(layout, (H, N, P), device),
        layout,
        sizes["chunk"],
    )


def conv_inputs(sizes: Sizes, layout: RaggedLayout, device, dtype) -> tuple:
    T, C, K = layout.num_rows, sizes["C"], sizes["K"]
    return (
        _randn(device, dtype, T, C),
        _randn(device, dtype, C, K),
        _randn(device, dtype, C),
        _states(layout, (C, K - 1), device, dtype),
        layout,
        "silu",
    )


def attention_inputs(sizes: Sizes, layout: RaggedLayout, device, dtype) -> tuple:
    """Pages in any order."""
    H, K, D = sizes["H"], sizes["K"], sizes["D"]
    blocks = [-(-end // BLOCK) for end in layout.end_positions]
    order = torch.randperm(sum(blocks)).int()
    table = torch.zeros(layout.num_sequences, max(blocks), dtype=torch.int32)
    for row, pages in zip(table, order.split(blocks)):
        row[: len(pages)] = pages
    k_pages, v_pages = (_randn(device, dtype, len(order), BLOCK, K, D) for _ in range(2))
    q = _randn(device, dtype, layout.num_rows, H, D)
    pattern = AttentionPattern(D**-0.5, window=sizes.get("window"))
    return q, k_pages, v_pages, table.to(device), layout, pattern, None


def norm_inputs(sizes: Sizes, layout: RaggedLayout, device, dtype) -> tuple:
    T, G, C = layout.num_rows, sizes["G"], sizes["C"]
    x, gate = (_randn(device, dtype, T, G, C) for _ in range(2))
    return x, gate, _randn(device, dtype, G, C), 1e-5, "silu", False, False, False, None


def expert_rows(sizes: Sizes, layout: RaggedLayout) -> list[int]:
    """Count the rows of each expert, if the pairs of all tokens go to one expert after another."""
    pairs, E = layout.num_tokens * sizes["k"], sizes["E"]
    return [-(-(pairs // E + (e < pairs % E)) // ROW_ALIGNMENT) * ROW_ALIGNMENT for e in range(E)]


def expert_inputs(sizes: Sizes, layout: RaggedLayout, device, dtype) -> tuple:
    """Gated experts. All rows are some expert's."""
    rows, (E, h, f) = expert_rows(sizes, layout), (sizes[name] for name in "Ehf")
    return (
        _randn(device, dtype, sum(rows), h),
        torch.tensor(rows, device=device).cumsum(0, dtype=torch.int32),
        _randn(device, dtype, E, 2 * f, h) * h**-0.5,
        None,
        _randn(device, dtype, E, h, f) * f**-0.5,
        None,
        _gated_silu,
    )


def packed_inputs(sizes: Sizes, layout: RaggedLayout, device, dtype) -> tuple:
    """Codes of 8 bits are e4m3; those of 4 bits integers."""
    O, I, bits, group = (sizes[name] for name in ("O", "I", "bits", "group"))
    codes = torch.randint(0, 120, (O, I * bits // 8), dtype=torch.uint8, device=device)
    scale = torch.rand(O, I // group, device=device) * I**-0.5
    x = _randn(device, dtype, layout.num_rows, I)
    return x, codes.view(torch.float8_e4m3fn) if bits == 8 else codes, scale, *[None] * 4


def _gated_silu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


# Work ----------------------------------------------------------------------------------------


def _state_work(layout: RaggedLayout, elements: int, itemsize: int = 4) -> Work:
    """States are read once, written once, and once more for each capture."""
    return Work((2 * layout.num_sequences + len(layout.captures)) * elements * itemsize)


def ssd_work(sizes: Sizes, layout: RaggedLayout) -> Work:
    T, H, P, G, N = layout.num_tokens, *(sizes[name] for name in "HPGN")
    # A token adds an outer product to the state, and multiplies the state by a vector.
    rows = Work(T * ((2 * H * P + 2 * G * N) * 2 + H * 4), 4 * T * H * P * N)
    return rows + _state_work(layout, H * P * N)


def selective_scan_work(sizes: Sizes, layout: RaggedLayout) -> Work:
    T, C, N = layout.num_tokens, sizes["C"], sizes["N"]
    # No matrix product: bytes alone bound it.
    return Work(T * ((2 * C + 2 * N) * 2 + C * 4)) + _state_work(layout, C * N)


def delta_work(sizes: Sizes, layout: RaggedLayout) -> Work:
    T, H, H_qk, N, P = layout.num_tokens, *(sizes[name] for name in ("H", "H_qk", "N", "P"))
    decays = H * (N if sizes.get("per_channel") else 1)
    # The state by k, an outer product, the state by q.
    rows = Work(T * (2 * (2 * H_qk * N + 2 * H * P + H) + 4 * decays), 6 * T * H * N * P)
    return rows + _state_work(layout, H * N * P)


def conv_work(sizes: Sizes, layout: RaggedLayout) -> Work:
    T, C, K = layout.num_tokens, sizes["C"], sizes["K"]
    return Work(T * 2 * C * 2) + _state_work(layout, C * (K - 1), 2)


def attention_work(sizes: Sizes, layout: RaggedLayout) -> Work:
    H, K, D = sizes["H"], sizes["K"], sizes["D"]
    attention = Attention(sizes.get("window"), None, 2 * K * D * 2, 2.0 * H * 2 * D)
    moved, flops = layout.num_tokens * 2 * H * D * 2, 0.0
    for start, end in zip(layout.start_positions, layout.end_positions):
        moved += attention.bytes_per_token * (attention.seen(start) + end - start)
        flops += attention.flops_per_pair * attention.pairs(start, end)
    return Work(moved, flops)


def norm_work(sizes: Sizes, layout: RaggedLayout) -> Work:
    return Work(3 * layout.num_rows * sizes["G"] * sizes["C"] * 2)


def expert_work(sizes: Sizes, layout: RaggedLayout) -> Work:
    rows, (h, f) = expert_rows(sizes, layout), (sizes[name] for name in "hf")
    matrices = sum(count > 0 for count in rows) * 3 * f * h
    return Work(2 * (matrices + 2 * sum(rows) * h), 6 * sum(rows) * f * h)


def packed_work(sizes: Sizes, layout: RaggedLayout) -> Work:
    T, O, I = layout.num_rows, sizes["O"], sizes["I"]
    return Work(2 * T * (O + I) + O * I * (sizes["bits"] / 8 + 4 / sizes["group"]), 2 * T * O * I)


# Other ways: each call returns the outputs in our op's shape -----------------------------------


def _fla(chunked: str, single: str, module: str):
    """fla's chunked kernel for a prefill, its recurrent one for decodes: these copy the states."""

    def others(sizes: Sizes, layout: RaggedLayout, inputs: tuple) -> Makers:
        *tokens, states = inputs[:6]
        is_prefill = max(layout.lengths) > 1

        def fla():
            call = getattr(importlib.import_module(module), chunked if is_prefill else single)
            rows = [t[None] if is_prefill else t[:, None] for t in tokens]
            named = dict(zip(("q", "k", "v", "g", "beta"), rows))
            named["initial_state"] = states.pool_S[states.slot_ids_R]
            named |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
            return lambda: call(**named)[0].flatten(0, 1)

        return {"fla": fla}

    return others


def _dense(layout: RaggedLayout, inputs: tuple) -> tuple[Tensor, Tensor]:
    """Keys and values of sequences of one length without pages, `[R, S, K, D]`."""
    _, k_pages, v_pages, table, *_ = inputs
    rows = (pages[table.long()].flatten(1, 2) for pages in (k_pages, v_pages))
    return tuple(each[:, : layout.last_end].contiguous() for each in rows)


def attention_others(sizes: Sizes, layout: RaggedLayout, inputs: tuple) -> Makers:
    """torch's attention, which has no window without a mask of all pairs."""
    q, pattern = inputs[0], inputs[5]
    is_decode = max(layout.lengths) == 1

    def torch_sdpa():
        queries = q[:, :, None] if is_decode else q[None].transpose(1, 2)
        k, v = (each.transpose(1, 2) for each in _dense(layout, inputs))
        named = {"is_causal": not is_decode, "scale": pattern.scale, "enable_gqa": True}
        attend = partial(F.scaled_dot_product_attention, queries, k, v, **named)
        return lambda: attend()[:, :, 0] if is_decode else attend()[0].transpose(0, 1)

    return {} if "window" in sizes else {"torch SDPA": torch_sdpa}


def packed_others(sizes: Sizes, layout: RaggedLayout, inputs: tuple) -> Makers:
    """The product with the weight in bf16."""
    return {
        "bf16": lambda: partial(F.linear, inputs[0], unpack(*inputs[1:3], dtype=torch.bfloat16))
    }


_TOY_ATTENTION = {"H": 4, "K": 2, "D": 16}
_ATTENTION = attention_inputs, attention_work, attention_others
_DELTA_SIZES = {"H": 32, "N": 128, "P": 128, "chunk": 64}
_TOY_DELTA = {"H": 4, "N": 16, "P": 16, "chunk": 32}
_GDN = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "fla.ops.gated_delta_rule"
_KDA = "chunk_kda", "fused_recurrent_kda", "fla.ops.kda"
FAMILIES = [
    Family(
        "paged_attention",
        "Nemotron-H-8B",
        {"H": 32, "K": 8, "D": 128},
        _TOY_ATTENTION,
        *_ATTENTION,
    ),
    Family(
        "paged_attention",
        "Qwen3.5-4B",
        {"H": 16, "K": 4, "D": 256},
        _TOY_ATTENTION,
        *_ATTENTION,
    ),
    Family(
        "paged_attention",
        "Gemma-3-4B, a window",
        {"H": 8, "K": 4, "D": 256, "window": 1024},
        _TOY_ATTENTION | {"window": 12},
        *_ATTENTION,
    ),
    Family(
        "ssd_scan",
        "Nemotron-H-8B",
        {"H": 128, "P": 64, "G": 8, "N": 128, "chunk": 128},
        {"H": 4, "P": 16, "G": 2, "N": 16, "chunk": 16},
        ssd_inputs,
        ssd_work,
    ),
    Family(
        "gated_delta_rule",
        "Qwen3.5-4B",
        _DELTA_SIZES | {"H_qk": 16},
        _TOY_DELTA | {"H_qk": 2},
        delta_inputs,
        delta_work,
        _fla(*_GDN),
    ),
    Family(
        "kimi_delta_attention",
        "Kimi-Linear-48B",
        _DELTA_SIZES | {"H_qk": 32, "per_channel": 1},
        _TOY_DELTA | {"H_qk": 4, "chunk": 32, "per_channel": 1},
        delta_inputs,
        delta_work,
        _fla(*_KDA),
    ),
    Family(
        "selective_scan",
        "Jamba-1.5-Mini",
        {"C": 8192, "N": 16},
        {"C": 32, "N": 4},
        selective_scan_inputs,
        selective_scan_work,
    ),
    Family(
        "gated_rms_norm",
        "Nemotron-H-8B",
        {"G": 8, "C": 1024},
        {"G": 2, "C": 16},
        norm_inputs,
        norm_work,
    ),
    Family(
        "expert_mlps",
        "Qwen3-Next",
        {"E": 512, "k": 10, "h": 2048, "f": 512},
        {"E": 8, "k": 2, "h": 64, "f": 32},
        expert_inputs,
        expert_work,
    ),
    *(
        Family(
            "packed_linear",
            f"Nemotron-H-8B, {name}",
            {"O": 21504, "I": 4096, "bits": bits, "group": 128},
            {"O": 56, "I": 64, "bits": bits, "group": 32},
            packed_inputs,
            packed_work,
            packed_others,
        )
        for name, bits in (("FP8", 8), ("INT4", 4))
    ),
    Family(
        "causal_conv1d",
        "Nemotron-H-8B",
        {"C": 10240, "K": 4},
        {"C": 32, "K": 4},
        conv_inputs,
        conv_work,
    ),
]
