"""Kernels of packed weights: bits as by the reference, and of a row whatever is beside it."""

import pytest
import torch
from recurrences import seeded

from megatron_hybrid.ops import dispatch
from megatron_hybrid.ops.launch import Kernel
from megatron_hybrid.ops.packed import packed_linear
from megatron_hybrid.ops.packed.reference import FEW_ROWS

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FORMATS = {
    "fp8, blocks": (E4M3, torch.float32, 128, 256),
    "fp8, powers of two": (E4M3, E8M0, 128, 384),
    "fp8, rows": (E4M3, torch.bfloat16, 200, 200),
    "int8": (torch.int8, torch.float16, 32, 96),
    "int4": (torch.uint8, torch.bfloat16, 128, 256),
    "int4, odd groups": (torch.uint8, torch.bfloat16, 48, 144),
    "nvfp4": (torch.uint8, E4M3, 16, 64),
    "mxfp4": (torch.uint8, E8M0, 32, 160),
}
"""Dtypes of codes and scales, columns of a group and of all."""
each = pytest.mark.parametrize("name", FORMATS)


def packed(name, rows, *lead):
    """Codes of all values, scales, and what there is of outer scales and zeros."""
    codes, scale, group, columns = FORMATS[name]
    generator, width = seeded(rows), columns // (2 if codes == torch.uint8 else 1)
    bits = torch.randint(0, 256, (*lead, rows, width), generator=generator).to(torch.uint8)
    if codes == E4M3:
        bits[(bits & 127) == 127] = 0  # no numbers
    shape = *lead, rows, columns // group
    powers = torch.randint(115, 124, shape, generator=generator).to(torch.uint8)
    scales = (torch.rand(shape, generator=generator) + 0.1).div(64).to(scale)
    outer = torch.rand(*lead, rows, 1, generator=generator) if name == "nvfp4" else None
    zero = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    has_zero = name.startswith("int") and name != "int4, odd groups"
    return (
        bits.view(codes),
        powers.view(E8M0) if scale == E8M0 else scales,
        outer,
        zero if has_zero else None,
    )


def kernel(op, *inputs):
    """The kernel's result."""
    assert dispatch.OPS[op].refusals(*inputs)["triton"] is None
    return dispatch.OPS[op].backends[0].run(*inputs)


def assert_near(found, expected):
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < (1e-5 if found.dtype == torch.float32 else 2e-3)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_weight_is_unpacked_to_the_bits_of_the_reference(name, dtype):
    for lead, num_rest in (((), 0), ((), 2), ((3,), 0), ((3,), 2)):
        rest = torch.ones(*lead, num_rest, FORMATS[name][3]).to(dtype) if num_rest else None
        inputs = *packed(name, 37, *lead), rest, dtype
        found = kernel("unpack", *inputs)
        assert torch.equal(found, dispatch.OPS["unpack"].reference(*inputs))


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_of_a_product_has_its_bits_among_any_others(name, dtype):
    parts, columns = packed(name, 70), FORMATS[name][3]
    x = torch.randn(FEW_ROWS + 1, columns + 3, generator=seeded(1))[:, 3:].to(dtype)
    rest = torch.randn(2, columns, generator=seeded(2)).to(dtype)
    found = kernel("packed_linear", x[:41], *parts, rest, None)
    assert_near(found, dispatch.OPS["packed_linear"].reference(x[:41], *parts, rest))
    for first, count in ((17, 1), (16, 8), (0, 33)):
        alone = kernel("packed_linear", x[first : first + count], *parts, None, None)
        assert torch.equal(alone, found[first : first + count, :70])
    many = kernel("packed_linear", x, *parts, None, None)
    assert torch.equal(many, dispatch.OPS["packed_linear"].reference(x, *parts))


@each
def test_each_row_has_the_weight_of_its_expert(name):
    parts, ends = packed(name, 37, 4), torch.tensor([8, 8, 48, 51], dtype=torch.int32)
    x = torch.randn(60, FORMATS[name][3], generator=seeded(3)).half()
    found = kernel("packed_linear", x, *parts, None, ends)
    expected = dispatch.OPS["packed_linear"].reference(x, *parts, None, ends)
    assert_near(found[:51], expected[:51])
    for e, row in ((0, 7), (2, 8), (2, 47), (3, 50)):
        own = [None if part is None else part[e] for part in parts]
        assert torch.equal(kernel("packed_linear", x[[row]], *own, None, None)[0], found[row])


@pytest.mark.parametrize(
    ("name", "few", "many"), [("fp8, blocks", 1.1, 5.2), ("int4", 0.6, 4.7), ("nvfp4", 0.7, 4.7)]
)
def test_a_product_moves_no_more_bytes_a_weight_than_told(monkeypatch, name, few, many):
    """Those of the tensors of all launches. bf16 moves 2; unpacked by torch they were 21 to 60."""
    launches, launch = [], Kernel.__call__

    def noted(self, grid, tensors, *others, **constants):
        launches.append(sum(x.nbytes for x in tensors if x is not None))
        launch(self, grid, tensors, *others, **constants)

    monkeypatch.setattr(Kernel, "__call__", noted)
    parts, columns = packed(name, 1024), FORMATS[name][3]
    for rows, most in ((1, few), (FEW_ROWS + 1, many)):
        launches.clear()
        x = torch.zeros(rows, columns, dtype=torch.bfloat16)
        packed_linear(x, *parts)
        product = 2 * 1024 * columns if rows > FEW_ROWS else 0
        assert len(launches) == 1
        assert (sum(launches) + product) / (1024 * columns) < most


@pytest.mark.parametrize(
    ("columns", "step", "dtype", "reason"),
    [
        (72, 1, torch.float32, "have 8 for a divisor"),
        (192, 2, torch.float32, "in one piece"),
        (96, 1, torch.float64, "writes no torch.float64"),
    ],
)
def test_what_kernels_cannot_read_is_left_to_the_reference(columns, step, dtype, reason):
    codes = torch.ones(5, columns, dtype=torch.int8)[:, ::step]
    inputs = codes, torch.ones(5, 3), None, None, None, dtype
    assert reason in dispatch.OPS["unpack"].refusals(*inputs)["triton"]


def test_rows_next_to_packed_ones_of_experts_are_left_to_the_reference():
    """torch's grouped product takes whole multiples of 16 bytes."""
    x, ends = torch.ones(4, 100).half(), torch.tensor([4], dtype=torch.int32)
    codes, scale = torch.ones(1, 5, 100, dtype=torch.int8), torch.ones(1, 5, 1)
    inputs = x, codes, scale, None, None, torch.ones(1, 2, 100).half(), ends
    refusals = dispatch.OPS["packed_linear"].refusals(*inputs)
    assert "not packed take no multiple of 16 bytes" in refusals["triton"]
