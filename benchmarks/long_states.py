"""`python -m benchmarks.long_states`: the error of recurrent layers over 200,000 tokens.

Each op runs over one sequence in the ways of training and inference, with states in fp32, bf16 and
fp16, and is compared with itself in float64. Heads keep their past for 1 to 100,000 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.plots import drawn
from megatron_hybrid.ops import RaggedLayout
from megatron_hybrid.ops.conv.reference import causal_conv1d
from megatron_hybrid.ops.delta_rule.reference import delta_rule
from megatron_hybrid.ops.selective_scan.reference import selective_scan
from megatron_hybrid.ops.ssd.reference import ssd_scan

TOKENS, SEGMENT = 200_000, 2_000
GRADIENT_TOKENS = 16_000
HEADS, WIDTH = 6, 16
"""Heads, and the width of keys and values; Mamba-1 has as many channels as these have numbers."""
CHANNELS = HEADS * WIDTH
WAYS = {
    "one call": "-",
    "segments, fp32": "--",
    "segments, bf16": "--",
    "segments, fp16": "--",
    "steps, fp32": ":",
    "steps, bf16": ":",
    "steps, fp16": ":",
}
"""How the tokens run, and the dtype of the states between calls; and the line of the plot."""


def rates() -> Tensor:
    """The mean log decay of each head, from 1 to 1e-5 a token."""
    return torch.logspace(0, -5, HEADS, dtype=torch.float64)


@dataclass(frozen=True)
class Kind:
    """One recurrent op."""

    name: str
    state_shape: tuple[int, ...]
    inputs: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    """(tokens, generator) -> flat inputs, float64 that fp32 holds exactly."""
    call: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(inputs, states [R, ...], layout) -> (y, final states, captures)."""
    output_shape: tuple[int, ...] = (HEADS, WIDTH)
    """Of one token."""
    ways: tuple[str, ...] = tuple(WAYS)
    """Those that differ: the tail of a convolution is a copy of its inputs, never rounded."""


def _exact(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.float().double() for tensor in tensors)


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _steps(tokens: int, generator: torch.Generator, *shape: int) -> Tensor:
    """Step sizes of 0.5 to 1.5."""
    return 0.5 + torch.rand(tokens, *shape, generator=generator, dtype=torch.float64)


