"""StatesCodec: recurrent states in one byte per element (state_encoding="int8").

A state is a matrix for each head. Three measures beat rounding to 255 levels:

1. The matrices are close to low rank: leading rank-1 parts are subtracted, in 6-bit factors, while
   they save more bits than they take. Rounding a factor loses nothing: its error stays in the rest.
2. The rest is rounded to multiples of one step, so that its error is the same everywhere, which
   gives the least sum of squares for a number of bits. Between elements, heads and states the steps
   differ by the effect of an error on the outputs: `importance_of`, `_relative_steps`.
3. The integers are entropy-coded (Rice codes, a parameter for each block of 64) in one budget for
   all states: simple ones leave their bits to complex ones. The step is the smallest that fits.

So the states of a model always take the same number of bytes. docs/encodings.md has figures and
alternatives. Shape letters: H heads, N rows, P columns (of any meaning), B blocks of 64 elements, W
words of 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.state_codec.bit_packing import (
    BLOCK,
    from_planes,
    rice_bits,
    rice_pack,
    rice_parameters,
    rice_unpack,
    to_planes,
)

HORIZON_TOKENS = 16
"""Number of next outputs by which the effect of an error in a state is weighed."""
_FACTOR_BITS = 6
_FACTOR_LEVELS = 2 ** (_FACTOR_BITS - 1) - 1
_MOST_LEVELS = 2.0**22
"""The least step, as a part of the largest element, is 1 / this: the precision of fp32."""
_MOST_SPREAD_BITS = 3.5
"""Most bits by which a head counts as smaller than the largest one of its state: 11 times."""
_HEADROOM = 0.125
"""Weighted values are decoded in eighths: weights are 1 to 4, and parts may exceed their sum."""


def importance_of(decay: Tensor) -> Tensor:
    """Number of next outputs that an error of a state element affects: 1 to `HORIZON_TOKENS`.

    Args:
        decay: factor of an element from one token to the next, 0 to 1, any shape.

    Returns:
        The sum of decay^2t over the first 16 tokens t.
    """
    power = decay.square()
    total = torch.ones_like(power)
    for _ in range(HORIZON_TOKENS.bit_length() - 1):
        total = total * (1 + power)  # (1 + x) (1 + x^2) (1 + x^4) ...
        power = power.square()
    return total


class StatesCodec:
    """Encodes the states of all layers of a model together, and decodes them.

    Args:
        shapes: of the states, `[..., N, P]` each; all but the last two dimensions count heads.
        decays: typical factor of each element per token, 0 to 1, broadcastable to `shapes`.
        bytes_per_element: size of encoded states, overheads included, from about 300 elements of
            each on; smaller ones get their overheads in addition.
        max_rank: most rank-1 parts subtracted from a state; None: as many as a tenth of its bytes
            holds.

    Raises:
        ValueError: a shape has fewer than two dimensions or no element, or there are less than two
            bits for an element.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        decays: Sequence[Tensor],
        bytes_per_element: float = 1.0,
        max_rank: int | None = None,
    ):
        if bytes_per_element < 0.25:
            raise ValueError(
                f"bytes_per_element is {bytes_per_element}; the shortest codes have a bit for each "
                "element: use 0.25 or more"
            )
        self._states = [
            _State(*args, bytes_per_element, max_rank) for args in zip(shapes, decays, strict=True)
        ]
        self._num_words = sum(state.num_words for state in self._states)
        self.num_bytes = 8 * self._num_words

    def encode(self, states: Sequence[Tensor]) -> Tensor:
        """The bytes of all states, uint8 `[num_bytes]`.

        A head that holds an inf or a NaN comes back as all NaN; the others are not affected.
        """
        prepared = [_Prepared(*pair) for pair in zip(self._states, states, strict=True)]
        step = _smallest_step(
            [state.levels_B64 for state in prepared],
            self._num_words - sum(state.num_overhead_words for state in prepared),
        )
        words_W = torch.cat([state.pack(step) for state in prepared])
        return F.pad(words_W, (0, self._num_words - len(words_W))).view(torch.uint8)

    def decode(self, code: Tensor) -> list[Tensor]:
        """The states of uint8 `[num_bytes]`, fp32."""
        words_W, states = code.view(torch.int64), []
        for state in self._states:
            decoded, words_W = state.unpack(words_W)
            states.append(decoded)
        return states


