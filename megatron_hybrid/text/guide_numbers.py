"""Grammars of JSON numbers between bounds."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext

from megatron_hybrid.text.guide_grammar import (
    EMPTY,
    NOTHING,
    Chars,
    Node,
    Repeat,
    alt,
    among,
    optional,
    seq,
    text,
)

MAX_DIGITS = 32
"""Most digits before and behind the point of a number without a bound there. Without a limit a
model may write nothing else until its answer is full."""
_FRACTION_DIGITS = 20
"""Most digits behind the point of a number between bounds, these included."""
_LEAST_STEP = Decimal("1e-15")
"""From an exclusive bound to the first number beside it."""

_DIGIT = Chars(among("0123456789"))
_TO_NINE = Chars(among("123456789"))
_WHOLE = alt([text("0"), seq(_TO_NINE, Repeat(_DIGIT, 0, MAX_DIGITS - 1))])
ANY_INTEGER = seq(optional(text("-")), _WHOLE)
ANY_NUMBER = seq(
    ANY_INTEGER,
    optional(seq(".", Repeat(_DIGIT, 1, MAX_DIGITS))),
    optional(seq(Chars(among("eE")), optional(Chars(among("+-"))), Repeat(_DIGIT, 1, 2))),
)

Bound = int | float


def integers(
    minimum: Bound | None, maximum: Bound | None, above: Bound | None, below: Bound | None
) -> Node:
    """Those >= minimum, <= maximum, > above and < below."""
    lows = [math.ceil(minimum)] if minimum is not None else []
    lows += [math.floor(above) + 1] if above is not None else []
    highs = [math.floor(maximum)] if maximum is not None else []
    highs += [math.ceil(below) - 1] if below is not None else []
    if not lows and not highs:
        return ANY_INTEGER
    largest = _largest([*lows, *highs])
    low, high = max(lows, default=-largest), min(highs, default=largest)
    return alt(
        [
            seq("-", _naturals(max(1, -high), -low)),
            _naturals(max(0, low), high),
        ]
    )


def numbers(
    minimum: Bound | None, maximum: Bound | None, above: Bound | None, below: Bound | None
) -> Node:
    """Decimal numbers >= minimum, <= maximum, > above and < below. Those with a bound have no
    exponent."""
    lows = [_rounded(minimum, 1, 0)] if minimum is not None else []
    lows += [_rounded(above, 1, 1)] if above is not None else []
    highs = [_rounded(maximum, -1, 0)] if maximum is not None else []
    highs += [_rounded(below, -1, 1)] if below is not None else []
    if not lows and not highs:
        return ANY_NUMBER
    largest = Decimal(_largest([*lows, *highs]))
    low, high = max(lows, default=-largest), min(highs, default=largest)
    zero = Decimal(0)
    return alt(
        [
            seq("-", _decimals(max(zero, -high), -low)) if low < 0 else NOTHING,
            _decimals(max(zero, low), high),
        ]
    )


def _largest(bounds: list) -> int:
    """The largest number where there is no bound."""
    return 10 ** max(MAX_DIGITS, *(len(str(int(abs(bound)))) for bound in bounds)) - 1


def _rounded(bound: Bound, sign: int, step: int) -> Decimal:
    """The first decimal number that readers take for one inside of a bound.

    They may round a decimal number to the nearest double. Rounding keeps the order, so it is enough
    to begin at a double inside of the bound.

    Args:
        sign: 1 for a lower bound, -1 for an upper one.
        step: 0: the bound itself is inside; 1: it is not.
    """
    double = float(bound)
    if (double - bound if isinstance(bound, float) else int(double) - bound) * sign < 0:
        double = math.nextafter(double, sign * math.inf)
    with localcontext(prec=1000):
        decimal = Decimal(repr(double))
        if step:
            beside = Decimal(repr(math.nextafter(double, sign * math.inf)))
            decimal = sign * max(sign * beside, sign * decimal + _LEAST_STEP)
        rounding = ROUND_CEILING if sign > 0 else ROUND_FLOOR
        return decimal.quantize(Decimal(1).scaleb(-_FRACTION_DIGITS), rounding)


def _naturals(low: int, high: int) -> Node:
    """Integers from low to high, both >= 0."""
    if low > high:
        return NOTHING
    first, last = str(low), str(high)
    if len(first) == len(last):
        return _same_length(first, last)
    between = NOTHING
    if len(last) > len(first) + 1:
        between = seq(_TO_NINE, Repeat(_DIGIT, len(first), len(last) - 2))
    return alt(
        [
            _same_length(first, "9" * len(first)),
            between,
            _same_length("1" + "0" * (len(last) - 1), last),
        ]
    )


def _same_length(low: str, high: str) -> Node:
    """Numbers from low to high, as so many digits."""
    size = len(low)
    if low == "0" * size and high == "9" * size:
        return Repeat(_DIGIT, size, size)
    if low[0] == high[0]:
        return seq(low[0], _same_length(low[1:], high[1:])) if size > 1 else text(low)
    return alt(
        [
            seq(low[0], _same_length(low[1:], "9" * (size - 1))),
            _between(int(low[0]), int(high[0]), Repeat(_DIGIT, size - 1, size - 1)),
            seq(high[0], _same_length("0" * (size - 1), high[1:])),
        ]
    )


def _between(low: int, high: int, rest: Node) -> Node:
    """A digit between others, then the rest."""
    digits = "0123456789"[low + 1 : high]
    return seq(Chars(among(digits)), rest) if digits else NOTHING


def _decimals(low: Decimal, high: Decimal) -> Node:
    """Numbers from low to high, both >= 0."""
    if low > high:
        return NOTHING
    first, last = int(low), int(high)
    start, end = _fraction_of(low), _fraction_of(high)
    if first == last:
        return seq(str(first), _fractions(start, end))
    return alt(
        [
            seq(str(first), _fractions(start, None)),
            seq(_naturals(first + 1, last - 1), _fractions("", None)),
            seq(str(last), _fractions("", end)),
        ]
    )


def _fraction_of(number: Decimal) -> str:
    """Its digits behind the point."""
    return f"{number:f}".partition(".")[2].rstrip("0")


def _fractions(low: str, high: str | None) -> Node:
    """What may stand behind an integer: nothing, or a point and digits from low to high; None:
    without an upper bound."""
    digits = seq(".", _digits(low, high, _FRACTION_DIGITS, may_end=False))
    return digits if low else optional(digits)


def _digits(low: str, high: str | None, room: int, may_end: bool = True) -> Node:
    """Up to `room` digits, as a fraction from low to high."""
    if not low and high is None:
        return Repeat(_DIGIT, 0 if may_end else 1, room)
    if room == 0:
        return NOTHING if low else EMPTY
    first = int(low[:1] or 0)
    last = 9 if high is None else int(high[:1] or 0)
    low_rest, high_rest = low[1:], None if high is None else high[1:]
    options: list[Node] = [EMPTY] if may_end and not low else []
    if first == last:
        options.append(seq(str(first), _digits(low_rest, high_rest, room - 1)))
    elif first < last:
        options += [
            seq(str(first), _digits(low_rest, None, room - 1)),
            _between(first, last, Repeat(_DIGIT, 0, room - 1)),
            seq(str(last), _digits("", high_rest, room - 1)),
        ]
    return alt(options)
