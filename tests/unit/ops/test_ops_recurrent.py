"""What the scans, the delta rules and the causal convolution hold alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrences import (
    DELTA_RULES,
    KIMI_DELTA_ATTENTION,
    LINEAR_CONV,
    OPS,
    SCANS,
    SELECTIVE_SCAN,
    SSMS,
    assert_near,
    chunk_sizes,
    layouts,
    randn,
    seeded,
    to,
)

from megatron_hybrid.ops import RaggedLayout


def each(ops):
    name = lambda op: "without activation" if op is LINEAR_CONV else op.name  # noqa: E731
    return pytest.mark.parametrize("op", ops, ids=name)


each_op, each_scan, each_delta_rule = each(OPS), each(SCANS), each(DELTA_RULES)
seeds = st.integers(0, 2**31)
quick = settings(max_examples=30, deadline=None)


def run(op, inputs, parameters, states, layout, chunk_size=16, dtype=torch.float32):
    return op.call(
        to(dtype, inputs),
        to(dtype, parameters),
        None if states is None else states.to(dtype),
        layout,
        chunk_size,
    )


def case(op, layout, seed):
    generator = seeded(seed)
    inputs = op.inputs(layout.num_rows, generator)
    return inputs, op.parameters(generator), op.states(layout.num_sequences, generator)


def naive(op, inputs, parameters, states, layout):
    """Outputs of all tokens, final states, and the states at the captures."""
    ys, finals, captured = [], [], []
    for r, (first, end) in enumerate(zip(layout.cu_seqlens, layout.cu_seqlens[1:])):
        y, after = op.naive([t[first:end] for t in inputs], parameters, states[r])
        ys.append(y)
        finals.append(after[-1])
        captured += [after[c - 1 - first] for c in layout.captures if first < c <= end]
    return torch.cat(ys), torch.stack(finals), torch.stack(captured) if captured else None


@each_op
@quick
@given(layout=layouts(), chunk_size=chunk_sizes, seed=seeds)
def test_ragged_batch_equals_the_recurrence_in_float64(op, layout, chunk_size, seed):
    inputs, parameters, states = case(op, layout, seed)
    y, final, captured = run(op, inputs, parameters, states, layout, chunk_size)
    expected_y, expected_final, expected_captured = naive(op, inputs, parameters, states, layout)
    assert_near(y[: layout.num_tokens], expected_y)
    assert_near(final, expected_final)
    assert captured.shape == (len(layout.captures), *op.state_shape)
    if layout.captures:
        assert_near(captured, expected_captured)
    assert y.shape[0] == layout.num_rows
    assert not y[layout.num_tokens :].any()


@each_op
@quick
@given(data=st.data(), seed=seeds, chunk_size=chunk_sizes, start=st.integers(0, 70))
def test_any_cut_of_a_sequence_gives_the_same(op, data, seed, chunk_size, start):
    length = data.draw(st.integers(1, 150))
    cuts = sorted(data.draw(st.sets(st.integers(1, length), max_size=6)) | {length})
    whole = RaggedLayout((length,), (start,), tuple(cuts))
    inputs, parameters, states = case(op, whole, seed)
    y, final, captured = run(op, inputs, parameters, states, whole, chunk_size)
    state, first = states.float(), 0
    for i, cut in enumerate(cuts):
        piece = RaggedLayout((cut - first,), (start + first,))
        rows = [t[first:cut] for t in inputs]
        y_piece, state, _ = run(op, rows, parameters, state, piece, chunk_size)
        assert_near(y_piece, y[first:cut])
        assert_near(state[0], captured[i])
        first = cut
    assert_near(state, final)


@each_op
@quick
@given(layout=layouts(), seed=seeds, chunk_size=chunk_sizes)
def test_captures_change_no_bit_of_the_outputs(op, layout, seed, chunk_size):
    inputs, parameters, states = case(op, layout, seed)
    bare = RaggedLayout(layout.lengths, layout.start_positions, (), layout.num_padding)
    with_captures = run(op, inputs, parameters, states, layout, chunk_size)
    without = run(op, inputs, parameters, states, bare, chunk_size)
    assert torch.equal(with_captures[0], without[0])
    assert torch.equal(with_captures[1], without[1])


@each_op
def test_garbage_in_padding_rows_goes_nowhere(op):
    layout = RaggedLayout((1, 20), (5, 3), (10,), num_padding=4)
    inputs, parameters, states = case(op, layout, 0)
    clean = run(op, inputs, parameters, states, layout)
    for tensor in inputs:
        tensor[layout.num_tokens :] = torch.nan
    for before, after in zip(clean, run(op, inputs, parameters, states, layout)):
        assert torch.equal(before, after)


@each_op
def test_initial_states_and_inputs_are_not_written(op):
    layout = RaggedLayout((1, 1, 20), (5, 9, 3), (1, 2, 10))
    inputs, parameters, states = case(op, layout, 0)
    given_tensors = (*to(torch.float32, inputs), states.float())
    copies = [t.clone() for t in given_tensors]
    results = op.call(
        given_tensors[:-1], to(torch.float32, parameters), given_tensors[-1], layout, 16
    )
    for tensor in results:
        tensor.fill_(7.0)
    for tensor, copy in zip(given_tensors, copies):
        assert torch.equal(tensor, copy)


@each_op
@pytest.mark.parametrize("chunk_size", [1, 8])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (37,), (1, 20, 5, 33)], ids=str)
def test_gradients_in_float64(op, lengths, chunk_size):
    starts = tuple(range(3, 3 + len(lengths)))
    captures = tuple(sorted({1, lengths[0], sum(lengths) - 1, sum(lengths)}))
    layout = RaggedLayout(lengths, starts, captures)
    inputs, parameters, states = case(op, layout, 1)
    leaves = [t.requires_grad_() for t in (*inputs, *parameters, states)]

    def call(*tensors):
        tensors, count = list(tensors), len(inputs)
        return op.call(tensors[:count], tensors[count:-1], tensors[-1], layout, chunk_size)

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True, nondet_tol=0.0)


def assert_gradients_equal_those_of_the_recurrence(op, layout, inputs, parameters, states):
    def gradients(dtype, call):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*inputs, *parameters, states)]
        count = len(inputs)
        y, final, _ = call(op, leaves[:count], leaves[count:-1], leaves[-1], layout)
        weights = randn(seeded(3), *y.shape).float().to(dtype)
        return torch.autograd.grad((y * weights).sum() + final.square().sum(), leaves)

    expected = gradients(torch.float64, naive)
    for actual, wanted in zip(gradients(torch.float32, run), expected):
        assert_near(actual / wanted.norm(), wanted / wanted.norm(), 2e-6)


@each_op
def test_a_layout_used_in_inference_mode_serves_training_too(op):
    layout = RaggedLayout((1, 20, 9), (0, 0, 0), (5,))
    inputs, parameters, states = case(op, layout, 0)
    with torch.inference_mode():
        run(op, inputs, parameters, states, layout)
    inputs[0].requires_grad_()
    y, _, _ = run(op, inputs, parameters, states, layout)
    y.sum().backward()
    assert inputs[0].grad is not None


@each_scan
@pytest.mark.parametrize("strength", [30.0, 300.0])
def test_strong_decays_do_not_blur_those_behind_them(op, strength):
    """fp32 sums of log decays alone lose the small ones behind a large one in the chunk."""
    layout = RaggedLayout((128,), (0,))
    inputs, parameters, states = case(op, layout, 3)
    log_decay, sign = inputs[op.log_decay], -1.0
    if op in SSMS:
        sign = 1.0
        parameters[0].fill_(-1.0)
        inputs[0][::16] /= strength
    log_decay.mul_(0.03)
    log_decay[::16] = sign * strength
    y, final, _ = run(op, inputs, parameters, states, layout, 64)
    expected_y, expected_final, _ = naive(op, inputs, parameters, states, layout)
    assert_near(y, expected_y, 3e-6)
    assert_near(final, expected_final, 3e-6)


def case_of_strong_decays(op, layout, weakest):
    """Each token decays by exp(-weakest) to exp(-20)."""
    inputs, parameters, states = case(op, layout, 7)
    inputs[op.log_decay].uniform_(weakest, 20.0, generator=seeded(8))
    if op in SSMS:
        parameters[0].fill_(-1.0)
    else:
        inputs[op.log_decay].neg_()
    return inputs, parameters, states


@each_scan
@pytest.mark.parametrize("weakest", [0.0, 5.0, 19.0])
@pytest.mark.parametrize("chunk_size", [16, 64])
def test_decays_of_up_to_20_in_every_token(op, weakest, chunk_size):
    """A chunk of 64 such tokens decays by exp(-1280); that of fp32 numbers ends at exp(-103)."""
    layout = RaggedLayout((130, 70), (0, 37))
    arguments = case_of_strong_decays(op, layout, weakest)
    y, final, _ = run(op, *arguments, layout, chunk_size)
    expected_y, expected_final, _ = naive(op, *arguments, layout)
    assert_near(y, expected_y)
    assert_near(final, expected_final)


@each((SELECTIVE_SCAN, KIMI_DELTA_ATTENTION))
@pytest.mark.parametrize("weakest", [0.0, 5.0])
def test_gradients_of_strong_decays_per_channel(op, weakest):
    """Relative to their own size, which for the decays themselves is next to nothing."""
    layout = RaggedLayout((130, 70), (0, 37))
    arguments = case_of_strong_decays(op, layout, weakest)
    assert_gradients_equal_those_of_the_recurrence(op, layout, *arguments)


@each_delta_rule
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize("decaying", [False, True])
def test_negative_eigenvalues(op, chunk_size, decaying):
    """beta up to 2 turns a key's direction round; with no decay nothing ever forgets."""
    layout = RaggedLayout((1, 300, 40), (9, 0, 50), (1, 100, 320))
    inputs, parameters, states = case(op, layout, 9)
    beta, log_decay = inputs[4].mul_(2.0), inputs[op.log_decay]
    beta[::7] = 2.0
    log_decay.mul_(0.01 if decaying else 0.0)
    results = run(op, inputs, parameters, states, layout, chunk_size)
    for actual, expected in zip(results, naive(op, inputs, parameters, states, layout)):
        assert_near(actual, expected)


@each_scan
def test_states_are_float32_for_bfloat16_inputs_and_states(op):
    layout = RaggedLayout((1, 50), (3, 7), (20,))
    inputs, parameters, states = case(op, layout, 4)
    inputs, states = to(torch.bfloat16, inputs), states.bfloat16()
    parameters = to(torch.float32, parameters)
    y, final, captured = op.call(inputs, parameters, states, layout, 16)
    assert (y.dtype, final.dtype, captured.dtype) == (torch.bfloat16, *2 * (torch.float32,))
    exact = [to(torch.float64, t) for t in (inputs, parameters)]
    expected_y, expected_final, _ = naive(op, *exact, states.double(), layout)
    assert_near(final, expected_final)
    assert_near(y, expected_y, 2**-8)


@each_op
def test_autocast_does_not_lower_the_precision(op):
    layout = RaggedLayout((1, 50), (3, 7), (20,))
    inputs, parameters, states = case(op, layout, 4)
    plain = run(op, inputs, parameters, states, layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(op, inputs, parameters, states, layout)
    for left, right in zip(plain, inside):
        assert torch.equal(left, right)
