"""Each op and backend against its reference, and each config of autotuned kernels by itself.

What is right is the reference in fp32 on the same numbers. Each check is made three times, on
memory that held NaN: the bits have to be the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.autotuned import NoFit, chosen, described, left_out
from benchmarks.gpu.bench import Bench, Row, first_line
from benchmarks.gpu.ops import FAMILIES, Family, Sizes
from megatron_hybrid.ops import RaggedLayout, SlotStates, dispatch
from megatron_hybrid.ops.contracts import FLOATS

BOUNDS = {"bf16": 3e-2, "fp32": 1e-4, "tf32": 1e-2}
"""Largest error, in units of the largest value: bf16 rounds by 2^-9, TF32 by 2^-11, and some sums
are of products that were rounded."""
ODD = {"H": 6, "K": 3, "D": 80, "P": 24, "G": 3, "H_qk": 3, "N": 20, "C": 40}
ODD |= {"E": 5, "k": 3, "h": 40, "f": 24}
"""Sizes that are no powers of two."""
LAYOUTS = {
    "mixed": RaggedLayout((1, 1, 300, 77, 513), (9, 700, 0, 200, 127), (1, 40, 302, 400, 892), 4),
    "decode": RaggedLayout((1,) * 6, (0, 63, 64, 500, 1300, 9000), (2, 4), 2),
    "prefill": RaggedLayout((1000,), (0,), (64, 129, 700, 999)),
}
TOY_LAYOUTS = {
    "mixed": RaggedLayout((1, 1, 40, 7), (9, 70, 0, 21), (1, 20, 45), 3),
    "decode": RaggedLayout((1,) * 3, (0, 15, 90), (2,), 1),
}
SIZES = ("published", "odd", "toy")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REPEATS = 3


@dataclass(frozen=True)
class Check:
    """A check that is not made yet, so that it can be left out where the device did not survive
    it."""

    what: str
    make: Callable[[], Row]


def ops(bench: Bench, op: str | None, dtype: str) -> Iterator[Check]:
    """Checks of all backends, or those of one op, in one of `DTYPES`: published sizes first."""
    layouts = bench.size(LAYOUTS, TOY_LAYOUTS)
    for size in bench.size(SIZES, SIZES[1:]):
        for family, backend in _backends(bench, op):
            for layout in layouts:
                what = f"{family.name}, {size}, {layout}, {dtype}"
                given = sizes_of(family, size), layouts[layout], DTYPES[dtype]
                yield Check(what, partial(_in_simplest, what, bench, family, backend, *given))


def small(bench: Bench) -> Iterator[Check]:
    """Checks for a tool under which all is slow: each backend once."""
    layout = bench.size(LAYOUTS, TOY_LAYOUTS)["mixed"]
    for family, backend in _backends(bench, None):
        given = bench, family, backend, family.toy, layout, torch.bfloat16
        yield Check(family.name, partial(_in_simplest, family.name, *given))


def configs(bench: Bench, op: str | None = None) -> Iterator[Check]:
    """Checks of the autotuned kernels of all ops, or of one: each kernel in each config, all others
    in their simplest one; then in those that are left out on this device."""
    layout = bench.size(LAYOUTS, TOY_LAYOUTS)["mixed"]
    for family, backend in _backends(bench, op):
        sizes = bench.size(family.sizes, family.toy)
        given = bench, family, backend, sizes, layout, torch.bfloat16
        # The check of the op reports what is wrong here.
        with chosen(compiles_all=True) as choice, suppress(Exception):
            compared("", *given)
        for kernel, found in choice.found.items():
            for config in found:
                what = f"{kernel}, {described(config)}"
                yield Check(what, partial(_in_config, kernel, config, what, *given))
        for kernel in choice.found:
            for config in left_out(kernel):
                what = f"{kernel}, {described(config)}"
                yield Check(what, partial(_in_left_out, kernel, config, what, *given))


def _backends(bench: Bench, op: str | None) -> Iterator[tuple[Family, dispatch.Backend]]:
    """Yield those that may serve this device."""
    for family in FAMILIES:
        for backend in dispatch.OPS[family.op].backends:
            is_asked = op in (None, family.op) and backend.missing is None
            if is_asked and backend.device_type in (None, bench.device.type):
                yield family, backend


def _in_simplest(what: str, *given) -> Row:
    with chosen() as choice:
        row = compared(what, *given)
    if row.fault:
        launched = [f"{kernel} {config}" for kernel, config in choice.launched.items()]
        row = replace(row, numbers=row.numbers | {"launched": "; ".join(launched)})
    return row


def _in_config(kernel: str, config, what: str, *given) -> Row:
    with chosen() as choice:
        choice.of[kernel] = config
        try:
            return compared(what, *given)
        except NoFit as error:
            return Row(what, note=f"does not fit: {first_line(error)}")


def _in_left_out(*arguments) -> Row:
    """A config that nobody runs in: that it is wrong is no fault."""
    row = _in_config(*arguments)
    told = f"wrong: {row.fault}" if row.fault else row.note
    return replace(row, note=f"left out; {told}", fault="")


def compared(
    what: str,
    bench: Bench,
    family: Family,
    backend: dispatch.Backend,
    sizes: Sizes,
    layout: RaggedLayout,
    dtype: torch.dtype,
) -> Row:
    """Compare one backend with its op's reference. That it refuses the inputs is a fault where no
    other backend takes them."""
    torch.manual_seed(0)
    inputs = family.inputs(sizes, layout, bench.device, dtype)
    exact = copied(inputs, torch.float32)
    wanted = [dispatch.OPS[family.op].reference(*exact), *state_of(exact)]
    bound = "bf16" if dtype == torch.bfloat16 else "fp32"
    if bound == "fp32" and backend.refusal(*inputs) is not None:
        bound = "tf32"  # it may serve that
    runs = []
    with float32_products("high" if bound == "tf32" else "highest"):
        if (reason := backend.refusal(*inputs)) is not None:
            reasons = dispatch.OPS[family.op].refusals(*inputs)
            alone = [name for name, why in reasons.items() if why is None] == [dispatch.REFERENCE]
            note = f"{backend.name} refused: {reason}"
            return Row(what, note=note, fault=note if alone else "")
        for _ in range(REPEATS):
            own = copied(inputs)
            for states in state_of(own)[1:]:
                states.fill_(math.nan)
            _poison(bench, wanted)
            runs.append([backend.run(*own), *state_of(own)])
    error = max(map(error_of, runs[0], wanted), key=lambda e: (math.isnan(e), e))
    equal = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))
    faults = [] if error <= BOUNDS[bound] else [f"error {error:.2g}, at most {BOUNDS[bound]:g}"]
    if not equal:
        faults.append(f"other bits in {REPEATS} runs")
    if layout in inputs and runs[0][0][layout.num_tokens :].any():
        faults.append("padding rows are not zero")
    return Row(what, numbers={"error": error}, note=backend.name, fault=", ".join(faults))


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Set how torch lets products of float32 be computed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _poison(bench: Bench, like: list[Tensor]) -> None:
    """Leave NaN in free memory of the sizes of these tensors."""
    if bench.is_cuda:
        for tensor in like:
            for dtype in (torch.bfloat16, torch.float32):
                torch.full_like(tensor, math.nan, dtype=dtype)


def sizes_of(family: Family, size: str) -> Sizes:
    """Return sizes of a family, by one of `SIZES`."""
    if size == "odd":
        known = {name: ODD.get(name, value) for name, value in family.toy.items()}
        return known | ({"H_qk": known["H"]} if known.get("per_channel") else {})
    return family.sizes if size == "published" else family.toy


def copied(inputs: tuple, dtype: torch.dtype | None = None) -> tuple:
    """The inputs of an op with states in memory of their own, and all floating-point tensors in a
    dtype, if one is given."""

    def one(value):
        if isinstance(value, SlotStates):
            captured = None if value.captured_n is None else own(value.captured_n)
            return SlotStates(own(value.pool_S), value.slot_ids_R, captured)
        is_float = isinstance(value, Tensor) and value.dtype in FLOATS
        return value.to(dtype or value.dtype) if is_float else value

    def own(tensor: Tensor) -> Tensor:
        return tensor.to(dtype or tensor.dtype, copy=True)

    return tuple(map(one, inputs))


def state_of(inputs: tuple) -> list[Tensor]:
    """Pool and captures of a recurrent op, as they are now."""
    states = next((each for each in inputs if isinstance(each, SlotStates)), None)
    if states is None:
        return []
    return [states.pool_S, *([] if states.captured_n is None else [states.captured_n])]


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest error, in units of the largest value; NaN where there is one."""
    error = (found.float() - expected.float()).abs().max()
    return (error / expected.float().abs().max().clamp(min=1e-3)).item()
