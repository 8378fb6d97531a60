"""A row's bits depend on that row alone: not on its place, its strides, the rows beside it or the
number of threads. `make test` runs this file under each of the machine's vector widths."""

import ast
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recurrences import seeded

import megatron_hybrid
from megatron_hybrid import ops
from megatron_hybrid.ops import AttentionPattern, ExpertPairs, RaggedLayout, SlotStates, dispatch
from megatron_hybrid.ops.activations import ACTIVATIONS, sigmoid, softplus

pytestmark = pytest.mark.bits

ROWS = 40
NARROW, WIDE = 7, 1031
"""Channels: fewer than a vector's, and enough for several threads. Both leave a rest."""


def randn(generator, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(dtype)


@contextmanager
def threads(number):
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def places(x, rows, is_aligned):
    """The rows of x in other places and layouts of memory."""
    own = x[rows]
    yield own
    yield torch.stack([own, own], 1)[:, 1]
    yield torch.cat([own, own], -1)[..., : own.shape[-1]]
    if is_aligned:
        return
    moved = torch.cat([own.flatten()[:3], own.flatten()])[3:]
    yield moved.view(own.shape)


def some_rows(size, alignment=1):
    """Rows that are called alone: one, the first and the last ones, every third, all in another
    order. With an alignment there are so many, or a multiple."""
    steps = range(0, size, alignment)
    yield from ([i] for i in (0, 1, size - 1) if alignment == 1)
    yield [*range(3 * alignment)]
    yield [*range(size - 5 * alignment, size)]
    yield [i for i in range(size) if i % 3 == 1][: size // 3 // alignment * alignment]
    yield [i + j for i in reversed(steps) for j in range(alignment)]


@dataclass
class Case:
    """An op's inputs that have rows, and what calls it with some of them."""

    inputs: tuple
    call: Callable
    """(*inputs of some rows) -> a tensor or several, of these rows."""
    alignment: int = 1
    is_aligned: bool = False
    """Whether rows begin at multiples of 64 bytes: products of MKL round by that."""
    rounding: float = 0.0
    """What rows differ by at most where their bits are not promised."""


def assert_rows_alone(case):
    def run(*inputs):
        y = case.call(*inputs)
        return [y] if isinstance(y, torch.Tensor) else [part for part in y if part is not None]

    expected, num = run(*case.inputs), len(case.inputs[0])
    with threads(2):
        check(run(*case.inputs), expected, case.rounding)
    for rows in (range(num), *some_rows(num, case.alignment)):
        rows = torch.tensor([*rows])
        for moved in zip(*(places(x, rows, case.is_aligned) for x in case.inputs)):
            check(run(*moved), [of_all[rows] for of_all in expected], case.rounding)


def check(given, expected, rounding):
    assert len(given) == len(expected)
    for own, wanted in zip(given, expected):
        if rounding:
            torch.testing.assert_close(own, wanted, rtol=rounding, atol=rounding)
        else:
            assert torch.equal(own, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", [*ACTIVATIONS, "sigmoid", "softplus"])
@torch.inference_mode()
def test_activations_of_a_row(function, dtype):
    own = {"sigmoid": sigmoid, "softplus": softplus}.get(function)

    def call(x):
        return own(x) if own else ops.activate(x, ACTIVATIONS[function])

    for width in (NARROW, WIDE):
        x = 4 * randn(seeded(0), ROWS, width)
        assert_rows_alone(Case((x.to(dtype),), call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["exp", "log", "log1p", "expm1", "erf", "tanh", "cos", "sin", "reciprocal", "sqrt"]
)
@torch.inference_mode()
def test_functions_of_torch_that_ops_are_made_of(name, dtype):
    x = randn(seeded(0), ROWS, WIDE).abs() * 3
    assert_rows_alone(Case((x.to(dtype),), getattr(torch, name)))


def activate(g, dtype):
    def call(x, factor):
        y = [ops.activate(x, F.silu, factor), ops.activate(x, torch.sigmoid, factor, True)]
        return [*y, ops.activate(x, F.gelu)]

    return [Case((randn(g, ROWS, C, dtype=dtype),) * 2, call) for C in (NARROW, WIDE)]


def norms(g, dtype):
    """Both ops of `ops/norm`."""
    cases = []
    for C in (NARROW, 64, WIDE):
        x, y = randn(g, ROWS, 2, C, dtype=dtype), randn(g, ROWS, 2, C, dtype=dtype)
        weight = randn(g, 2, C)

        def call(x, y, weight=weight):
            gated = ops.gated_rms_norm(x, y, weight, 1e-5)
            first = ops.gated_rms_norm(x, y, weight, 1e-5, "sigmoid", norm_first=True)
            plain = ops.rms_norm(x, weight[0], 1e-5)
            return gated, first, plain, *ops.rms_norm_of_sum(x[:, 0], y[:, 1], weight[1], 1e-5)

        cases.append(Case((x, y), call))
    return cases


def rotary(g, dtype):
    q, k = randn(g, ROWS, 2, 3, 10, dtype=dtype), randn(g, ROWS, 2, 10, dtype=dtype)
    angles, weights = randn(g, ROWS, 1, 4), (randn(g, 10), randn(g, 10))

    def call(q, k, angles):
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return *ops.rotate_heads(q, k, cos, sin), *ops.rotate_heads(
            q, k, cos, sin, True, *weights, 1e-5
        )

    return [Case((q, k, angles), call)]


def steps_of_time(g, dtype):
    cases = []
    for C in (NARROW, WIDE):
        bias, factor = randn(g, C), randn(g, C)

        def call(x, beta, bias=bias, factor=factor):
            bounded, _ = ops.time_steps(x, bias, factor, bound=-5.0)
            limited = ops.time_steps(x, bias, factor, (0.0, 1.0), beta, 2.0)
            return *limited, ops.time_steps(x, bias)[0], bounded

        inputs = randn(g, ROWS, C, dtype=dtype), randn(g, ROWS, 3, dtype=dtype)
        cases.append(Case(inputs, call))
    return cases


def packed(g, dtype):
    """Both ops of `ops/packed`."""
    codes = torch.randint(-127, 128, (48, 64), dtype=torch.int8, generator=g)
    scale = randn(g, 48, 2).abs() / 64

    def call(x):
        weight, ends = ops.unpack(codes, scale, dtype=dtype), torch.tensor([len(x)])
        grouped = ops.packed_linear(x, codes[None], scale[None], ends_E=ends)
        return ops.packed_linear(x, codes, scale), ops.linear(x, weight), grouped

    return [Case((randn(g, ROWS, 64, dtype=dtype),), call)]


def slot_linear(g, dtype):
    x, weights = randn(g, ROWS, 64, dtype=dtype), randn(g, 3, 48, 64, dtype=dtype)
    slots = torch.arange(ROWS)[:, None].expand(-1, 4) % 4 - 1
    return [Case((x, slots), lambda x, slots: ops.slot_linear(x, weights, slots[:, 0]))]


def experts(g, dtype):
    E, hidden, inner = 4, 64, 48
    fc1, fc2 = randn(g, E, inner, hidden, dtype=dtype), randn(g, E, hidden, inner, dtype=dtype)

    def call(x, weights):
        chosen = torch.zeros_like(weights, dtype=torch.bool)
        chosen.scatter_(1, weights.topk(2).indices, True)
        pairs = ExpertPairs(chosen, 2)
        silu = lambda x: ops.activate(x, F.silu)  # noqa: E731
        y = ops.expert_mlps(pairs.tokens(x), pairs.ends_E, fc1, None, fc2, None, silu)
        return pairs.sum(y, weights)

    return [Case((randn(g, ROWS, hidden, dtype=dtype), randn(g, ROWS, E)), call)]


def decodes(name, arguments, shape, per_row):
    """An op with states, of one token a sequence; the states after it are compared, too."""

    def make(g, dtype):
        given, states = arguments(g), randn(g, ROWS, *shape)
        given = [x.to(dtype) if row else x for x, row in zip(given, per_row)]
        inputs = [x for x, row in zip(given, per_row) if row]

        def call(states, *inputs):
            own = iter(inputs)
            every = [next(own) if row else x for x, row in zip(given, per_row)]
            num = len(states)
            layout = RaggedLayout((1,) * num, (5,) * num)
            pool = states.to(dtype if name == "causal_conv1d" else torch.float32, copy=True)
            y = getattr(ops, name)(*every, SlotStates(pool, torch.arange(num)), layout)
            return y, pool

        return [Case((states, *inputs), call)]

    return make


def delta_inputs(g, per_channel):
    decays = -randn(g, ROWS, 3, 16).abs() if per_channel else -randn(g, ROWS, 3).abs()
    keys = randn(g, ROWS, 3, 16), randn(g, ROWS, 3, 16)
    return *keys, randn(g, ROWS, 3, 12), decays, randn(g, ROWS, 3).sigmoid()


ATTENTION = [
    (AttentionPattern(0.3), None),
    *((AttentionPattern(0.3, **form), randn(seeded(1), 4)) for form in ({"softcap": 3.0}, {})),
    *((AttentionPattern(0.3, **form), None) for form in ({"window": 3}, {"chunk": 7})),
]
"""Patterns and sinks of four heads."""


def attention(g, dtype, decoding=True):
    """Sequences that decode over pages, and whole prompts of one length."""
    D, B, length = 16, 4, 9
    q, k, v = (randn(g, ROWS, length, heads, D, dtype=dtype) for heads in (4, 2, 2))

    def paged(q, k, v):
        num = len(q)
        pages = [F.pad(x, (0, 0, 0, 0, 0, 3)).reshape(num * 3, B, 2, D) for x in (k, v)]
        table = torch.arange(num * 3).view(num, 3)
        decode = RaggedLayout((1,) * num, (length - 1,) * num)
        prefill = RaggedLayout((length,) * num, (0,) * num)
        for pattern, sinks in ATTENTION:
            yield ops.paged_attention(q[:, -1], *pages, table, decode, pattern, sinks)
            y = ops.paged_attention(q.flatten(0, 1), *pages, table, prefill, pattern, sinks)
            yield y.unflatten(0, (num, length))

    def varlen(q, k, v):
        layout = RaggedLayout((length,) * len(q), (0,) * len(q))
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        for pattern, sinks in ATTENTION:
            y = ops.varlen_attention(*flat, layout, pattern, sinks)
            yield y.unflatten(0, (len(q), length))

    # Forwards without a cache may round a single sequence otherwise: MKL takes its products apart.
    rounding = 0.0 if decoding else 1e-6 if dtype == torch.float32 else 1e-2
    return [Case((q, k, v), paged if decoding else varlen, is_aligned=True, rounding=rounding)]


CASES = {
    "activate": activate,
    "gated_rms_norm": norms,
    "rms_norm": norms,
    "rotate_heads": rotary,
    "time_steps": steps_of_time,
    "packed_linear": packed,
    "unpack": packed,
    "expert_mlps": experts,
    "slot_linear": slot_linear,
    "causal_conv1d": decodes(
        "causal_conv1d",
        lambda g: (randn(g, ROWS, 23), randn(g, 23, 4), randn(g, 23)),
        (23, 3),
        (True, False, False),
    ),
    "ssd_scan": decodes(
        "ssd_scan",
        lambda g: (
            *(randn(g, ROWS, 4, 12), randn(g, ROWS, 4).abs(), -randn(g, 4).abs()),
            *(randn(g, ROWS, 2, 16), randn(g, ROWS, 2, 16), randn(g, 4)),
        ),
        (4, 12, 16),
        (True, True, False, True, True, False),
    ),
    "selective_scan": decodes(
        "selective_scan",
        lambda g: (
            *(randn(g, ROWS, 23), randn(g, ROWS, 23).abs(), -randn(g, 23, 16).abs()),
            *(randn(g, ROWS, 16), randn(g, ROWS, 16), randn(g, 23)),
        ),
        (23, 16),
        (True, True, False, True, True, False),
    ),
    "gated_delta_rule": decodes(
        "gated_delta_rule", lambda g: delta_inputs(g, False), (3, 16, 12), (True,) * 5
    ),
    "kimi_delta_attention": decodes(
        "kimi_delta_attention", lambda g: delta_inputs(g, True), (3, 16, 12), (True,) * 5
    ),
    "paged_attention": attention,
    "varlen_attention": lambda g, dtype: attention(g, dtype, False),
}
"""A case for each op that there is: the next op has none, and fails."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(dispatch.OPS))
@torch.inference_mode()
def test_every_op_gives_a_row_its_bits_whatever_is_beside_it(name, dtype):
    for case in CASES[name](seeded(0), dtype):
        assert_rows_alone(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels", [NARROW, 256, WIDE])
def test_a_norm_has_the_bits_that_training_gives_it(channels, dtype):
    x, weight = randn(seeded(0), ROWS, channels, dtype=dtype), randn(seeded(1), channels)
    trained = ops.rms_norm(x, weight.requires_grad_(), 1e-5)
    with torch.inference_mode():
        assert torch.equal(ops.rms_norm(x, weight, 1e-5), trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern, sinks", ATTENTION)
@torch.inference_mode()
def test_attention_gives_a_row_its_bits_in_any_cut(pattern, sinks, dtype):
    T, D = 150, 32
    q, k, v = (randn(seeded(0), T, heads, D, dtype=dtype) for heads in (4, 2, 2))
    pages, table = (k[:, None], v[:, None]), torch.arange(T)[None]
    expected = ops.varlen_attention(q, k, v, RaggedLayout((T,), (0,)), pattern, sinks)
    for length in (1, 2, 3, 5, 31, 64):
        for begin in range(0, T, length):
            rows = slice(begin, min(begin + length, T))
            for is_decode in (False, True)[: 1 + (length <= 3)]:
                layout = RaggedLayout((rows.stop - begin,), (begin,), num_decodes=int(is_decode))
                y = ops.paged_attention(q[rows], *pages, table, layout, pattern, sinks)
                assert torch.equal(y, expected[rows])


PLACES = {"silu", "sigmoid", "softplus", "gelu", "logsigmoid", "exp2", "mish", "elu", "var", "std"}
"""Names of functions whose bits torch lets depend on a value's place, or on other rows."""
ELSEWHERE = {
    "ops/activations.py": "the functions that stand for them",
    "ops/activate/triton.py": "a GPU's: by names alone",
    "ops/activate/reference.py": "",
    "models/config/common.py": "a name for a function",
    "models/mixers/time_step.py": "of parameters",
    "ops/state_codec/codec.py": "of whole states, of one size",
}


def test_no_function_of_places_is_called_outside_of_activations():
    """`torch.f(x)`, `F.f(x)` or `x.f()`: `ops.activations` has one that depends on x alone."""
    root, found = Path(megatron_hybrid.__file__).parent, []
    for path in sorted([*(root / "ops").rglob("*.py"), *(root / "models").rglob("*.py")]):
        if str(path.relative_to(root)) in ELSEWHERE or "triton" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if path.is_relative_to(root / "ops"):  # here a name is used, not handed on
                called = node
            if isinstance(called, ast.Attribute) and called.attr.rstrip("_") in PLACES:
                found.append(f"{path.relative_to(root)}:{node.lineno}: {called.attr}")
    assert not found
