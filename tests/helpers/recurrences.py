"""The ops that carry a state, each with its naive loop, and batches to try them on.

Each `RecurrentOp` gives the tests one face for the ops that carry a state.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from megatron_hybrid import ops
from megatron_hybrid.ops import RaggedLayout, SlotStates
from megatron_hybrid.ops.conv.naive import causal_conv1d as naive_conv
from megatron_hybrid.ops.conv.reference import causal_conv1d
from megatron_hybrid.ops.delta_rule.naive import delta_rule as naive_delta_rule
from megatron_hybrid.ops.delta_rule.reference import delta_rule
from megatron_hybrid.ops.selective_scan.naive import selective_scan as naive_selective_scan
from megatron_hybrid.ops.selective_scan.reference import selective_scan
from megatron_hybrid.ops.ssd.naive import ssd_scan as naive_ssd_scan
from megatron_hybrid.ops.ssd.reference import ssd_scan

H, H_QK, P, G, N = 4, 2, 6, 2, 5
CHANNELS, WIDTH = 7, 4


@dataclass(frozen=True)
class RecurrentOp:
    """One op with its inputs, its recurrence and the shape of its state."""

    name: str
    state_shape: tuple[int, ...]
    inputs: Callable[[int, torch.Generator], tuple[torch.Tensor, ...]]
    """(tokens, generator) -> flat inputs, float64."""
    parameters: Callable[[torch.Generator], tuple[torch.Tensor, ...]]
    """Inputs that have no token dimension."""
    call: Callable
    """(inputs, parameters, states, layout, chunk_size) -> (y, final, captured)."""
    naive: Callable
    """(inputs of one sequence, parameters, state) -> (y of each token, state after each)."""
    log_decay: int | None = None
    """Which input is the log decay, or the step size that makes it."""

    def states(self, num_sequences: int, generator: torch.Generator) -> torch.Tensor:
        return randn(generator, num_sequences, *self.state_shape)


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rand(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


SSD = RecurrentOp(
    "ssd_scan",
    (H, P, N),
    lambda T, g: (randn(g, T, H, P), rand(g, T, H), randn(g, T, G, N), randn(g, T, G, N)),
    lambda g: (-4 * rand(g, H), randn(g, H)),
    lambda i, p, states, layout, chunk: ssd_scan(
        i[0], i[1], p[0], i[2], i[3], p[1], states, layout, chunk
    ),
    lambda i, p, state: naive_ssd_scan(i[0], i[1], p[0], i[2], i[3], p[1], state),
    log_decay=1,
)
SELECTIVE_SCAN = RecurrentOp(
    "selective_scan",
    (CHANNELS, N),
    lambda T, g: (
        *(randn(g, T, CHANNELS), rand(g, T, CHANNELS)),
        *(randn(g, T, N), randn(g, T, N)),
    ),
    lambda g: (-4 * rand(g, CHANNELS, N), randn(g, CHANNELS)),
    lambda i, p, states, layout, chunk: selective_scan(
        i[0], i[1], p[0], i[2], i[3], p[1], states, layout, chunk
    ),
    lambda i, p, state: naive_selective_scan(i[0], i[1], p[0], i[2], i[3], p[1], state),
    log_decay=1,
)


def delta_rule_of(name: str, heads: int, key_heads: int, by_channel: bool) -> RecurrentOp:
    """With so many heads of v, and of q and k; a decay for each head, or its channels."""
    return RecurrentOp(
        name,
        (heads, N, P),
        lambda T, g: (
            *(randn(g, T, key_heads, N), randn(g, T, key_heads, N), randn(g, T, heads, P)),
            *(-3 * rand(g, T, heads, *[N] * by_channel), rand(g, T, heads)),
        ),
        lambda g: (),
        lambda i, p, states, layout, chunk: delta_rule(*i, states, layout, chunk),
        lambda i, p, state: naive_delta_rule(*i, state),
        log_decay=3,
    )


def gated_delta_rule_of(heads: int, key_heads: int) -> RecurrentOp:
    return delta_rule_of("gated_delta_rule", heads, key_heads, False)


def kimi_delta_attention_of(heads: int) -> RecurrentOp:
    return delta_rule_of("kimi_delta_attention", heads, heads, True)


GATED_DELTA_RULE = gated_delta_rule_of(H, H_QK)
KIMI_DELTA_ATTENTION = kimi_delta_attention_of(H)
CONV = RecurrentOp(
    "causal_conv1d",
    (CHANNELS, WIDTH - 1),
    lambda T, g: (randn(g, T, CHANNELS),),
    lambda g: (randn(g, CHANNELS, WIDTH), randn(g, CHANNELS)),
    lambda i, p, states, layout, chunk: causal_conv1d(i[0], *p, states, layout),
    lambda i, p, state: naive_conv(*i, *p, state),
)
LINEAR_CONV = RecurrentOp(
    "causal_conv1d",
    CONV.state_shape,
    CONV.inputs,
    CONV.parameters,
    lambda i, p, states, layout, chunk: causal_conv1d(i[0], *p, states, layout, None),
    lambda i, p, state: naive_conv(*i, *p, state, activation=lambda x: x),
)
SSMS = (SSD, SELECTIVE_SCAN)
DELTA_RULES = (GATED_DELTA_RULE, KIMI_DELTA_ATTENTION)
SCANS = (*SSMS, *DELTA_RULES)
CONVS = (CONV, LINEAR_CONV)
OPS = (*SCANS, *CONVS)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def to(dtype: torch.dtype, tensors) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(dtype) for t in tensors)


def on_slots(
    op: RecurrentOp, inputs, parameters, states: SlotStates, layout: RaggedLayout, chunk_size=16
) -> torch.Tensor:
    """The public op, on states in live slots."""
    given = [*inputs, *parameters]
    if op in SSMS:
        given = [*inputs[:2], parameters[0], *inputs[2:], parameters[1]]
    last = (("silu" if op is CONV else None) if op in CONVS else chunk_size,)
    return getattr(ops, op.name)(*given, states, layout, *last)


def assert_bits_of_calls_of_their_own(
    op: RecurrentOp, layout: RaggedLayout, dtype: torch.dtype, chunk_size: int = 16
) -> None:
    """A call has the bits of calls of one token each for its decodes, and for all sequences in
    chunks of one; of one sequence each for the others.

    dtype: of states.
    """
    generator, tokens, R = seeded(0), layout.num_tokens, layout.num_sequences
    inputs = to(torch.float32, op.inputs(layout.num_rows, generator))
    parameters = to(torch.float32, op.parameters(generator))
    pool = torch.randn(R + 3, *op.state_shape, generator=generator).to(dtype)
    slots, own_pool, own_y, own = torch.randperm(R + 3)[:R], pool.clone(), [], {}
    captured = pool.new_empty(len(layout.captures), *op.state_shape)
    states = SlotStates(pool, slots, captured)
    y = on_slots(op, inputs, parameters, states, layout, chunk_size)
    for r, (start, length) in enumerate(zip(layout.start_positions, layout.lengths)):
        first = layout.cu_seqlens[r]
        takes_steps = r < layout.num_steps or (chunk_size == 1 and op is not SELECTIVE_SCAN)
        step = 1 if takes_steps else length
        for row in range(first, first + length, step):
            counts = tuple(count - row for count in layout.captures if 0 < count - row <= step)
            alone = RaggedLayout((step,), (start + row - first,), counts)
            part = pool.new_empty(len(counts), *op.state_shape)
            rows = [each[row : row + step] for each in inputs]
            states = SlotStates(own_pool, slots[r : r + 1], part)
            own_y.append(on_slots(op, rows, parameters, states, alone, chunk_size))
            own |= {row + count: state for count, state in zip(counts, part)}
    assert torch.equal(y[:tokens], torch.cat(own_y)) and not y[tokens:].any()
    assert torch.equal(pool, own_pool)
    assert torch.equal(captured, torch.stack([own[count] for count in layout.captures]))


@st.composite
def layouts(
    draw, max_sequences: int = 6, max_length: int = 90, has_drafts: bool = False
) -> RaggedLayout:
    """Single steps and prefills in any order, at any positions, with captures and padding; and
    decodes with drafts."""
    length = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, max_length))
    lengths = draw(st.lists(length, min_size=1, max_size=max_sequences))
    if draw(st.booleans()):
        lengths.sort(key=lambda n: n > 1)
    starts = draw(st.lists(st.integers(0, 200), min_size=len(lengths), max_size=len(lengths)))
    captures = draw(st.sets(st.integers(1, sum(lengths)), max_size=5))
    decodes = draw(st.integers(0, len(lengths))) if has_drafts else 0
    padding = draw(st.integers(0, 3))
    return RaggedLayout(lengths, starts, sorted(captures), padding, num_decodes=decodes)


chunk_sizes = st.sampled_from((1, 3, 8, 16, 64))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal within `tolerance`, relative to 1 or to the size of the expected values."""
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, check_device=False
    )
