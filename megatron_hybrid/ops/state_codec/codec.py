"""StatesCodec: recurrent states in one byte per element (state_encoding="int8").

A state is a matrix for each head. Three measures beat rounding to 255 levels:

1. The matrices are close to low rank: leading rank-1 parts are subtracted, in 6-bit factors, while
   they save more bits than they take. Rounding a factor loses nothing: its error stays in the rest.
2. The rest is rounded to multiples of one step, so that its error is the same everywhere, which
   gives the least sum of squares for a number of bits. Between elements, heads and states the steps
   differ by the effect of an error on the outputs: `importance_of`, `_relative_steps`.
3. The integers are entropy-coded (Rice codes, a parameter for each block of 64) in one budget for
   all states: simple ones leave their bits to complex ones. The step is the smallest that fits.

So the states of a model always take the same number of bytes. docs/how/encodings.md says why,
docs/measured/accuracy.md has figures and alternatives. On a GPU neither shapes nor loops depend on
values, so that nothing waits for it.
Shape letters: S states, H heads, N rows, P columns (of any meaning), B blocks of 64 elements, W
words of 64 bits, K of them with streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_hybrid.ops.state_codec.bit_packing import (
    BLOCK,
    from_planes,
    positions_of_ones,
    rice_bits,
    rice_pack,
    rice_parameters,
    rice_unpack,
    to_planes,
)
from megatron_hybrid.ops.to_device import to_device

HORIZON_TOKENS = 16
"""Number of next outputs by which the effect of an error in a state is weighed."""
_FACTOR_BITS = 6
_FACTOR_LEVELS = 2 ** (_FACTOR_BITS - 1) - 1
_MOST_LEVELS = 2.0**22
"""The least step, as a part of the largest element, is 1 / this: the precision of fp32."""
_MOST_TRIALS = 10
"""Steps to try: 1 to 3 are enough, unless a few elements are far larger than all others."""
_MOST_SPREAD_BITS = 3.5
"""Most bits by which a head counts as smaller than the largest one of its state: 11 times."""
_HEADROOM = 0.125
"""Weighted values are decoded in eighths: weights are 1 to 4, and parts may exceed their sum."""


def importance_of(decay: Tensor) -> Tensor:
    """Count the next outputs that an error of a state element affects: 1 to `HORIZON_TOKENS`.

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
        max_rank: most rank-1 parts subtracted from a state; None means as many as a tenth of its
            bytes holds.

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
        self._counts = [state.num_blocks for state in self._states]
        self._blocks: dict[torch.device, _Blocks] = {}
        self._most_stream_words = self._num_words - sum(
            sum(state.section_words(0)) for state in self._states
        )

    def _blocks_on(self, device: torch.device) -> _Blocks:
        if device not in self._blocks:
            self._blocks[device] = _Blocks(self._counts, device)
        return self._blocks[device]

    def encode(self, states: Sequence[Tensor]) -> Tensor:
        """Return the bytes of all states, uint8 `[num_bytes]`.

        A head that holds an inf or a NaN comes back as all NaN; the others are not affected.
        """
        prepared = [_Prepared(*pair) for pair in zip(self._states, states, strict=True)]
        blocks = self._blocks_on(states[0].device)
        levels = [state.levels_B64 for state in prepared]
        if not _is_free_to_read(levels[0]):  # a GPU: all in one, for few launches
            levels = [torch.cat(levels)]
        overheads_S = torch.stack([state.num_overhead_words for state in prepared])
        step = _smallest_step(levels, blocks, self._num_words - overheads_S.sum())

        integers = [_integers(levels_B64, step) for levels_B64 in levels]
        parameters_B = torch.cat([parameters_B for _, parameters_B in integers])
        bits_B = torch.cat([rice_bits(*each) for each in integers])
        num_rice_words_S = _words(blocks.sums(bits_B))
        firsts_S = _before(overheads_S + num_rice_words_S)
        words_W = firsts_S.new_zeros(self._num_words + 1)  # the last one is lost
        own = zip(prepared, firsts_S, num_rice_words_S, parameters_B.split(self._counts))
        for state, first, num_rice_words, parameters in own:
            state.write(words_W, first, step, num_rice_words, parameters)
        planes_S = firsts_S + overheads_S
        streams_S = BLOCK * (planes_S + blocks.sums(parameters_B))
        places = (
            blocks.offsets(parameters_B, planes_S),
            blocks.offsets(bits_B - BLOCK * parameters_B, streams_S),
        )
        sizes = [len(values_B64) for values_B64, _ in integers]
        for each, *own in zip(integers, *(x_B.split(sizes) for x_B in places), strict=True):
            rice_pack(words_W, *each, *own)
        return words_W[:-1].view(torch.uint8)

    def decode(self, code: Tensor) -> list[Tensor]:
        """Return the states of uint8 `[num_bytes]`, fp32."""
        words_W = code.view(torch.int64)
        blocks = self._blocks_on(code.device)
        read, first = [], words_W.new_zeros(())
        for known in self._states:
            read.append(_Sections(known, words_W, first))
            first = read[-1].codes + read[-1].num_rice_words
        parameters_B = torch.cat([sections.parameters_B for sections in read])
        planes_S = torch.stack([sections.codes for sections in read])
        num_planes_S = blocks.sums(parameters_B)
        sizes_S = torch.stack([sections.num_rice_words for sections in read]) - num_planes_S
        sizes_S.clamp_(min=0)

        # The streams of all states one after the other.
        ends_S, before_S = sizes_S.cumsum(0), _before(sizes_S)
        size = self._most_stream_words
        if _is_free_to_read(ends_S):
            size = min(size, int(ends_S[-1]))
        numbers_K = torch.arange(size, device=code.device)
        owners_K = torch.searchsorted(ends_S, numbers_K, right=True).clamp_(max=len(read) - 1)
        places_K = numbers_K + (planes_S + num_planes_S - before_S)[owners_K]
        stream_K = words_W[places_K.clamp_(max=len(words_W) - 1)]
        stream_K.masked_fill_(numbers_K >= ends_S[-1], 0)
        ones_B64 = positions_of_ones(stream_K, BLOCK * len(parameters_B)).view(-1, BLOCK)
        streams_B = ones_B64[:, -1].roll(1).add_(1)
        streams_B.index_copy_(0, blocks.firsts_S, BLOCK * before_S)

        planes_B = blocks.offsets(parameters_B, planes_S)
        sizes = self._counts if _is_free_to_read(words_W) else [len(parameters_B)]
        parts = zip(*(x_B.split(sizes) for x_B in (parameters_B, planes_B, streams_B, ones_B64)))
        values_B64 = [rice_unpack(words_W, *part) for part in parts]
        if len(sizes) < len(read):
            values_B64 = values_B64[0].split(self._counts)
        return [sections.state(own) for sections, own in zip(read, values_B64, strict=True)]


