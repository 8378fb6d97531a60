"""Ops on a CUDA device by the backends that serve there; `pytest -m gpu`."""

import pytest
import torch
import torch.nn.functional as F
from backends_alone import let_backends_serve_alone

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks import (
    BOUNDS,
    DTYPES,
    LAYOUTS,
    SIZES,
    compared,
    error_of,
    float32_products,
    sizes_of,
    state_of,
)
from benchmarks.gpu.ops import FAMILIES, decode_layout, prefill_layout
from megatron_hybrid.ops import (
    AttentionPattern,
    RaggedLayout,
    SlotStates,
    dispatch,
    paged_attention,
    varlen_attention,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SMALL = {
    "rms_norm": lambda draw: (draw(9, 4096), draw(4096).float(), 1e-5, draw(9, 4096)),
    "activate": lambda draw: (draw(9, 9216), F.silu, draw(9, 9216), False),
    "packed_linear": lambda draw: (
        *(draw(9, 512), draw(70, 512).to(torch.float8_e4m3fn), draw(70, 4).float().abs()),
        *(None, None, draw(2, 512), None),
    ),
    "unpack": lambda draw: (
        *(draw(2, 70, 256).char().byte(), draw(2, 70, 32).abs().to(torch.float8_e4m3fn)),
        *(draw(2, 70, 1).float(), None, None, torch.bfloat16),
    ),
    "time_steps": lambda draw: (
        draw(9, 32),
        draw(32),
        draw(32),
        (0.0, None),
        draw(9, 32),
        2.0,
        -5.0,
    ),
    "rotate_heads": lambda draw: (
        *(draw(9, 4, 4, 256), draw(9, 4, 256), draw(9, 1, 32), draw(9, 1, 32)),
        *(False, draw(256).float(), draw(256).float(), 1e-5),
    ),
}
"""Ops between projections: inputs from a function that draws tensors of a shape."""
each = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
each_size = pytest.mark.parametrize("size", SIZES)
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def case(family, size, layout, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return family.inputs(sizes_of(family, size), layout, torch.device(DEVICE), dtype)


def assert_near(found, expected):
    assert error_of(found, expected) <= BOUNDS["bf16"]


def usable(family):
    found = [one for one in dispatch.OPS[family.op].backends if one.missing is None]
    return found or pytest.skip(f"{family.op} has no backend here but its reference")


@each
@each_size
@each_layout
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_backend_gives_the_reference_and_the_same_bits_again(family, size, layout, dtype):
    bench = Bench(torch.device(DEVICE), False, None)
    for backend in usable(family):
        given = bench, family, backend, sizes_of(family, size), layout, dtype
        assert not compared("", *given).fault


@pytest.mark.parametrize("op", SMALL)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_ops_give_the_reference_and_the_same_bits_again(op, dtype):
    torch.manual_seed(0)
    inputs = SMALL[op](lambda *shape: torch.randn(shape, device=DEVICE, dtype=DTYPES[dtype]))
    (backend,) = dispatch.OPS[op].backends
    assert backend.refusal(*inputs) is None
    found, again, expected = (
        torch.utils._pytree.tree_leaves(run(*inputs))
        for run in (backend.run, backend.run, dispatch.OPS[op].reference)
    )
    for one, other, right in zip(found, again, expected, strict=True):
        assert torch.equal(one, other) and error_of(one, right) <= BOUNDS[dtype]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.is_recurrent], ids=lambda f: f.op)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@each_size
@each_layout
def test_captures_change_no_bit(family, dtype, size, layout):
    inputs = case(family, size, layout, dtype)
    bare = RaggedLayout(layout.lengths, layout.start_positions, (), layout.num_padding)
    without = tuple(
        bare
        if each is layout
        else each._replace(pool_S=each.pool_S.clone(), captured_n=None)
        if isinstance(each, SlotStates)
        else each
        for each in inputs
    )
    backend = usable(family)[0]
    with float32_products("high"):  # else those that compute in TF32 refuse
        assert backend.refusal(*inputs) is None
        assert torch.equal(backend.run(*inputs), backend.run(*without))
    assert torch.equal(state_of(inputs)[0], state_of(without)[0])


def gradients(run, inputs):
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    output = run(*(x.requires_grad_() if any(x is leaf for leaf in leaves) else x for x in inputs))
    torch.manual_seed(1)
    weights = torch.randn(output.shape, device=output.device, dtype=output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights)]


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.op != "paged_attention"], ids=lambda f: f.name
)
def test_gradients_are_those_of_the_reference(family):
    op, layout = dispatch.OPS[family.op], RaggedLayout((300, 1, 77), (0, 0, 0), (), 2)
    given = case(family, "published", layout)
    inputs = [None if isinstance(each, SlotStates) else each for each in given]
    assert op.refusals(*inputs)[usable(family)[0].name] is None
    for found, expected in zip(*(gradients(run, inputs) for run in (op, op.reference))):
        assert_near(found, expected)


@pytest.mark.parametrize("local", [{}, {"window": 100}, {"chunk": 128}], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("D", "P"), [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
def test_flash_attention_trains_with_the_bits_of_a_prefill(local, with_sinks, D, P):
    lengths, B = (300, 17, 1000, 64), 64
    layout, pattern = RaggedLayout(lengths, (0,) * 4), AttentionPattern(D**-0.5, **local)
    torch.manual_seed(0)
    q, k, v, sinks = (
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        for shape in ((sum(lengths), 8, D), (sum(lengths), 2, D), (sum(lengths), 2, P), (8,))
    )
    inputs = [q, k, v, layout, pattern, *[sinks] * with_sinks]
    assert varlen_attention.refusals(*inputs)["flash"] is None
    ops = (varlen_attention, varlen_attention, varlen_attention.reference)
    found, again, expected = (gradients(run, inputs) for run in ops)
    assert torch.equal(found[0], again[0])
    for one, other in zip(found, expected):
        assert_near(one, other)
    blocks = [-(-length // B) for length in lengths]
    pages = [x.new_zeros(sum(blocks), B, *x.shape[1:]) for x in (k, v)]
    table = torch.zeros(4, max(blocks), dtype=torch.int32, device=DEVICE)
    for r, (number, length) in enumerate(zip(blocks, lengths)):
        first, row = sum(blocks[:r]), layout.cu_seqlens[r]
        table[r, :number] = torch.arange(first, first + number)
        for memory, rows in zip(pages, (k, v)):
            memory[first : first + number].flatten(0, 1)[:length] = rows[row : row + length]
    with torch.no_grad():
        prefill = paged_attention(q, *pages, table, layout, pattern, *[sinks] * with_sinks)
    assert torch.equal(prefill, found[0])


@each
@pytest.mark.parametrize(
    "layout", [prefill_layout(512), decode_layout(8, 700)], ids=["prefill", "decodes"]
)
def test_other_libraries_compute_the_same(monkeypatch, family, layout):
    """Else benchmarks/gpu would compare different things."""
    let_backends_serve_alone(monkeypatch)
    inputs, sizes = case(family, "published", layout), family.sizes
    calls = {}
    for name, make in family.others(sizes, layout, inputs).items():
        try:
            calls[name] = make()
        except ImportError:
            continue
    if not calls:
        pytest.skip("no other library is installed")
    found = {name: call() for name, call in calls.items()}
    expected = dispatch.OPS[family.op](*inputs)
    for output in found.values():
        assert output.shape == expected.shape
        assert_near(output, expected)
