"""The layout of a batch without caches: rows, documents or packed sequences, then padding."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_hybrid.models.batch_checks import document_lengths
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.ops.ragged import ROW_ALIGNMENT, RaggedLayout


def row_padding(config: HybridConfig, b: int, s: int, inference: bool) -> int:
    """Rows to add to b * s, so that all ranks get as many under sequence parallelism.

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
    """The layout of a batch [b, s], and of `padding` rows after it; other arguments as those of
    `HybridModel.forward`.

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
    """The layout of one row of s tokens without caches, and of so many rows after it."""
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
