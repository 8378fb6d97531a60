"""The recurrences as they are written, token by token in float64, and batches to try ops on.

Each `RecurrentOp` gives the tests one face for the ops that carry a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from megatron_hybrid.ops import RaggedLayout
from megatron_hybrid.ops.conv.reference import causal_conv1d
from megatron_hybrid.ops.delta_rule.reference import gated_delta_rule, kimi_delta_attention
from megatron_hybrid.ops.selective_scan.reference import selective_scan
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


def naive_ssd(inputs, parameters, state):
    (x, dt, B, C), (A, D) = inputs, parameters
    repeats = x.shape[1] // B.shape[1]
    ys, states = [], []
    for t in range(len(x)):
        B_t, C_t = (m[t].repeat_interleave(repeats, 0) for m in (B, C))
        decay = (dt[t] * A).exp()
        state = decay[:, None, None] * state + torch.einsum("h,hp,hn->hpn", dt[t], x[t], B_t)
        ys.append(torch.einsum("hpn,hn->hp", state, C_t) + D[:, None] * x[t])
        states.append(state)
    return torch.stack(ys), torch.stack(states)


def naive_selective_scan(inputs, parameters, state):
    (x, dt, B, C), (A, D) = inputs, parameters
    ys, states = [], []
    for t in range(len(x)):
        state = (dt[t][:, None] * A).exp() * state + torch.outer(dt[t] * x[t], B[t])
        ys.append(state @ C[t] + D * x[t])
        states.append(state)
    return torch.stack(ys), torch.stack(states)


def naive_delta_rule(inputs, parameters, state):
    """The decays g are `[T, H]`, or `[T, H, N]` for Kimi Delta Attention."""
    q, k, v, g, beta = inputs
    repeats = v.shape[1] // k.shape[1]
    q, k = (m / (m.square().sum(-1, keepdim=True) + 1e-6).sqrt() for m in (q, k))
    q, k = (m.repeat_interleave(repeats, 1) for m in (q, k))
    os, states = [], []
    for t in range(len(v)):
        state = g[t].exp().view(len(g[t]), -1, 1) * state
        delta = beta[t][:, None] * (v[t] - torch.einsum("hn,hnp->hp", k[t], state))
        state = state + torch.einsum("hn,hp->hnp", k[t], delta)
        os.append(torch.einsum("hn,hnp->hp", q[t], state) * q.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(os), torch.stack(states)


def naive_conv(inputs, parameters, state, activation=F.silu):
    (x,), (weight, bias) = inputs, parameters
    ys, states = [], []
    for x_t in x:
        row = torch.cat([state, x_t[:, None]], dim=1)
        ys.append(activation((row * weight).sum(1) + bias))
        state = row[:, 1:]
        states.append(state)
    return torch.stack(ys), torch.stack(states)


SSD = RecurrentOp(
    "ssd_scan",
    (H, P, N),
    lambda T, g: (randn(g, T, H, P), rand(g, T, H), randn(g, T, G, N), randn(g, T, G, N)),
    lambda g: (-4 * rand(g, H), randn(g, H)),
    lambda i, p, states, layout, chunk: ssd_scan(
        i[0], i[1], p[0], i[2], i[3], p[1], states, layout, chunk
    ),
    naive_ssd,
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
    naive_selective_scan,
    log_decay=1,
)


def gated_delta_rule_of(heads: int, key_heads: int) -> RecurrentOp:
    """With so many heads of v, and of q and k."""
    return RecurrentOp(
        "gated_delta_rule",
        (heads, N, P),
        lambda T, g: (
            *(randn(g, T, key_heads, N), randn(g, T, key_heads, N), randn(g, T, heads, P)),
            *(-3 * rand(g, T, heads), rand(g, T, heads)),
        ),
        lambda g: (),
        lambda i, p, states, layout, chunk: gated_delta_rule(*i, states, layout, chunk),
        naive_delta_rule,
        log_decay=3,
    )


def kimi_delta_attention_of(heads: int) -> RecurrentOp:
    """With so many heads."""
    return RecurrentOp(
        "kimi_delta_attention",
        (heads, N, P),
        lambda T, g: (
            *(randn(g, T, heads, N), randn(g, T, heads, N), randn(g, T, heads, P)),
            *(-3 * rand(g, T, heads, N), rand(g, T, heads)),
        ),
        lambda g: (),
        lambda i, p, states, layout, chunk: kimi_delta_attention(*i, states, layout, chunk),
        naive_delta_rule,
        log_decay=3,
    )


GATED_DELTA_RULE = gated_delta_rule_of(H, H_QK)
KIMI_DELTA_ATTENTION = kimi_delta_attention_of(H)
CONV = RecurrentOp(
    "causal_conv1d",
    (CHANNELS, WIDTH - 1),
    lambda T, g: (randn(g, T, CHANNELS),),
    lambda g: (randn(g, CHANNELS, WIDTH), randn(g, CHANNELS)),
    lambda i, p, states, layout, chunk: causal_conv1d(i[0], *p, states, layout),
    naive_conv,
)
LINEAR_CONV = RecurrentOp(
    "causal_conv1d",
    CONV.state_shape,
    CONV.inputs,
    CONV.parameters,
    lambda i, p, states, layout, chunk: causal_conv1d(i[0], *p, states, layout, None),
    lambda i, p, state: naive_conv(i, p, state, activation=lambda x: x),
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


@st.composite
def layouts(draw, max_sequences: int = 6, max_length: int = 90) -> RaggedLayout:
    """Single steps and prefills in any order, at any positions, with captures and padding."""
    length = st.one_of(st.just(1), st.integers(1, 9), st.integers(1, max_length))
    lengths = draw(st.lists(length, min_size=1, max_size=max_sequences))
    if draw(st.booleans()):
        lengths.sort(key=lambda n: n > 1)
    starts = draw(st.lists(st.integers(0, 200), min_size=len(lengths), max_size=len(lengths)))
    captures = draw(st.sets(st.integers(1, sum(lengths)), max_size=5))
    return RaggedLayout(
        tuple(lengths), tuple(starts), tuple(sorted(captures)), draw(st.integers(0, 3))
    )


chunk_sizes = st.sampled_from((1, 3, 8, 16, 64))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal within `tolerance`, relative to 1 or to the size of the expected values."""
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, check_device=False
    )