class _State:
    """Constants of one state, and the decoder of its words.

    In this order: int32 [number of parts, words of Rice codes], fp32 steps [H] and scales of the
    parts [parts, H], Rice parameters of 4 bits [B], factors of 6 bits [parts, H, N + P], codes.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        decay: Tensor,
        bytes_per_element: float,
        max_rank: int | None,
    ):
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"a state of shape {list(shape)} has no matrices to encode")
        self.shape = tuple(shape)
        heads, rows, columns = math.prod(shape[:-2]), *shape[-2:]
        self.matrices = heads, rows, columns
        self.weights = importance_of(decay.float()).sqrt().reshape(-1, *decay.shape[-2:])
        if max_rank is None:
            max_rank = round(rows * columns / (8 * (rows + columns)))
        self.max_rank = max_rank
        self.num_elements = math.prod(shape)
        self.num_blocks = -(-self.num_elements // BLOCK)
        num_bytes = bytes_per_element * self.num_elements
        least = 7 / 8 * bytes_per_element * self.num_blocks * BLOCK + 8 * sum(self.section_words(0))
        self.num_words = math.ceil(max(num_bytes, least) / 8)  # its share of all words
        # Leave at least a bit for each element of the rest.
        while sum(self.section_words(self.max_rank)) + self.num_blocks > self.num_words:
            self.max_rank -= 1

    def section_words(self, num_parts: int) -> tuple[int, int, int]:
        """Words of the numbers, of the Rice parameters and of the factors."""
        heads, rows, columns = self.matrices
        num_numbers = 2 + heads * (1 + num_parts)
        num_factors = num_parts * heads * (rows + columns)
        return (
            -(-num_numbers // 2),
            -(-self.num_blocks // 16),
            -(-num_factors // BLOCK) * _FACTOR_BITS,
        )

    def blocks(self, x_HNP: Tensor) -> Tensor:
        """`[B, 64]`, zeros behind the last element."""
        padding = BLOCK * self.num_blocks - self.num_elements
        return F.pad(x_HNP.flatten(), (0, padding)).view(-1, BLOCK)

    def unpack(self, words_W: Tensor) -> tuple[Tensor, Tensor]:
        """(state fp32, the words behind it)."""
        heads, rows, columns = self.matrices
        num_parts, num_rice_words = words_W[:1].view(torch.int32).tolist()
        sections = [*self.section_words(num_parts), num_rice_words]
        numbers, nibbles, factors, codes, rest_W = words_W.split(
            [*sections, len(words_W) - sum(sections)]
        )
        scales = numbers[1:].view(torch.float32)[: heads * (1 + num_parts)]
        steps_H11, *scales_H11 = scales.view(-1, heads, 1, 1) * _HEADROOM
        values = rice_unpack(codes, _unpack_nibbles(nibbles)[: self.num_blocks]).flatten()
        values = values[: self.num_elements].view(self.matrices)
        x_HNP = ((values >> 1) ^ -(values & 1)) * steps_H11
        factors = _unpack_factors(factors)[: num_parts * heads * (rows + columns)]
        for factor_HX, scale_H11 in zip(factors.view(-1, heads, rows + columns), scales_H11):
            left_HN1, right_H1P = factor_HX[:, :rows, None], factor_HX[:, None, rows:]
            x_HNP.addcmul_(left_HN1 * scale_H11, right_H1P)
        return (x_HNP / (self.weights * _HEADROOM)).view(self.shape), rest_W


class _Prepared:
    """A state without its leading parts, in levels; only the common step is still to be chosen."""

    def __init__(self, known: _State, state: Tensor):
        x_HNP = state.reshape(known.matrices).float().contiguous()
        peak_H11 = x_HNP.abs().amax((1, 2), keepdim=True)
        finite_H11 = peak_H11.isfinite()
        unit_H11 = torch.where(finite_H11 & (peak_H11 > 0), peak_H11, 1.0)
        # From here on each head is in units of its largest element: nothing can overflow.
        x_HNP = torch.where(finite_H11, x_HNP / unit_H11, 0.0)
        relative_H11 = _relative_steps(x_HNP, unit_H11)
        level_H11 = relative_H11 * torch.where(finite_H11, unit_H11, math.nan)
        levels_HNP = x_HNP * (known.weights / relative_H11)

        rest_HNP, factors, scales = _take_out_leading_parts(known, levels_HNP)
        self._factor_words = _pack_factors(factors, state.device)
        self._scales_H11 = [level_H11 * scale_H11 for scale_H11 in scales]
        self.num_overhead_words = sum(known.section_words(len(factors)))
        # Alone, a state of low rank would get a small step. It gives half of that gain to others,
        # since its layer need not matter more.
        levels_B64 = known.blocks(rest_HNP)
        num_words = known.num_words - self.num_overhead_words
        own = _average_step(levels_B64.abs().mean(-1), num_words).sqrt()
        self._level_H11, self.levels_B64 = level_H11 * own, levels_B64 / own

    def pack(self, step: Tensor) -> Tensor:
        """Its words, int64."""
        values_B64, parameters_B = _integers(self.levels_B64, step)
        num_words = -(-int(rice_bits(values_B64, parameters_B)) // BLOCK)
        scales = torch.cat([self._level_H11 * step, *self._scales_H11]).flatten()
        counts = torch.tensor([len(self._scales_H11), num_words], dtype=torch.int32)
        numbers = torch.cat([counts.to(scales.device), scales.view(torch.int32)])
        return torch.cat(
            [
                F.pad(numbers, (0, len(numbers) % 2)).view(torch.int64),
                _pack_nibbles(parameters_B),
                self._factor_words,
                rice_pack(values_B64, parameters_B, num_words),
            ]
        )


def _relative_steps(x_HNP: Tensor, unit_H11: Tensor) -> Tensor:
    """Steps of the heads of a state in their units, `[H, 1, 1]`.

    Errors are relative to the size of a state, since layers normalise their inputs. Within a state
    a step grows with the square root of a head's rms: half-way between equal errors (best if the
    outputs of heads are summed) and equal relative errors (best if each is normalised). A head's
    step is at most 3.4 times the average, relative to its rms.
    """
    rms_H11 = x_HNP.square().mean((1, 2), keepdim=True).sqrt()
    some_H11 = rms_H11 > 0
    size_H11 = torch.where(some_H11, rms_H11.log2() + unit_H11.log2(), -math.inf)
    bits_H11 = (size_H11 - size_H11.amax()).clamp(min=-_MOST_SPREAD_BITS) / 2
    average = torch.where(some_H11, bits_H11, 0.0).sum() / some_H11.sum().clamp(min=1)
    # On average a head has levels of rms 1, whatever the sizes: no state takes bits from others.
    return torch.where(some_H11, rms_H11 * (average - bits_H11).exp2(), 1.0)


def _take_out_leading_parts(
    known: _State, x_HNP: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Subtract rank-1 parts as long as they save more bits of the rest than they take.

    Returns:
        The rest `[H, N, P]`; for each part its factors, integers -31..31 `[H, N + P]`, and its
        scales `[H, 1, 1]`.
    """
    heads, rows, columns = known.matrices
    cost = _FACTOR_BITS * heads * (rows + columns)
    size, factors, scales = _fine_bits(known.blocks(x_HNP)), [], []
    while len(factors) < known.max_rank:
        # One step of the power method, from the largest row; then the best partner of the rounded
        # left vector. Rounding errors go into the next part and the rest.
        largest_H11 = x_HNP.square().sum(-1, keepdim=True).argmax(1, keepdim=True)
        row_HP1 = x_HNP.gather(1, largest_H11.expand(-1, 1, columns)).mT
        left_HN1, _ = _round_factor(x_HNP @ row_HP1)
        norm_H11 = left_HN1.square().sum(1, keepdim=True).clamp(min=1.0)
        right_H1P, scale_H11 = _round_factor((x_HNP.mT @ left_HN1 / norm_H11).mT)
        rest_HNP = x_HNP.addcmul(left_HN1 * scale_H11, right_H1P, value=-1)
        rest_size = _fine_bits(known.blocks(rest_HNP))
        if size - rest_size < cost:
            break
        x_HNP, size = rest_HNP, rest_size
        factors.append(torch.cat([left_HN1.squeeze(2), right_H1P.squeeze(1)], 1))
        scales.append(scale_H11)
    return x_HNP, factors, scales