def _mamba2(tokens: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    x = _randn(generator, tokens, HEADS, WIDTH)
    B, C = (_randn(generator, tokens, 1, WIDTH) for _ in range(2))
    return _exact(x, _steps(tokens, generator, HEADS), B, C)


def _call_mamba2(inputs, states, layout):
    x, dt, B, C = inputs
    return ssd_scan(x, dt, -rates().to(x.dtype), B, C, x.new_zeros(HEADS), states, layout)


def _mamba1(tokens: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    x = _randn(generator, tokens, CHANNELS)
    B, C = (_randn(generator, tokens, WIDTH) for _ in range(2))
    return _exact(x, _steps(tokens, generator, CHANNELS), B, C)


def _call_mamba1(inputs, states, layout):
    x, dt, B, C = inputs
    A_CN = -rates().repeat_interleave(WIDTH)[:, None].expand(CHANNELS, WIDTH).to(x.dtype)
    return selective_scan(x, dt, A_CN, B, C, x.new_zeros(CHANNELS), states, layout)


def _delta(tokens: int, generator: torch.Generator, *decays: int) -> tuple[Tensor, ...]:
    q, k, v = (_randn(generator, tokens, HEADS, WIDTH) for _ in range(3))
    rate = rates().view(HEADS, *[1] * len(decays))
    g = -rate * _steps(tokens, generator, HEADS, *decays)
    return _exact(q, k, v, g, _randn(generator, tokens, HEADS).sigmoid())


def _conv(tokens: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return _exact(_randn(generator, tokens, CHANNELS))


def _call_conv(inputs, states, layout):
    weight = _randn(torch.Generator().manual_seed(1), CHANNELS, 4).to(inputs[0].dtype)
    return causal_conv1d(*inputs, weight, None, states, layout)


KINDS = (
    Kind("Mamba-2", (HEADS, WIDTH, WIDTH), _mamba2, _call_mamba2),
    Kind("Mamba-1", (CHANNELS, WIDTH), _mamba1, _call_mamba1, (CHANNELS,)),
    Kind(
        "GDN",
        (HEADS, WIDTH, WIDTH),
        _delta,
        lambda inputs, states, layout: delta_rule(*inputs, states, layout),
    ),
    Kind(
        "KDA",
        (HEADS, WIDTH, WIDTH),
        lambda tokens, generator: _delta(tokens, generator, WIDTH),
        lambda inputs, states, layout: delta_rule(*inputs, states, layout),
    ),
    Kind(
        "short convolution",
        (CHANNELS, 3),
        _conv,
        _call_conv,
        (CHANNELS,),
        ("one call", "segments, fp32", "steps, fp32"),
    ),
)


@dataclass
class Errors:
    """Relative errors of one op in one way, of the worst head: root mean squares over a segment
    (outputs), or of one state."""

    positions: list[int] = field(default_factory=list)
    """Ends of the segments."""
    outputs: list[float] = field(default_factory=list)
    states: list[float] = field(default_factory=list)
    heads: list[float] = field(default_factory=list)
    """Of the outputs of the last segment, by head."""

    def add(self, position: int, output: Tensor, state: Tensor) -> None:
        self.positions.append(position)
        self.outputs.append(output.max().item())
        self.heads = output.tolist()
        self.states.append(state.max().item())


def _relative(actual: Tensor, exact: Tensor, dim: int) -> Tensor:
    """Return the error of each head, [heads]; `dim` is that of heads, or of channels with as many
    in each."""

    def of_heads(x: Tensor) -> Tensor:
        return x.double().movedim(dim, 0).reshape(HEADS, -1).square().sum(1)

    return (of_heads(actual.double() - exact) / of_heads(exact)).sqrt()


@torch.no_grad()
def measure(kind: Kind, tokens: int = TOKENS, segment: int = SEGMENT) -> dict[str, Errors]:
    """The errors of one op in each of its ways, segment by segment."""
    errors = {way: Errors() for way in kind.ways}
    zeros = torch.zeros(1, *kind.state_shape)
    exact_state = zeros.double()
    states = {way: zeros for way in kind.ways}
    steps = [way for way in kind.ways if way.startswith("steps")]
    whole = _one_call(kind, tokens, segment) if "one call" in kind.ways else None
    for first, inputs in _segments(kind, tokens, segment):
        layout = RaggedLayout((segment,), (first,))
        narrow = [tensor.float() for tensor in inputs]
        exact, exact_state, _ = kind.call(inputs, exact_state, layout)
        found = dict(zip(steps, _step_by_step(kind, narrow, {w: states[w] for w in steps})))
        for way in kind.ways:
            if way == "one call":
                y, state = whole[0][first : first + segment], whole[1][first // segment]
            elif way.startswith("segments"):
                y, state, _ = kind.call(narrow, states[way], layout)
            else:
                y, state = found[way]
            states[way] = _kept(state, way)
            output = _relative(y, exact, 1)
            errors[way].add(first + segment, output, _relative(states[way][0], exact_state[0], 0))
    return errors


def _segments(kind: Kind, tokens: int, segment: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    generator = torch.Generator().manual_seed(0)
    for first in range(0, tokens, segment):
        yield first, kind.inputs(segment, generator)


def _one_call(kind: Kind, tokens: int, segment: int) -> tuple[Tensor, Tensor]:
    """All tokens at once, as in training: the outputs, and the states after each segment."""
    pieces = [[x.float() for x in inputs] for _, inputs in _segments(kind, tokens, segment)]
    inputs = [torch.cat(piece) for piece in zip(*pieces, strict=True)]
    captures = tuple(range(segment, tokens + 1, segment))
    y, _, captured = kind.call(inputs, None, RaggedLayout((tokens,), (0,), captures))
    return y, captured.unsqueeze(1)


def _kept(state: Tensor, way: str) -> Tensor:
    """A state in fp32, rounded to the dtype in which it is kept between calls."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return state.to(dtypes.get(way[-4:], torch.float32)).float()


def _step_by_step(
    kind: Kind, inputs: list[Tensor], states: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """A token at a time, as in decoding, with the states of all ways as rows of a batch: outputs
    and last state of each way."""
    if not states:
        return []
    layout = RaggedLayout((1,) * len(states), (0,) * len(states))
    state, ys = torch.cat(list(states.values())), []
    for token in zip(*(x.split(1) for x in inputs), strict=True):
        row = [x.expand(len(states), *x.shape[1:]).contiguous() for x in token]
        y, state, _ = kind.call(row, state, layout)
        state = torch.cat([_kept(s, way) for s, way in zip(state.split(1), states)])
        ys.append(y)
    return list(zip(torch.stack(ys).unbind(1), state.split(1)))


def gradient_errors(kind: Kind, tokens: int = GRADIENT_TOKENS) -> list[float]:
    """Of one call and its backward pass, as in training: the relative error of the gradient of each
    input, of the worst head or of all of them where an input has none."""
    inputs = kind.inputs(tokens, torch.Generator().manual_seed(0))
    layout = RaggedLayout((tokens,), (0,))
    weights = _exact(_randn(torch.Generator().manual_seed(1), tokens, *kind.output_shape))[0]

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        y, _, _ = kind.call(leaves, None, layout)
        return torch.autograd.grad((y * weights.to(dtype)).sum(), leaves)

    errors = []
    for actual, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        if exact.shape[1] % HEADS:  # B and C, which all heads share
            errors.append(float((actual - exact).norm() / exact.norm()))
        else:
            errors.append(_relative(actual, exact, 1).max().item())
    return errors


def heading(positions: list[int]) -> str:
    """Format the head of the table, 80 columns at most."""
    marks = "".join(f"{positions[i] // 1000:>7}k" for i in _marks(positions))
    return f"{'outputs after this many tokens':32}{marks}{'state':>8}"


def lines(kind: str, ways: dict[str, Errors]) -> Iterator[str]:
    """Format the lines of the table, one for each way."""
    for way, errors in ways.items():
        numbers = [errors.outputs[i] for i in _marks(errors.positions)] + [errors.states[-1]]
        yield _line(f"{kind:18}{way}", numbers)


def _line(what: str, numbers: Iterable[float]) -> str:
    return f"{what:32}" + "".join(f"{number:8.0e}" for number in numbers)


def _marks(positions: list[int]) -> list[int]:
    return [i for i in (0, 4, 24, 49, 99) if i < len(positions)]


def plot(results: dict[str, dict[str, Errors]]) -> None:
    """One panel for each kind that has errors to show, into docs/plots."""
    shown = {kind: ways for kind, ways in results.items() if kind != "short convolution"}
    colours = {"bf16": "#cf4c4c", "fp16": "#d4a72c", "fp32": "#3b82c4"}

    def draw(plt, faint: str):
        figure, panels = plt.subplots(
            1, len(shown), figsize=(7.5, 3), sharey=True, squeeze=False, layout="constrained"
        )
        for panel, (kind, ways) in zip(panels[0], shown.items(), strict=True):
            for way, errors in ways.items():
                colour = colours.get(way[-4:], faint)
                panel.loglog(errors.positions, errors.outputs, WAYS[way], color=colour, label=way)
            panel.set_title(kind)
            panel.set_xlabel("tokens")
            panel.grid(visible=True)
        panels[0, 0].set_ylabel("relative error of the outputs")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
        return figure

    drawn("long_states", draw)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.long_states", description=__doc__)
    parser.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        help=f"Measure up to this many tokens, a multiple of {SEGMENT}.",
    )
    parser.add_argument("--plot", action="store_true", help="Draw the result into docs/plots.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("Relative errors of the worst head, against float64")
    print(heading(list(range(SEGMENT, options.tokens + 1, SEGMENT))))
    results = {}
    for kind in KINDS:
        results[kind.name] = measure(kind, options.tokens)
        print("\n".join(lines(kind.name, results[kind.name])), flush=True)
    memory = "".join(f"{round(1 / rate):8,}" for rate in rates().tolist())
    print(f"\n{'outputs by memory, in tokens':32}{memory}")
    for kind in KINDS:
        for way, errors in results[kind.name].items():
            if way.startswith("steps") and kind.name != "short convolution":
                print(_line(f"{kind.name:18}{way}", errors.heads))
    print(f"\nGradients of one call of {GRADIENT_TOKENS:,} tokens, by input")
    for kind in KINDS:
        print(_line(kind.name, gradient_errors(kind)))
    if options.plot:
        plot(results)


if __name__ == "__main__":
    main()
