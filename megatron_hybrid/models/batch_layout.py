"""The layout of a batch without caches: rows, documents or packed sequences, then padding; and
checks of a caller's positions and masks.

Megatron's scripts pass `position_ids` and `attention_mask` to every model. Here each row is one
causal sequence, unless these say that it holds several documents.
"""

import math
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT, RaggedLayout

_REMEDY = "Pass the boundaries of the sequences as packed_seq_params, or leave {} out."


def row_padding(config: HybridConfig, b: int, s: int, inference: bool) -> int:
    """Count the rows to add to b * s, so that all ranks get as many under sequence parallelism.

    Raises:
        ValueError: the rows do not divide over the ranks, where none may be added.
    """
    tp_size = config.tensor_model_parallel_size
    if not config.sequence_parallel:
        return 0
    if not inference and config.pipeline_model_parallel_size == 1:
        return -b * s % math.lcm(ROW_ALIGNMENT, tp_size)
    if s % tp_size:
        raise ValueError(
            f"sequence_parallel=True splits the {s} tokens of each row over "
            f"tensor_model_parallel_size={tp_size} ranks, which in inference and between "
            "pipeline stages must divide evenly. Pad the rows, or in inference use a divisor "
            f"of {ROW_ALIGNMENT} ranks, of which its batches are multiples."
        )
    return 0


def batch_layout(
    config: HybridConfig,
    b: int,
    s: int,
    padding: int,
    packed_seq_params: PackedSeqParams | None,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
) -> RaggedLayout:
    """Return the layout of a batch [b, s] and of `padding` rows after it; the other arguments are
    those of `HybridModel.forward`.

    Raises:
        ValueError: boundaries, positions or a mask that are not supported.
    """
    if packed_seq_params is not None:
        return _packed_layout(b, s, packed_seq_params, padding)
    lengths = document_lengths(position_ids, attention_mask, (b, s))
    if lengths is None:
        layout = RaggedLayout.uniform(b, s)
        return replace(layout, num_padding=padding) if padding else layout
    if (stages := config.pipeline_model_parallel_size) > 1:
        raise ValueError(
            "position_ids or attention_mask restart at documents, and the model has "
            f"pipeline_model_parallel_size={stages}: Megatron's scripts give them to the first "
            "stage, and to the last one at most a mask, so the others would mix the documents. "
            "Pass packed_seq_params on all stages."
        )
    return RaggedLayout(lengths, (0,) * len(lengths), num_padding=padding)


def _packed_layout(
    b: int, s: int, packed_seq_params: PackedSeqParams, padding: int
) -> RaggedLayout:
    """Return the layout of one row of s tokens without caches, and of `padding` rows after it."""
    if b != 1:
        raise ValueError(
            f"packed_seq_params describe one row of tokens, but input_ids has {b} rows. "
            "Flatten the batch to [1, T]."
        )
    boundaries = packed_seq_params.cu_seqlens_q_padded
    if boundaries is None:
        boundaries = packed_seq_params.cu_seqlens_q
    cu_seqlens = boundaries.tolist()
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    if cu_seqlens[0] != 0 or min(lengths, default=-1) < 0 or cu_seqlens[-1] > s:
        raise ValueError(
            f"cu_seqlens {cu_seqlens} must rise from 0 to at most the {s} tokens of input_ids."
        )
    lengths = tuple(length for length in lengths if length)
    return RaggedLayout(lengths, (0,) * len(lengths), num_padding=s - cu_seqlens[-1] + padding)


def document_lengths(
    position_ids: Tensor | None, attention_mask: Tensor | None, shape: tuple[int, int]
) -> tuple[int, ...] | None:
    """Find the lengths of the documents in b rows, row after row; None if each row is one document.

    A document starts where positions restart at 0 or, where positions go on, at a token that does
    not see the one before it (GPTDataset's `reset_position_ids` and `reset_attention_mask`). Values
    are read from any device, which waits for it.

    Args:
        position_ids: int [b, s], [1, s] or [s], or None.
        attention_mask: bool [b, 1, s, s] or [1, 1, s, s], True = not seen, or None. Of its values
            those of each token's predecessor are read.
        shape: (b, s) of the tokens.

    Raises:
        ValueError: another shape or dtype, positions that do not count from 0 in each document, or
            a mask that shows a token what is before the document that its positions start.
    """
    starts_bs = None
    if position_ids is not None:
        starts_bs = _restarts(position_ids, shape)
    if attention_mask is not None:
        _check_form(attention_mask, shape)
        hidden_bs = F.pad(attention_mask[:, 0].diagonal(-1, 1, 2).cpu(), (1, 0), value=True)
        if starts_bs is not None and starts_bs[:, 1:].any():
            differs = starts_bs != hidden_bs
            if differs.any():
                row, token = differs.nonzero()[0].tolist()
                one, other = ("restart", "shows") if starts_bs[row, token] else ("go on", "hides")
                raise ValueError(
                    f"position_ids {one} at token {token} of row {row}, but attention_mask {other} "
                    f"it token {token - 1}: recurrent layers, positions and attention start anew "
                    "together. Set reset_position_ids and reset_attention_mask both, or leave "
                    "attention_mask out."
                )
        else:
            starts_bs = hidden_bs.expand(shape)
    if starts_bs is None or not starts_bs[:, 1:].any():
        return None
    starts = starts_bs.flatten().nonzero().flatten()
    return tuple(torch.diff(starts, append=torch.tensor([starts_bs.numel()])).tolist())