def _fine_bits(levels_B64: Tensor) -> float:
    """What a fine step makes of blocks, in bits, up to a constant."""
    means_B = levels_B64.abs().mean(-1)
    return BLOCK * (means_B + means_B.mean() / 256 + 1e-30).log2().sum().item()


def _integers(levels_B64: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """(multiples of the step, 0 -1 1 -2 2 ... as 0 1 2 3 4 ..., int32 `[B, 64]`; their Rice
    parameters int32 `[B]`)."""
    signed = (levels_B64 / step).round_().int()
    values_B64 = (signed << 1).bitwise_xor_(signed.bitwise_right_shift_(31))
    return values_B64, rice_parameters(values_B64)


def _average_step(means_B: Tensor, num_words: int) -> Tensor:
    """The step, fp32 scalar, at which codes of levels with these means fit on average."""
    smallest = means_B.amax().clamp(min=1e-30) / _MOST_LEVELS
    step = smallest
    # Bits fall with the logarithm of the step, ever slower: Newton's method comes from below.
    for _ in range(6):
        ratios_B = 2.8 * means_B / step
        bits = (1 + (1 + ratios_B).log2()).sum() - num_words
        slope = (ratios_B / (1 + ratios_B)).sum()
        step = torch.maximum(step * (bits / slope.clamp(min=1)).exp2(), smallest)
    return step


def _smallest_step(states: list[Tensor], num_words: int) -> Tensor:
    """The step, fp32 scalar, at which the codes of levels `[B, 64]` fit into num_words words."""
    budget = BLOCK * num_words
    step = _average_step(torch.cat([levels_B64.abs().mean(-1) for levels_B64 in states]), num_words)
    peak = torch.stack([levels_B64.abs().amax() for levels_B64 in states]).amax()
    smallest = peak.clamp(min=1e-30) / _MOST_LEVELS
    step = torch.maximum(step, smallest)
    corrected = False
    while True:
        excess, active = -budget, 1
        for levels_B64 in states:
            values_B64, parameters_B = _integers(levels_B64, step)
            excess += -(-int(rice_bits(values_B64, parameters_B)) // BLOCK) * BLOCK
            active += int((parameters_B > 0).sum())
        if excess <= 0 and (corrected or excess > -0.003 * budget):
            return step
        # Not far at once: integers beyond the largest Rice parameter take more than a bit each.
        change = min(max(excess / (BLOCK * active), -20.0), 1.0) + 0.002
        step = torch.maximum(step * 2.0**change, smallest)
        corrected = True


def _round_factor(x: Tensor) -> tuple[Tensor, Tensor]:
    """(multiples -31..31 as floats, scale `[H, 1, 1]`) of the vectors of each head."""
    scale = x.abs().amax((1, 2), keepdim=True).clamp(min=1e-30) / _FACTOR_LEVELS
    return (x / scale).round(), scale


def _pack_factors(factors: list[Tensor], device: torch.device) -> Tensor:
    """Integers -31..31 in six words for each 64 of them."""
    codes = torch.cat([torch.empty(0, device=device), *(f.flatten() for f in factors)])
    codes = codes.int() + _FACTOR_LEVELS
    codes = F.pad(codes, (0, -len(codes) % BLOCK)).view(-1, BLOCK)
    return to_planes(codes)[:, :_FACTOR_BITS].flatten()


def _unpack_factors(words_W: Tensor) -> Tensor:
    planes = F.pad(words_W.view(-1, _FACTOR_BITS), (0, 16 - _FACTOR_BITS))
    return (from_planes(planes) - _FACTOR_LEVELS).flatten().float()


def _pack_nibbles(values: Tensor) -> Tensor:
    """Integers of 4 bits, sixteen to a word."""
    pairs = F.pad(values, (0, -len(values) % 16)).to(torch.uint8).view(-1, 2)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).view(torch.int64)


def _unpack_nibbles(words_W: Tensor) -> Tensor:
    packed = words_W.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten().int()
