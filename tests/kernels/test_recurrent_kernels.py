"""Kernels of the recurrent ops against their references: outputs, final states, captures."""

from dataclasses import dataclass, replace
from itertools import chain

import pytest
import recurrences
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import matrix_rows
from recurrences import (
    CONV,
    CONVS,
    LINEAR_CONV,
    SELECTIVE_SCAN,
    SSD,
    RecurrentOp,
    assert_bits_of_calls_of_their_own,
    gated_delta_rule_of,
    kimi_delta_attention_of,
    layouts,
    on_slots,
    seeded,
    to,
)

from megatron_hybrid.ops import RaggedLayout, SlotStates, dispatch


@dataclass(frozen=True)
class Kernels:
    """A backend of a recurrent op, and the op by its public function."""

    backend: str
    op: RecurrentOp
    bound: float = 3e-5
    """Largest error, in units of the largest value."""
    chunk_sizes: tuple[int, ...] = (16, 32)
    max_length: int = 40
    """Of a sequence; the interpreter is slow."""

    def draw(self, data):
        """A layout and a chunk size."""
        layout = data.draw(layouts(max_sequences=4, max_length=self.max_length, has_drafts=True))
        return layout, data.draw(st.sampled_from(self.chunk_sizes))


KERNELS = [
    Kernels("mcore", SSD),
    Kernels("triton", SELECTIVE_SCAN),
    Kernels("fla", gated_delta_rule_of(2, 1), chunk_sizes=(16, 64)),
    Kernels("fla", kimi_delta_attention_of(2), chunk_sizes=(32, 64), max_length=16),
    Kernels("triton", CONV),
    Kernels("triton", LINEAR_CONV),
]
PUBLISHED = {
    "ssd_scan": [dict(H=2, G=1, P=P, N=N) for P, N in ((64, 64), (64, 128), (64, 256), (128, 256))],
    "selective_scan": [dict(CHANNELS=70, N=16), dict(CHANNELS=1030, N=1)],
    "gated_delta_rule": [dict(N=128, P=128), dict(N=96, P=192)],
    "kimi_delta_attention": [dict(N=128, P=128)],
    "causal_conv1d": [dict(CHANNELS=70), dict(CHANNELS=70, WIDTH=3)],
}
"""Sizes of published models; of channels, that of a program and more."""
TRAINED = [[(one, sizes) for sizes in PUBLISHED[one.op.name]] for one in KERNELS]
each = pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: f"{k.op.name} {k.backend}")


def case(kernels, layout, seed):
    """Inputs, parameters, and states in some slots of a pool with gaps between its states."""
    generator = seeded(seed)
    inputs = to(torch.float32, kernels.op.inputs(layout.num_rows, generator))
    parameters = to(torch.float32, kernels.op.parameters(generator))
    slots = layout.num_sequences + 3
    pool = torch.randn(slots, 2, *kernels.op.state_shape, generator=generator)[:, 1]
    slot_ids = torch.randperm(slots, generator=generator)[: layout.num_sequences]
    return inputs, parameters, pool, slot_ids


def run(kernels, backend, inputs, parameters, pool, slot_ids, layout, chunk_size):
    """Outputs, the pool after the call, and the captures."""
    pool = torch.stack([pool, pool], 1)[:, 1]
    captured = torch.full((len(layout.captures), *pool.shape[1:]), torch.nan)
    states = SlotStates(pool, slot_ids, captured if len(captured) else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "forced", backend)
        y = on_slots(kernels.op, inputs, parameters, states, layout, chunk_size)
    return y, pool, captured


def assert_near(found, expected, bound):
    if expected.numel():
        error = (found - expected).abs().max() / expected.abs().max().clamp(min=1)
        assert error <= bound


@each
@pytest.mark.parametrize("examples", matrix_rows([2, 40], 2))
def test_results_are_the_reference_s_and_captures_change_no_bit(kernels, examples):
    @settings(max_examples=examples, deadline=None)
    @given(data=st.data(), seed=st.integers(0, 2**31))
    def compare(data, seed):
        layout, chunk_size = kernels.draw(data)
        given = case(kernels, layout, seed)
        found = run(kernels, kernels.backend, *given, layout, chunk_size)
        expected = run(kernels, "reference", *given, layout, chunk_size)
        for one, right in zip(found, expected):
            assert_near(one, right, kernels.bound)
        assert not found[0][layout.num_tokens :].any()
        untouched = [i for i in range(len(found[1])) if i not in given[3]]
        assert torch.equal(found[1][untouched], given[2][untouched])
        if layout.captures:
            bare = replace(layout, captures=())
            y, pool, _ = run(kernels, kernels.backend, *given, bare, chunk_size)
            assert torch.equal(y, found[0]) and torch.equal(pool, found[1])

    compare()


@each
def test_inputs_may_have_any_strides(kernels):
    layout = RaggedLayout((1, 6), (9, 5))
    inputs, *rest = case(kernels, layout, 0)
    spread = [torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0] for t in inputs]
    found, expected = (
        run(kernels, kernels.backend, given, *rest, layout, kernels.chunk_sizes[0])
        for given in (spread, inputs)
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_have_the_bits_of_calls_of_their_own(monkeypatch, kernels, dtype):
    """In decodes with drafts, and in chunks of one token."""
    monkeypatch.setattr(dispatch, "forced", kernels.backend)
    dtype = torch.float32 if kernels.op in CONVS else dtype
    layout = RaggedLayout((1, 3, 9), (5, 17, 40), (2, 3, 7), 3, num_decodes=2)
    for chunk_size in (1, kernels.chunk_sizes[0]):
        assert_bits_of_calls_of_their_own(kernels.op, layout, dtype, chunk_size)


@pytest.mark.usefixtures("loops_over_tensors")
@pytest.mark.parametrize(
    ("kernels", "sizes"), matrix_rows(chain(*TRAINED), *(rows[0] for rows in TRAINED))
)
def test_gradients_are_those_of_the_loop_in_float64(kernels, sizes, monkeypatch):
    for name, size in sizes.items():
        monkeypatch.setattr(recurrences, name, size)
    layout, generator, op = RaggedLayout((1, 67, 1, 20), (0,) * 4, (), 3), seeded(0), kernels.op
    state = torch.zeros(recurrences.CHANNELS, recurrences.WIDTH - 1)
    if op.name != "causal_conv1d":
        state = torch.zeros(())
    flat, parameters = op.inputs(layout.num_rows, generator), op.parameters(generator)
    results = []
    for dtype in (torch.float64, torch.float32):
        own = [[t.to(dtype).requires_grad_() for t in each] for each in (flat, parameters)]
        if dtype == torch.float64:
            parts = zip(*(t[: layout.num_tokens].split(layout.lengths) for t in own[0]))
            y = torch.cat([op.naive(part, own[1], state.double())[0] for part in parts])
            weights = torch.randn(y.shape, generator=generator)
        else:
            monkeypatch.setattr(dispatch, "forced", kernels.backend)
            y = on_slots(op, *own, None, layout, kernels.chunk_sizes[-1])[: layout.num_tokens]
        results.append([y, *torch.autograd.grad((y * weights).sum(), [*own[0], *own[1]])])
    for found, right in zip(*reversed(results), strict=True):
        assert_near(found, right, kernels.bound)