def _restarts(position_ids: Tensor, shape: tuple[int, int]) -> Tensor:
    """Find where positions are 0, bool [b, s] on the CPU."""
    b, s = shape
    _check_shape(position_ids, shape)
    given_bs = position_ids.cpu().expand(b, s)
    starts_bs = given_bs == 0
    index_s = torch.arange(s)
    last_start_bs = torch.where(starts_bs, index_s, -1).cummax(1).values
    expected_bs = index_s - last_start_bs
    wrong = (given_bs != expected_bs) | (last_start_bs < 0)
    if wrong.any():
        row, token = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"position_ids have {given_bs[row, token]} for token {token} of row {row}: positions "
            "count up by 1 and restart at 0 with each document, others are not supported. "
            + _REMEDY.format("position_ids")
        )
    return starts_bs


def check_position_ids(
    position_ids: Tensor | None, shape: tuple[int, int], layout: RaggedLayout, inference: bool
) -> None:
    """Check that positions are those of a known layout or, except in inference, 0..s-1 in each row.
    Values are compared in host memory only: reading them from a device would wait for it.

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
    _check_shape(position_ids, shape)
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
    """Check that a mask is causal: over each row or inside each sequence. Values are compared in
    host memory only.

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
    if inference:
        raise ValueError(
            "attention_mask is given with an inference context, which alone knows what its tokens "
            "see. Leave attention_mask out."
        )
    _check_form(attention_mask, shape)
    if attention_mask.device.type != "cpu":
        return
    b, s = shape
    causal_ss = torch.ones(s, s, dtype=torch.bool).triu(1)
    if not (attention_mask != causal_ss).any():
        return
    # Rows of padding are a sequence of their own, and may see anything.
    owners_bs = F.pad(layout.sequence_ids("cpu")[: b * s], (0, b * s - layout.num_tokens), value=-1)
    owners_bs = owners_bs.view(b, s)
    inside = causal_ss | (owners_bs[:, :, None] != owners_bs[:, None])
    differs = (attention_mask[:, 0] != inside) & (owners_bs >= 0)[:, :, None]
    if not differs.any():
        return
    row, token, other = differs.nonzero()[0].tolist()
    hidden = attention_mask[row % len(attention_mask), 0, token, other]
    verb, link = ("hides", "from") if hidden else ("shows", "to")
    raise ValueError(
        f"attention_mask {verb} token {other} of row {row} {link} token {token}: each token sees "
        "itself and all before it in its sequence, other masks are not supported. "
        + _REMEDY.format("attention_mask")
    )


def check_padding_mask(padding_mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    """Check the mask of a batch, and return that of its rows one after the other, bool [b * s].

    Args:
        padding_mask: bool [b, s], or None.
        shape: (b, s) of the tokens.

    Raises:
        ValueError: another dtype or shape.
    """
    if padding_mask is None:
        return None
    if padding_mask.dtype != torch.bool or tuple(padding_mask.shape) != shape:
        raise ValueError(
            f"padding_mask is {padding_mask.dtype} {list(padding_mask.shape)}; it must be "
            f"torch.bool {list(shape)}, True where a token is padding, or None."
        )
    return padding_mask.flatten()


def _check_shape(position_ids: Tensor, shape: tuple[int, int]) -> None:
    b, s = shape
    if tuple(position_ids.shape) not in ((b, s), (1, s), (s,)):
        raise ValueError(
            f"position_ids have the shape {list(position_ids.shape)}; the tokens have [{b}, {s}]."
        )


def _check_form(attention_mask: Tensor, shape: tuple[int, int]) -> None:
    b, s = shape
    form = tuple(attention_mask.shape)
    if attention_mask.dtype != torch.bool or form not in ((b, 1, s, s), (1, 1, s, s)):
        raise ValueError(
            f"attention_mask is {attention_mask.dtype} {list(form)}; it must be torch.bool "
            f"[{b}, 1, {s}, {s}], True where a token does not see another, or None."
        )
