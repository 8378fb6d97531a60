"""States in one byte per element: how large errors are, where they fall, and what cannot happen."""

import math

import pytest
import torch
from host_syncs import no_host_syncs

from megatron_hybrid.ops.state_codec import codec as codec_module
from megatron_hybrid.ops.state_codec.codec import HORIZON_TOKENS, StatesCodec, importance_of

FORGETS = torch.zeros(1, 1)  # all elements of equal importance
SHAPES = [(4, 64, 64), (2, 128, 128), (3, 64, 128), (512, 16), (2, 3, 40, 24)]
ODD_SHAPES = [(1, 1), (1, 7), (2, 4, 3), (3, 5, 13), (65, 1), (4, 16, 8)]


def normal(shape, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written(shape, seed: int = 0) -> torch.Tensor:
    """A state as a recurrence writes it: a decaying sum of outer products, keys with a mean."""
    *heads, rows, columns = shape
    count = 3 * max(rows, columns)
    keys = normal((*heads, count, rows), seed) + 0.7
    values = normal((*heads, count, columns), seed + 1)
    decay = torch.linspace(0.5, 0.99, math.prod(heads)).reshape(*heads, 1, 1)
    ages = torch.arange(count, dtype=torch.float32)[:, None]
    return (keys * decay**ages).mT @ values


def codec_of(shape, decay: torch.Tensor = FORGETS, **options) -> StatesCodec:
    return StatesCodec([shape], [decay], **options)


def through(codec: StatesCodec, *states: torch.Tensor) -> torch.Tensor:
    """The first of the states, as it comes back."""
    code = codec.encode(states)
    assert (code.dtype, code.shape) == (torch.uint8, (codec.num_bytes,))
    decoded = codec.decode(code)
    assert [(d.shape, d.dtype) for d in decoded] == [(s.shape, torch.float32) for s in states]
    return decoded[0]


def relative_error(state: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((decoded - state).norm() / state.norm())


def worst_head(state: torch.Tensor, decoded: torch.Tensor) -> float:
    """The largest relative error of a head, in float64: squares of 1e30 are finite."""
    return max(map(relative_error, state.double(), decoded.double()))


def amax_error(state: torch.Tensor) -> float:
    """Relative error of 255 levels and a scale per row or column, whichever is better."""
    errors = []
    for dim in (-1, -2):
        scale = state.abs().amax(dim, keepdim=True) / 127
        errors.append(relative_error(state, (state / scale).round() * scale))
    return min(errors)


@pytest.mark.parametrize("shape", SHAPES)
def test_error_of_noise(shape):
    """Nothing to exploit: no worse than 8 bits spent on a scale for each row; of one byte per
    element, with all overheads."""
    state, codec = normal(shape), codec_of(shape)
    assert codec.num_bytes == math.prod(shape)
    assert relative_error(state, through(codec, state)) < 0.009


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_error_of_written_states_is_a_part_of_plain_rounding(shape):
    state = written(shape)
    error = relative_error(state, through(codec_of(shape), state))
    assert error < 0.25 * amax_error(state)
    # What each idea gives: the single step with its codes, then the low rank.
    without_parts = through(codec_of(shape, max_rank=0), state)
    assert error < 0.6 * relative_error(state, without_parts) < 0.6 * amax_error(state)


def test_the_error_is_the_same_everywhere_in_a_head():
    """Rows of very different size have equal errors, spread evenly between plus and minus half a
    step: the largest is sqrt(3) times the rms."""
    state = normal((2, 64, 64)) * torch.logspace(0, 2, 64)[:, None]
    error = through(codec_of(state.shape), state) - state
    for head in error:
        rms = head.square().mean().sqrt()
        rows = head.square().mean(-1).sqrt() / rms
        assert rows.min() > 0.7 and rows.max() < 1.3
        assert head.abs().max() < 1.02 * math.sqrt(3) * rms


def test_errors_of_heads_grow_with_the_root_of_their_size():
    state = normal((2, 64, 64)) * torch.tensor([1.0, 9.0])[:, None, None]
    error = through(codec_of(state.shape), state) - state
    small, large = error.square().mean((1, 2)).sqrt()
    assert 2.7 < large / small < 3.3


@pytest.mark.parametrize("heads", [2, 4, 32])
def test_no_head_is_lost_where_sizes_are_spread_over_four_decades(heads):
    sizes = torch.logspace(0, -4, heads)[:, None, None]
    for state in (normal((heads, 64, 64)) * sizes, written((heads, 64, 64)) * sizes):
        assert worst_head(state, through(codec_of(state.shape), state)) < 0.01
    # Decays make it worse: an error of what is soon forgotten may be four times as large.
    state = normal((heads, 64, 64)) * sizes
    for decays in (torch.linspace(0.2, 0.999, heads), torch.linspace(0.999, 0.2, heads)):
        decoded = through(codec_of(state.shape, decays[:, None, None]), state)
        assert worst_head(state, decoded) < 0.02


@pytest.mark.parametrize("heads", [4, 32, 128])
@pytest.mark.parametrize("factor", [1e-2, 1e-4, 1e-12, 1e-24])
def test_one_head_far_smaller_than_all_others(heads, factor):
    """The least favourable sizes: nobody else has bits to give."""
    state = normal((heads, 32, 64))
    state[1] *= factor
    assert worst_head(state, through(codec_of(state.shape), state)) < 0.02


def test_what_lasts_is_kept_more_exactly():
    """Squared errors in inverse proportion to the number of outputs that feel them."""
    state = normal((2, 64, 64))
    for decay in (torch.zeros(2, 1, 1), torch.zeros(64, 1), torch.zeros(1, 64)):
        decay.view(-1)[1::2] = 1.0
        lasts = decay.bool().expand(state.shape)
        error = through(codec_of(state.shape, decay), state) - state
        ratio = error[~lasts].square().mean() / error[lasts].square().mean()
        assert 0.8 * HORIZON_TOKENS < ratio < 1.2 * HORIZON_TOKENS


@pytest.mark.parametrize("value", [0.0, 0.3, 0.9, 0.999])
def test_importance_is_a_sum_over_the_horizon(value):
    total = sum(value ** (2 * t) for t in range(HORIZON_TOKENS))
    assert float(importance_of(torch.tensor(value, dtype=torch.float64))) == pytest.approx(total)


@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_small_and_odd_shapes(shape):
    state = normal(shape)
    codec = codec_of(shape, torch.rand(shape))
    assert relative_error(state, through(codec, state)) < 0.02


@pytest.mark.parametrize("shape", [*SHAPES, *ODD_SHAPES])
def test_zeros_stay_zeros(shape):
    codec = codec_of(shape)
    assert not through(codec, torch.zeros(shape)).any()


def test_a_single_element_among_zeros():
    state = torch.zeros(2, 64, 64)
    state[1, 5, 7] = -3e-5
    decoded = through(codec_of(state.shape), state)
    torch.testing.assert_close(decoded, state, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30, 3e38])
def test_any_size_is_as_exact_as_any_other(size):
    state = normal((2, 64, 64))
    state = state / state.abs().max() * size
    for decay in (0.0, 0.9, 1.0):
        decoded = through(codec_of(state.shape, torch.full((1, 1), decay)), state)
        assert ((decoded - state) / size).square().mean().sqrt() < 0.01 / 3


def test_subnormal_heads_beside_normal_ones_are_finite():
    """Their steps are multiples of the smallest fp32 number, or zero."""
    state = normal((4, 64, 64))
    state[1] *= 1e-40
    state[2] *= 1e-44
    decoded = through(codec_of(state.shape), state)
    assert decoded.isfinite().all()
    assert worst_head(state[[0, 3]], decoded[[0, 3]]) < 0.006
    assert (decoded[1:3] - state[1:3]).abs().max() < 1e-41


@pytest.mark.parametrize("factor", [1e4, 1e12, 1e24])
def test_an_element_far_larger_than_its_head_harms_no_other_head(factor):
    state = normal((4, 64, 64))
    others = [0, 2, 3]
    plain = through(codec_of(state.shape), state)
    state[1, 3, 4] = factor
    decoded = through(codec_of(state.shape), state)
    assert decoded.isfinite().all()
    assert relative_error(state[1].double(), decoded[1].double()) < 0.01
    state, plain, decoded = state[others], plain[others], decoded[others]
    assert worst_head(state, decoded) < 1.1 * worst_head(state, plain)


@pytest.mark.parametrize("factor", [1e-24, 1e-12, 1e4, 1e12, 1e24])
@pytest.mark.parametrize("source", [normal, written])
@pytest.mark.parametrize(
    "shapes", [[(4, 64, 64), (4, 64, 64)], [(8, 64, 64), (512, 16)], [(64, 16, 16), (8, 64, 128)]]
)
def test_the_size_of_one_head_changes_the_error_of_no_other_state(shapes, source, factor):
    states = [source(shape, seed) for seed, shape in enumerate(shapes)]
    codec = StatesCodec(shapes, [FORGETS] * 2)
    plain = relative_error(states[1], codec.decode(codec.encode(states))[1])
    states[0][0] *= factor
    error = relative_error(states[1], codec.decode(codec.encode(states))[1])
    assert 0.9 * plain < error < 1.1 * plain


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_head_with_an_inf_or_nan_comes_back_as_nan_and_no_other(bad):
    state = written((4, 64, 64))
    state[2, 0, 1] = bad
    decoded = through(codec_of(state.shape), state)
    assert decoded[2].isnan().all()
    others = [0, 1, 3]
    assert relative_error(state[others], decoded[others]) < 0.005


def test_bytes_are_a_function_of_the_state_alone():
    state = written((4, 64, 64))
    codec = codec_of(state.shape)
    code = codec.encode([state])
    assert torch.equal(code, codec_of(state.shape).encode([state.clone()]))
    strided = state.mT.contiguous().mT
    assert torch.equal(code, codec.encode([strided]))
    assert torch.equal(codec.encode([state.bfloat16()]), codec.encode([state.bfloat16().float()]))


def far_apart(shape: tuple[int, ...]) -> torch.Tensor:
    state = torch.zeros(shape)
    state.view(-1)[::97] = 1e-3
    state.view(-1)[-1] = 1.0
    return state


@pytest.mark.parametrize("source", [normal, written, torch.zeros, far_apart])
@pytest.mark.parametrize("shapes", [[(2, 64, 64), (512, 16), (2, 3, 40, 24)], ODD_SHAPES])
def test_as_on_a_gpu_nothing_waits_for_it_and_all_bytes_are_the_same(monkeypatch, shapes, source):
    states = [source(shape) for shape in shapes]
    states[-1].view(-1)[1] = math.nan
    codec = StatesCodec(shapes, [FORGETS] * len(shapes))
    code = codec.encode(states)
    decoded = codec.decode(code)
    monkeypatch.setattr(codec_module, "_is_free_to_read", lambda x: False)
    with no_host_syncs():
        as_on_gpu = codec.encode(states)
        back = codec.decode(as_on_gpu)
    assert torch.equal(as_on_gpu, code)
    for one, other in zip(back, decoded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_words_of_any_content_are_decoded_to_something(monkeypatch):
    """A GPU does not survive an index out of range."""
    shapes = [(2, 64, 64), (3, 16, 8)]
    codec = StatesCodec(shapes, [FORGETS] * 2)
    for free in (True, False):
        monkeypatch.setattr(codec_module, "_is_free_to_read", lambda x, free=free: free)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            code = torch.randint(256, (codec.num_bytes,), generator=generator, dtype=torch.uint8)
            assert [state.shape for state in codec.decode(code)] == [*map(torch.Size, shapes)]


def test_all_of_the_bytes_are_used():
    """A step smaller by 1 % would not fit: the space behind the last code is hardly there."""
    for state in (normal((4, 64, 64)), written((4, 64, 64)), normal((64, 64)).exp() ** 3):
        code = codec_of(state.shape).encode([state])
        last = int(code.nonzero().max())
        assert last > 0.99 * len(code)


def test_fewer_bytes_are_less_exact():
    state = written((4, 64, 64))
    errors = []
    for bits in (8, 6, 4):
        codec = codec_of(state.shape, bytes_per_element=bits / 8)
        assert codec.num_bytes == state.numel() * bits // 8
        errors.append(relative_error(state, through(codec, state)))
    assert 3 < errors[1] / errors[0] < 7 and 3 < errors[2] / errors[1] < 7


@pytest.mark.parametrize("bytes_per_element", [0.25, 0.26, 0.3])
@pytest.mark.parametrize("shape", [(64, 24, 24), (64, 12, 12), (2, 64, 64)])
def test_parts_that_are_taken_out_leave_a_bit_for_every_element(shape, bytes_per_element):
    """Otherwise no step is long enough, and the search for one does not end."""
    *heads, rows, columns = shape
    state = normal((*heads, rows, 2)) @ normal((*heads, 2, columns)) + 1e-5 * normal(shape)
    codec = codec_of(shape, bytes_per_element=bytes_per_element)
    assert relative_error(state, through(codec, state)) < 0.5


def test_a_simple_state_leaves_bytes_to_another():
    """Half of the difference in exactness goes: a quarter from each side."""
    simple, other = written((2, 64, 64)), normal((2, 64, 64))
    alone = {
        name: relative_error(s, through(codec_of(s.shape), s))
        for name, s in (("simple", simple), ("other", other))
    }
    both = StatesCodec([other.shape, simple.shape], [FORGETS, FORGETS])
    assert both.num_bytes == other.numel() + simple.numel()
    decoded = both.decode(both.encode([other, simple]))
    errors = relative_error(other, decoded[0]), relative_error(simple, decoded[1])
    quarter = (alone["other"] / alone["simple"]) ** 0.25
    assert quarter > 1.2
    assert alone["other"] / errors[0] == pytest.approx(quarter, rel=0.15)
    assert errors[1] / alone["simple"] == pytest.approx(quarter, rel=0.15)


@pytest.mark.parametrize("shape", [(), (5,), (2, 0, 3)])
def test_shapes_without_matrices_and_a_bit_per_element_are_refused(shape):
    with pytest.raises(ValueError, match=r"has no matrices to encode"):
        codec_of(shape)
    with pytest.raises(ValueError, match=r"bytes_per_element is 0.125; .* 0.25"):
        codec_of((64, 64), bytes_per_element=1 / 8)