class _Blocks:
    """The blocks of all states, on one device.

    Args:
        counts: of each state, at least 1.
    """

    def __init__(self, counts: list[int], device: torch.device):
        self._owners_B = to_device(np.repeat(np.arange(len(counts)), counts), device)
        self.firsts_S = to_device(np.cumsum([0, *counts[:-1]]), device)
        """int64; the first block of each state."""

    def sums(self, numbers_B: Tensor) -> Tensor:
        """Sum integers over the blocks of each state, int64 `[S]`."""
        numbers_B = numbers_B.long()
        return numbers_B.new_zeros(len(self.firsts_S)).index_add_(0, self._owners_B, numbers_B)

    def offsets(self, sizes_B: Tensor, starts_S: Tensor) -> Tensor:
        """Find where blocks begin, int64 `[B]`, if those of each state lie one after the other."""
        before_B = _before(sizes_B)
        return before_B + (starts_S - before_B[self.firsts_S])[self._owners_B]


def _before(sizes: Tensor) -> Tensor:
    """Sum all integers before each, int64."""
    return sizes.cumsum(0, dtype=torch.int64) - sizes


def _words(bits: Tensor) -> Tensor:
    """Count the words that hold so many bits."""
    return -(-bits // BLOCK)


def _is_free_to_read(tensor: Tensor) -> bool:
    """Return whether values can be read without a wait. Then loops end where their results do not
    change any more, and buffers have the size that is used."""
    return tensor.device.type == "cpu"


class _State:
    """Constants of one state.

    Its words, in this order: int32 [number of parts, words of Rice codes], fp32 steps [H] and
    scales of the parts [parts, H], Rice parameters of 4 bits [B], factors of 6 bits [parts, H,
    N + P], codes.
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
        """Count the words of the numbers, of the Rice parameters and of the factors."""
        heads, rows, columns = self.matrices
        num_numbers = 2 + heads * (1 + num_parts)
        num_factors = num_parts * heads * (rows + columns)
        return (
            -(-num_numbers // 2),
            -(-self.num_blocks // 16),
            -(-num_factors // BLOCK) * _FACTOR_BITS,
        )

    def blocks(self, x_HNP: Tensor) -> Tensor:
        """Split values into blocks `[B, 64]`, with zeros after the last element."""
        padding = BLOCK * self.num_blocks - self.num_elements
        return F.pad(x_HNP.flatten(), (0, padding)).view(-1, BLOCK)


class _Sections:
    """The words of a state, without its codes.

    Args:
        known: the state.
        words_W: of all states.
        first: its first word, int64 scalar.
    """

    def __init__(self, known: _State, words_W: Tensor, first: Tensor):
        heads, rows, columns = known.matrices
        self._known = known
        num_parts, num_rice_words = _some(words_W, first, 1).view(torch.int32).long()
        # Words of any content are decoded to something, without an index out of range.
        num_parts = num_parts.clamp(0, known.max_rank)
        self.num_rice_words = num_rice_words.clamp(0, len(words_W))
        self._most_parts = int(num_parts) if _is_free_to_read(first) else known.max_rank
        sizes = known.section_words(num_parts)
        _, nibbles, factors, self.codes = (first + size for size in accumulate(sizes, initial=0))
        """`codes`: the word after them, int64 scalar."""
        most_numbers, num_nibbles, most_factors = known.section_words(self._most_parts)
        numbers = _some(words_W, first, most_numbers)[1:].view(torch.float32)
        scales = numbers[: heads * (1 + self._most_parts)].view(-1, heads, 1, 1)
        present = torch.arange(len(scales), device=first.device) <= num_parts
        self._scales = torch.where(present.view(-1, 1, 1, 1), scales, 0.0) * _HEADROOM
        self.parameters_B = _unpack_nibbles(_some(words_W, nibbles, num_nibbles))
        self.parameters_B = self.parameters_B[: known.num_blocks]
        codes = _unpack_factors(_some(words_W, factors, most_factors))
        self._factors = codes[: self._most_parts * heads * (rows + columns)]

    def state(self, values_B64: Tensor) -> Tensor:
        """Return the state, fp32, of its integers."""
        known = self._known
        heads, rows, columns = known.matrices
        steps_H11, *scales_H11 = self._scales
        values = values_B64.flatten()[: known.num_elements].view(known.matrices)
        x_HNP = ((values >> 1) ^ -(values & 1)) * steps_H11
        factors_HX = self._factors.view(-1, heads, rows + columns)
        for factor_HX, scale_H11 in zip(factors_HX, scales_H11, strict=True):
            left_HN1, right_H1P = factor_HX[:, :rows, None], factor_HX[:, None, rows:]
            x_HNP.addcmul_(left_HN1 * scale_H11, right_H1P)
        return (x_HNP / (known.weights * _HEADROOM)).view(known.shape)


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

        rest_HNP, self._factors, scales, self._num_parts = _take_out_leading_parts(
            known, levels_HNP
        )
        self._known = known
        self._scales_H11 = [level_H11 * scale_H11 for scale_H11 in scales]
        self._section_words = known.section_words(self._num_parts)
        self.num_overhead_words = sum(self._section_words)
        # Alone, a state of low rank would get a small step. It gives half of that gain to others,
        # since its layer need not matter more.
        levels_B64 = known.blocks(rest_HNP)
        num_words = known.num_words - self.num_overhead_words
        own = _average_step(levels_B64.abs().mean(-1), num_words).sqrt()
        self._level_H11, self.levels_B64 = level_H11 * own, levels_B64 / own

    def write(
        self,
        words_W: Tensor,
        first: Tensor,
        step: Tensor,
        num_rice_words: Tensor,
        parameters_B: Tensor,
    ) -> None:
        """Write all but its codes from a word on."""
        scales = torch.cat([self._level_H11 * step, *self._scales_H11]).flatten()
        counts = torch.stack([self._num_parts, num_rice_words]).int()
        numbers = torch.cat([counts, scales.view(torch.int32)])
        # An odd one has a zero next to it, not the scale of a part that is not there.
        used = 2 + len(self._level_H11) * (1 + self._num_parts)
        numbers.masked_fill_(torch.arange(len(numbers), device=first.device) >= used, 0)
        sections = (
            F.pad(numbers, (0, len(numbers) % 2)).view(torch.int64),
            _pack_nibbles(parameters_B),
            _pack_factors(self._factors, self._num_parts, first.device),
        )
        for section, size in zip(sections, self._section_words, strict=True):
            numbers_n = torch.arange(len(section), device=first.device)
            places_n = torch.where(numbers_n < size, first + numbers_n, len(words_W) - 1)
            words_W.scatter_(0, places_n, section)
            first = first + size


def _relative_steps(x_HNP: Tensor, unit_H11: Tensor) -> Tensor:
    """Compute the steps of the heads of a state in their units, `[H, 1, 1]`.

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
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """Subtract rank-1 parts as long as they save more bits of the rest than they take.

    Returns:
        The rest `[H, N, P]`; for each part its factors, integers -31..31 `[H, N + P]`, and its
        scales `[H, 1, 1]`; the number of parts, int64 scalar: those after them count for nothing.
    """
    heads, rows, columns = known.matrices
    cost = _FACTOR_BITS * heads * (rows + columns)
    size, factors, scales = _fine_bits(known.blocks(x_HNP)), [], []
    goes_on = torch.ones((), dtype=torch.bool, device=x_HNP.device)
    num_parts = goes_on.new_zeros((), dtype=torch.int64)
    for _ in range(known.max_rank):
        # One step of the power method, from the largest row; then the best partner of the rounded
        # left vector. Rounding errors go into the next part and the rest.
        largest_H11 = x_HNP.square().sum(-1, keepdim=True).argmax(1, keepdim=True)
        row_HP1 = x_HNP.gather(1, largest_H11.expand(-1, 1, columns)).mT
        left_HN1, _ = _round_factor(x_HNP @ row_HP1)
        norm_H11 = left_HN1.square().sum(1, keepdim=True).clamp(min=1.0)
        right_H1P, scale_H11 = _round_factor((x_HNP.mT @ left_HN1 / norm_H11).mT)
        rest_HNP = x_HNP.addcmul(left_HN1 * scale_H11, right_H1P, value=-1)
        rest_size = _fine_bits(known.blocks(rest_HNP))
        goes_on = goes_on & (size - rest_size >= cost)
        if _is_free_to_read(goes_on) and not goes_on:
            break
        x_HNP, size = torch.where(goes_on, rest_HNP, x_HNP), rest_size
        factors.append(torch.cat([left_HN1.squeeze(2), right_H1P.squeeze(1)], 1))
        scales.append(scale_H11)
        num_parts = num_parts + goes_on
    return x_HNP, factors, scales, num_parts


def _fine_bits(levels_B64: Tensor) -> Tensor:
    """Return what a fine step makes of blocks, in bits, up to a constant; float64 scalar."""
    means_B = levels_B64.abs().mean(-1)
    return BLOCK * (means_B + means_B.mean() / 256 + 1e-30).log2().sum().double()


def _integers(levels_B64: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return (multiples of the step, 0 -1 1 -2 2 ... as 0 1 2 3 4 ..., int32 `[B, 64]`; their Rice
    parameters int32 `[B]`)."""
    signed = (levels_B64 / step).round_().int()
    values_B64 = (signed << 1).bitwise_xor_(signed.bitwise_right_shift_(31))
    return values_B64, rice_parameters(values_B64)


def _average_step(means_B: Tensor, num_words: Tensor) -> Tensor:
    """Find the step, fp32 scalar, at which codes of levels with these means fit on average."""
    smallest = means_B.amax().clamp(min=1e-30) / _MOST_LEVELS
    step = smallest
    # Bits fall with the logarithm of the step, ever slower: Newton's method comes from below.
    for _ in range(6):
        ratios_B = 2.8 * means_B / step
        bits = (1 + (1 + ratios_B).log2()).sum() - num_words
        slope = (ratios_B / (1 + ratios_B)).sum()
        step = torch.maximum(step * (bits / slope.clamp(min=1)).exp2(), smallest)
    return step


def _smallest_step(levels: list[Tensor], blocks: _Blocks, num_words: Tensor) -> Tensor:
    """Find the least step, fp32 scalar, whose codes of levels `[B, 64]` fit into num_words."""
    budget = BLOCK * num_words
    step = _average_step(torch.cat([each.abs().mean(-1) for each in levels]), num_words)
    peak = torch.stack([each.abs().amax() for each in levels]).amax().clamp(min=1e-30)
    smallest = peak / _MOST_LEVELS
    step = torch.maximum(step, smallest)
    fitting = 4 * peak  # all integers are 0: a bit for each of them
    found = is_near = torch.zeros((), dtype=torch.bool, device=step.device)
    for _ in range(_MOST_TRIALS):
        integers = [_integers(levels_B64, step) for levels_B64 in levels]
        bits_B = torch.cat([rice_bits(*each) for each in integers])
        excess = BLOCK * _words(blocks.sums(bits_B)).sum() - budget
        fits = excess <= 0
        fitting = torch.where(fits & ~found, torch.minimum(fitting, step), fitting)
        found = found | (fits & (is_near | (excess > -0.003 * budget) | (step == smallest)))
        if _is_free_to_read(found) and found:
            break
        active = 1 + sum((parameters_B > 0).sum() for _, parameters_B in integers)
        change = excess / (BLOCK * active).double()
        # Not far at once: integers beyond the largest Rice parameter take more than a bit each.
        is_near = change.abs() <= 1
        trial = step * (change.clamp(min=-20.0) + 0.002).exp2().float()
        trial = torch.where(change > 1, (step * fitting).sqrt(), trial)
        step = torch.maximum(trial, smallest)
    return fitting


def _round_factor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round the vectors of each head: (multiples -31..31 as floats, scale `[H, 1, 1]`)."""
    scale = x.abs().amax((1, 2), keepdim=True).clamp(min=1e-30) / _FACTOR_LEVELS
    return (x / scale).round(), scale


def _pack_factors(factors: list[Tensor], num_parts: Tensor, device: torch.device) -> Tensor:
    """Pack integers -31..31 in six words for each 64 of them; zeros after those of `num_parts`."""
    codes = torch.cat([torch.empty(0, device=device), *(f.flatten() for f in factors)])
    codes = codes.int() + _FACTOR_LEVELS
    if factors:
        used = num_parts * factors[0].numel()
        codes.masked_fill_(torch.arange(len(codes), device=device) >= used, 0)
    codes = F.pad(codes, (0, -len(codes) % BLOCK)).view(-1, BLOCK)
    return to_planes(codes)[:, :_FACTOR_BITS].flatten()


def _unpack_factors(words_W: Tensor) -> Tensor:
    planes = F.pad(words_W.view(-1, _FACTOR_BITS), (0, 16 - _FACTOR_BITS))
    return (from_planes(planes) - _FACTOR_LEVELS).flatten().float()


def _pack_nibbles(values: Tensor) -> Tensor:
    """Pack integers of 4 bits, sixteen to a word."""
    pairs = F.pad(values, (0, -len(values) % 16)).to(torch.uint8).view(-1, 2)
    return (pairs[:, 0] | (pairs[:, 1] << 4)).view(torch.int64)


def _unpack_nibbles(words_W: Tensor) -> Tensor:
    packed = words_W.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten().int()


def _some(words_W: Tensor, first: Tensor, count: int) -> Tensor:
    """Return `count` words from a word on; after the last one, any."""
    places = first + torch.arange(count, device=first.device)
    return words_W[places.clamp_(max=len(words_W) - 1)]
