"""Bounds of a model's speed on a device, by its rooflines: first token, prefill, decode."""

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap

from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.tools.roofline import Device, ModelWork

RESTORED = (0, 50, 90, 100)
"""Percent of a prompt that are restored."""
BATCHES = (1, 8, 64)
WIDTH = 80
"""Columns of the printed report."""


@dataclass(frozen=True)
class PrefillRate:
    """The speed of a prompt that is alone on the device."""

    tokens: int
    tokens_per_second: float
    """Speed of a prompt of which nothing is restored."""
    seconds_to_first_token: dict[int, float]
    """Seconds by the percent of the prompt that is restored."""


@dataclass(frozen=True)
class DecodeRate:
    """The speed of a decode step of some requests of the same context."""

    context: int
    batch: int
    seconds: float
    tokens_per_second: float
    """Speed of all requests together."""
    fits: bool
    """Whether the memory holds so many requests."""


@dataclass(frozen=True)
class Rates:
    """Lower bounds of times: see `roofline`."""

    device: Device
    max_tokens: int
    """Most tokens of a forward pass in a prefill."""
    restore_seconds: float
    """Seconds to restore one checkpoint."""
    prefill: list[PrefillRate]
    decode: list[DecodeRate]


def predict(model: ModelWork, device: Device, largest_batches: Mapping[int, int]) -> Rates:
    """Bound the speed of a model on a device.

    Args:
        largest_batches: lengths of prompts and contexts -> how many requests of each length the
            memory holds.
    """
    max_tokens = InferenceConfig.max_tokens

    def prefill(length: int) -> PrefillRate:
        seconds = {}
        for percent in RESTORED:
            works = model.first_token(length, length * percent // 100, max_tokens)
            seconds[percent] = sum(map(device.seconds, works))
        return PrefillRate(length, length / seconds[0], seconds)

    def decode(context: int, batch: int) -> DecodeRate:
        seconds = device.seconds(model.forward([(context, 1)] * batch))
        fits = batch <= largest_batches[context]
        return DecodeRate(context, batch, seconds, batch / seconds, fits)

    return Rates(
        device,
        max_tokens,
        device.seconds(model.restore()),
        [prefill(length) for length in largest_batches],
        [decode(length, batch) for length in largest_batches for batch in BATCHES],
    )


def render_rates(rates: Rates) -> list[str]:
    device, prefill = rates.device, rates.prefill
    lines = wrap(
        f"at best on {device.name}: {device.flops / 1e12:,.0f} TFLOP/s in bf16, "
        f"{device.bandwidth / 1e12:.3g} TB/s ({device.source}). These are bounds by bytes and "
        "FLOPs, not measurements: nothing is faster, and what runs is slower",
        WIDTH,
    )
    lines += ["", _row("a prompt of", [f"{rate.tokens:,} tokens" for rate in prefill])]
    lines.append(_row("prefill, tokens/s", [f"{rate.tokens_per_second:,.0f}" for rate in prefill]))
    for percent in RESTORED:
        times = [duration(rate.seconds_to_first_token[percent]) for rate in prefill]
        lines.append(_row(f"first token, {percent} % restored", times))
    lines += wrap(
        f"(alone, in forward passes of {rates.max_tokens:,} tokens; the copy of a checkpoint takes "
        f"{duration(rates.restore_seconds)} of it)",
        WIDTH,
    )
    lines += ["", _row("a decode step at a context of", [f"{rate.tokens:,}" for rate in prefill])]
    for batch in BATCHES:
        found = [rate for rate in rates.decode if rate.batch == batch]
        marks = ["" if rate.fits else "*" for rate in found]
        times = [mark + duration(rate.seconds) for mark, rate in zip(marks, found)]
        lines.append(_row(f"batch {batch}", times))
        lines.append(_row("  tokens/s", [f"{rate.tokens_per_second:,.0f}" for rate in found]))
    if not all(rate.fits for rate in rates.decode):
        lines.append("* so many requests need more memory than there is")
    return lines


def _row(name: str, cells: list[str]) -> str:
    return f"{name:29}" + "".join(f"{cell:>16}" for cell in cells)


def duration(seconds: float) -> str:
    """Format a time in its largest unit."""
    factor, unit = next(
        (each for each in ((1.0, "s"), (1e-3, "ms")) if seconds >= each[0]), (1e-6, "us")
    )
    return f"{seconds / factor:.{2 if seconds < 10 * factor else 1}f} {unit}"
