"""Packed weights as numbers: every code of every format, against float64."""

import itertools

import pytest
import torch

from megatron_hybrid.ops import packed_linear, unpack
from megatron_hybrid.ops.packed import format_of

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def e4m3(byte: int) -> float:
    """OCP 8-bit floating point, table 1: no infinities, one NaN for each sign."""
    sign, exponent, fraction = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def e2m1(code: int) -> float:
    """OCP microscaling formats, table 5."""
    sign, exponent, fraction = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    magnitude = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return sign * magnitude


def nibbles(value) -> list[float]:
    return [value(half) for byte in range(256) for half in (byte & 15, byte >> 4)]


VALUES = {
    "fp8": (E4M3, torch.float32, [e4m3(byte) for byte in range(256)]),
    "int8": (torch.int8, torch.bfloat16, [(byte ^ 128) - 128.0 for byte in range(256)]),
    "int4": (torch.uint8, torch.bfloat16, nibbles(lambda code: code - 8.0)),
    "fp4": (torch.uint8, E4M3, nibbles(e2m1)),
}


@pytest.mark.parametrize("name", VALUES)
def test_every_code_stands_for_its_published_number(name):
    codes, scale, values = VALUES[name]
    assert format_of(codes, scale).name == name
    ones = torch.ones(1, 1).to(scale)
    found = unpack(ALL_BYTES.view(codes)[None], ones, dtype=torch.float32)
    expected = torch.tensor([values])
    is_number = ~expected.isnan()
    assert torch.equal(found[is_number], expected[is_number])


def test_exponents_of_microscaling_are_powers_of_two():
    codes = torch.tensor([[0x22]], dtype=torch.uint8)  # 1, 1
    for byte in (0, 1, 126, 127, 128, 254):
        scale = torch.tensor([[byte]], dtype=torch.uint8).view(E8M0)
        assert unpack(codes, scale, dtype=torch.float64)[0, 0].item() == 2.0 ** (byte - 127)


@pytest.mark.parametrize(
    ("codes", "scale", "outer", "zero"),
    [
        (E4M3, torch.float32, False, False),
        (E4M3, E8M0, False, False),
        (torch.int8, torch.float16, False, True),
        (torch.uint8, torch.bfloat16, False, True),
        (torch.uint8, E4M3, True, False),
    ],
)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_groups_scales_and_rest_follow_the_formula(codes, scale, outer, zero, lead):
    generator = torch.Generator().manual_seed(1)
    rows, groups, width = 5, 3, 8
    stored = torch.randint(0, 120, (*lead, rows, groups * width), generator=generator)
    stored = stored.to(torch.uint8).view(codes)
    bits = format_of(codes, scale).bits
    per_group = width * 8 // bits
    scales = (torch.rand(*lead, rows, groups, generator=generator) + 0.5).to(scale)
    outers = torch.rand(*lead, rows, 1, generator=generator) if outer else None
    zeros = torch.randint(-8, 8, (*lead, rows, groups), generator=generator).to(torch.int8)
    zeros = zeros if zero else None
    rest = torch.randn(*lead, 2, groups * per_group, generator=generator).bfloat16()
    found = unpack(stored, scales, outers, zeros, rest)
    plain = unpack(stored, torch.ones(*lead, rows, 1).to(scale), dtype=torch.float64)
    for *where, row, column in itertools.product(*map(range, (*lead, rows, groups * per_group))):
        at = (*where, row, column // per_group)
        value = plain[(*where, row, column)].item() - (zeros[at].item() if zero else 0)
        value *= scales[at].double().item() * (outers[(*where, row, 0)].item() if outer else 1)
        error = abs(found[(*where, row, column)].item() - value)
        assert error <= abs(value) * (2.0**-8 + 2.0**-22)  # half a step of bfloat16
    assert torch.equal(found[..., rows:, :], rest)
    if not lead:
        x = torch.randn(4, groups * per_group, generator=generator).bfloat16()
        expected = torch.nn.functional.linear(x, found)
        assert torch.equal(packed_linear(x, stored, scales, outers, zeros, rest), expected)
