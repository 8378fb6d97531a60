"""Ops on a CUDA device by the backends that serve there; `pytest -m gpu`.

Inputs are in bf16; what is right is the reference in fp32 on the same numbers.
"""

import pytest
import torch
from backends_alone import let_backends_serve_alone

from benchmarks.gpu.ops import FAMILIES, decode_layout, prefill_layout
from megatron_hybrid.ops import RaggedLayout, SlotStates, dispatch

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BOUND = 3e-2
"""Largest error, in units of the largest value: bf16 rounds by 2^-9, and some sums are of products
that were rounded."""
ODD = {"H": 6, "K": 3, "D": 80, "P": 24, "G": 3, "H_qk": 3, "N": 20, "C": 40}
"""Sizes that are no powers of two."""
LAYOUTS = {
    "prefill": RaggedLayout((1000,), (0,), (64, 129, 700, 999)),
    "decodes": RaggedLayout((1,) * 5, (0, 63, 64, 500, 1300), (2, 4), 3),
    "mixed": RaggedLayout((1, 1, 300, 77, 513), (9, 700, 0, 200, 127), (1, 40, 302, 400, 892), 4),
}
each = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.op} of {f.model}")
each_size = pytest.mark.parametrize("size", ["published", "toy", "odd"])
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """No reference serves, so none is compared with itself."""
    return let_backends_serve_alone(monkeypatch)


@pytest.fixture
def tf32():
    """Some backends refuse float32 without it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def sizes_of(family, size):
    if size == "odd":
        known = {name: ODD.get(name, value) for name, value in family.toy.items()}
        return known | ({"H_qk": known["H"]} if known.get("per_channel") else {})
    return family.sizes if size == "published" else family.toy


def case(family, size, layout, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return family.inputs(sizes_of(family, size), layout, torch.device(DEVICE), dtype)


def converted(inputs, convert):
    """The inputs with each floating-point tensor converted, to memory of its own."""

    def one(value):
        if isinstance(value, SlotStates):
            captured = None if value.captured_n is None else convert(value.captured_n)
            return SlotStates(convert(value.pool_S), value.slot_ids_R, captured)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return convert(value) if is_float else value

    return tuple(map(one, inputs))


def state_of(inputs):
    """Pool and captures of a recurrent op, as they are now."""
    states = next((each for each in inputs if isinstance(each, SlotStates)), None)
    if states is None:
        return []
    return [states.pool_S, *([] if states.captured_n is None else [states.captured_n])]


def assert_near(found, expected):
    error = (found.float() - expected.float()).abs().max()
    assert error <= BOUND * expected.abs().max().clamp(min=1e-3)


@each
@each_size
@each_layout
def test_bf16_is_near_the_reference_in_fp32(references, family, size, layout):
    inputs = case(family, size, layout)
    exact = converted(inputs, lambda tensor: tensor.float().clone())
    found, expected = dispatch.OPS[family.op](*inputs), references[family.op](*exact)
    assert found.dtype == torch.bfloat16
    assert_near(found, expected)
    assert not found[layout.num_tokens :].any()
    for one, right in zip(state_of(inputs), state_of(exact), strict=True):
        assert_near(one, right)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.is_recurrent], ids=lambda f: f.op)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_size
@each_layout
def test_captures_change_no_bit(tf32, family, dtype, size, layout):
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
    op = dispatch.OPS[family.op]
    assert torch.equal(op(*inputs), op(*without))
    assert torch.equal(state_of(inputs)[0], state_of(without)[0])


@each
@pytest.mark.parametrize(
    "layout", [prefill_layout(512), decode_layout(8, 700)], ids=["prefill", "decodes"]
)
def test_other_libraries_compute_the_same(family, layout):
    """Else benchmarks/gpu would compare different things."""
    inputs, sizes = case(family, "published", layout), family.sizes
    is_prefill = layout.num_sequences == 1
    others = family.prefill_others if is_prefill else family.decode_others
    calls = {}
    for name, make in others(sizes, layout, inputs).items():
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
