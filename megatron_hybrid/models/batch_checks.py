"""Checks of a caller's positions and masks, which HybridModel ignores.

Values are compared in host memory only. Reading them from a device would make every forward wait:
there only dtype and shape are checked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.ops.ragged import RaggedLayout

_REMEDY = (
    "Where one row holds documents that shall not see each other, pass their boundaries as "
    "packed_seq_params; else leave {} out."
)


def check_position_ids(
    position_ids: Tensor | None, shape: tuple[int, int], layout: RaggedLayout, inference: bool
) -> None:
    """Check that positions are those of the layout or, except in inference, 0..s-1 in each row.

    Args:
        position_ids: int [b, s], [1, s] or [s]; padding rows may hold anything.
        shape: (b, s) of the tokens.
        layout: of the b * s rows.
        inference: whether the layout's start positions are those of an inference context.

    Raises:
        ValueError: another shape, or other positions.
    """
    if position_ids is None:
        return
    b, s = shape
    if tuple(position_ids.shape) not in ((b, s), (1, s), (s,)):
        raise ValueError(
            f"position_ids have the shape {list(position_ids.shape)}; input_ids have [{b}, {s}]."
        )
    if position_ids.device.type != "cpu":
        return
    given = position_ids.expand(b, s).flatten()[: layout.num_tokens]
    expected = layout.token_positions("cpu")[: layout.num_tokens]
    of_rows = torch.arange(s).repeat(b)[: layout.num_tokens]
    if (given == expected).all() or (not inference and (given == of_rows).all()):
        return
    row = int((given != expected).nonzero()[0])
    raise ValueError(
        f"position_ids have {given[row]} for token {row % s} of row {row // s}, whose position is "
        f"{expected[row]}: positions count from each sequence's start, others are not supported. "
        + _REMEDY.format("position_ids")
    )


def check_attention_mask(
    attention_mask: Tensor | None, shape: tuple[int, int], layout: RaggedLayout, inference: bool
) -> None:
    """Check that a mask is causal: over each row or, in one packed row, inside each sequence.

    Args:
        attention_mask: bool [b, 1, s, s] or [1, 1, s, s], True where a token (second to last
            dimension) does not see another. Not in inference.
        shape: (b, s) of the tokens.
        layout: of the b * s rows.
        inference: whether an inference context decides which positions a token sees.

    Raises:
        ValueError: another dtype or shape, or another mask.
    """
    if attention_mask is None:
        return
    b, s = shape
    if inference:
        raise ValueError(
            "attention_mask is given with an inference context, which alone knows what its tokens "
            "see. Leave attention_mask out."
        )
    form = tuple(attention_mask.shape)
    if attention_mask.dtype != torch.bool or form not in ((b, 1, s, s), (1, 1, s, s)):
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {list(form)}; it must be torch.bool "
            f"[{b}, 1, {s}, {s}], True where a token does not see another, or None."
        )
    if attention_mask.device.type != "cpu":
        return
    causal = torch.ones(s, s, dtype=torch.bool).triu(1)
    differs = attention_mask != causal
    if not differs.any():
        return
    if b == 1:
        n, owners = layout.num_tokens, layout.sequence_ids("cpu")
        inside = causal[:n, :n] | (owners[:, None] != owners)
        if torch.equal(attention_mask[0, 0, :n, :n], inside):
            return
    row, _, token, other = differs.nonzero()[0].tolist()
    hidden = attention_mask[row, 0, token, other]
    verb, link = ("hides", "from") if hidden else ("shows", "to")
    raise ValueError(
        f"attention_mask {verb} token {other} of row {row} {link} token {token}: each token sees "
        "itself and all before it in its sequence, other masks are not supported. "
        + _REMEDY.format("attention_mask")
    )
