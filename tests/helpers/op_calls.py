"""A small call of every op, and the calls that differ from it by one in one size."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from megatron_hybrid.ops import AttentionPattern, RaggedLayout, SlotStates
from megatron_hybrid.ops.dispatch import OPS

DECODES = RaggedLayout((1, 1, 1), (5, 6, 7), (1, 3))
MIXED = RaggedLayout((1, 1, 5, 3), (5, 6, 0, 9), (1, 4, 8), num_padding=2)
DRAFTS = RaggedLayout((2, 1), (5, 9), (1,), num_decodes=1)
LAYOUTS = {"decodes": DECODES, "mixed": MIXED, "drafts": DRAFTS}

H, G, N, P, C, K = 4, 2, 16, 16, 8, 4
SLOTS, EXPERTS, ROWS = 6, 2, 4

MAY_DIFFER = {("paged_attention", "block_table_RM", 1, 1)}
"""Sizes that may be larger than the call needs."""
OF_VALUES = {("expert_mlps", "x_mh", 0, 1)}
"""Rows of x behind the last one of an expert, which belong to none."""


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def packed(*lead: int) -> tuple:
    """Codes, scales, outer scales and zeros of 5 rows of 32 columns."""
    codes = torch.ones(*lead, 5, 32, dtype=torch.int8)
    return codes, randn(*lead, 5, 2).abs(), randn(*lead, 5, 1), codes[..., :2].clone()


def states(layout: RaggedLayout, *shape: int) -> SlotStates:
    captured = torch.zeros(len(layout.captures), *shape)
    slots = torch.arange(SLOTS)[: layout.num_sequences]
    return SlotStates(randn(SLOTS, *shape), slots, captured)


def scans(T: int) -> dict[str, Callable[[RaggedLayout], tuple]]:
    """The ops on layouts, on T rows; `layout` is their last input that is no option."""
    x, dt, B = randn(T, H, P), randn(T, H).abs(), randn(T, G, N)
    keys, beta = randn(T, H, N), randn(T, H).sigmoid()
    channels, narrow = randn(T, C), randn(T, N)
    return {
        "causal_conv1d": lambda own: (channels, randn(C, K), randn(C), states(own, C, K - 1), own),
        "selective_scan": lambda own: (
            *(channels, channels.abs(), -randn(C, N).abs(), narrow, narrow + 1, randn(C)),
            *(states(own, C, N), own),
        ),
        "ssd_scan": lambda own: (
            *(x, dt, -randn(H).abs(), B, B + 1, randn(H), states(own, H, P, N), own),
        ),
        "gated_delta_rule": lambda own: (B, B + 1, x, -dt, beta, states(own, H, N, P), own),
        "kimi_delta_attention": lambda own: (
            *(keys, keys + 1, x, -keys.abs(), beta, states(own, H, N, P), own),
        ),
        "paged_attention": lambda own: (
            *(randn(T, H, N), randn(9, 8, G, N), randn(9, 8, G, P)),
            torch.arange(2 * own.num_sequences).view(-1, 2)[:, : -(-own.last_end // 8)],
            *(own, AttentionPattern(0.5), randn(H)),
        ),
        "varlen_attention": lambda own: (
            *(randn(T, H, N), randn(T, G, N), randn(T, G, P), own),
            *(AttentionPattern(0.5, softcap=3.0), randn(H)),
        ),
    }


FLAT: dict[str, Callable[[], tuple]] = {
    "activate": lambda: (randn(3, G, C), F.silu, randn(3, G, C), False),
    "expert_mlps": lambda: (
        *(randn(ROWS, C), torch.tensor([1, ROWS], dtype=torch.int32), randn(EXPERTS, N, C)),
        *(randn(EXPERTS, N), randn(EXPERTS, C, N), randn(EXPERTS, C), F.silu),
    ),
    "gated_rms_norm": lambda: (randn(3, G, C), randn(3, G, C), randn(G, C), 1e-5),
    "packed_linear": lambda: (
        *(randn(ROWS, 32), *packed(EXPERTS), randn(EXPERTS, 2, 32)),
        torch.tensor([1, ROWS], dtype=torch.int32),
    ),
    "packed_linear one": lambda: (randn(3, 32), *packed(), randn(2, 32)),
    "rms_norm": lambda: (randn(3, C), randn(C), 1e-5, randn(3, C)),
    "rotate_heads": lambda: (
        *(randn(3, G, 2, C), randn(3, G, C), randn(3, 1, C // 2), randn(3, 1, C // 2), False),
        *(randn(C), randn(C), 1e-5),
    ),
    "slot_linear": lambda: (randn(3, C), randn(2, 5, C), torch.tensor([1, -1, 0])),
    "time_steps": lambda: (randn(3, C), randn(C), randn(4), (0.0, None), randn(3, 4), 1.0, None),
    "unpack": lambda: (*packed(EXPERTS), randn(EXPERTS, 2, 32), torch.float32),
}


def calls() -> dict[str, Callable[[], tuple]]:
    """Inputs of a call of each op, and of those on a layout one for each of `LAYOUTS`."""
    found = dict(FLAT)
    for kind, layout in LAYOUTS.items():
        for name, make in scans(layout.num_rows).items():
            found[f"{name} {kind}"] = lambda make=make, layout=layout: make(layout)
    return found


def tensors(inputs: Any) -> list[torch.Tensor]:
    """All tensors of a call."""
    flat = [each for own in inputs for each in (own if isinstance(own, SlotStates) else (own,))]
    return [each for each in flat if isinstance(each, torch.Tensor)]


def resized(x: torch.Tensor, dim: int, by: int) -> torch.Tensor:
    """A tensor with one more or one less in a dimension."""
    if by < 0:
        return x.narrow(dim, 0, x.shape[dim] - 1)
    first = x.narrow(dim, 0, 1)
    return torch.cat((x, first), dim)


def wrong_calls(name: str, make: Callable[[], tuple]) -> Iterator[tuple[str, tuple]]:
    """Each call that differs from a right one by one in one size of one tensor that is tied to
    another, and what is different."""
    op = OPS[name]
    for position, parameter in enumerate(inspect.signature(op.reference).parameters):
        if position >= len(make()):
            continue
        given = make()[position]
        parts = given._fields if isinstance(given, SlotStates) else (None,)
        for part in parts:
            own = getattr(given, part) if part else given
            if not isinstance(own, torch.Tensor):
                continue
            variable = part or parameter
            (form, *others) = op.contracts[variable].forms
            form = next(f for f in (form, *others) if len(f) == own.dim() or "..." in f)
            for dim in range(own.dim()):
                at_end = "..." in form and dim - own.dim() > -len(form)
                word = form[dim - own.dim()] if at_end else "tied" if "..." in form else form[dim]
                for by in (-1, 1):
                    at = (name, variable, dim, by)
                    if own.shape[dim] + by < 0 or at in MAY_DIFFER | OF_VALUES:
                        continue
                    if word == "any" and not (name == "expert_mlps" and (dim or by < 0)):
                        continue
                    inputs = list(make())
                    changed = resized(own, dim, by)
                    inputs[position] = given._replace(**{part: changed}) if part else changed
                    yield f"{variable} of {name}, dimension {dim}, {by:+}", tuple(inputs)


def assert_refused(name: str, make: Callable[[], tuple]) -> int:
    """Assert that all wrong calls raise ValueError, name the tensor or a size of it, and change
    nothing. Returns their number."""
    count = 0
    for what, inputs in wrong_calls(name, make):
        before = [each.clone() for each in tensors(inputs)]
        try:
            OPS[name](*inputs)
        except ValueError as error:
            message = str(error)
        else:
            raise AssertionError(f"{what}: no error")
        assert name in message and any(char.isdigit() for char in message), (what, message)
        assert all(map(torch.equal, before, tensors(inputs))), what
        count += 1
    return count
