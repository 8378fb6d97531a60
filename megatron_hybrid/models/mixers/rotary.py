"""Rotary position embedding (RoFormer, arXiv 2104.09864), tables in fp32.

The pair i of a head's d rotated dimensions turns by position * base^(-2i/d). Pairs are dimensions i
and i + d/2, as in GPT-NeoX, LLaMA and megatron-core's default; interleaved, 2i and 2i + 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.config.position import yarn_amplitude
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.rotary.reference import rotate
from megatron_hybrid.ops.tape import served

_SMALLEST_TABLE = 1024


def frequencies(dim: int, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Compute the radians per position of each pair, fp32 [dim / 2], and the factor of cos and sin.

    `scaling` is `HybridConfig.rotary_scaling`, with the names and meanings of Hugging Face's
    `rope_parameters`: "linear" (arXiv 2306.15595), "llama3" (Llama 3.1's wavelength bands), "yarn"
    (arXiv 2309.00071, whose factor of cos and sin scales the attention scores) and "proportional"
    (Gemma 4: of all pairs only the leading part `partial_rotary_factor` turns).
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / base**exponents
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return plain, 1.0
    if kind == "proportional":
        plain[int(scaling["partial_rotary_factor"] * dim // 2) :] = 0.0
        return plain / scaling.get("factor", 1.0), 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return plain / factor, 1.0
    original = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * plain / (2 * math.pi)  # in the context that the model was trained on
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return kept * plain + (1.0 - kept) * plain / factor, 1.0

    def pair_of(turns: float) -> float:
        """Return which (fractional) pair makes this many turns in the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = pair_of(scaling.get("beta_fast") or 32.0)
    last = pair_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a ramp of no width divides by zero
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return stretched * plain / factor + (1.0 - stretched) * plain, yarn_amplitude(scaling)


def build_rotary(config: HybridConfig, dim: int) -> RotaryEmbedding | None:
    """Build RoPE of `dim` dimensions of an attention layer's heads; None without RoPE."""
    if config.position_embedding_type != "rope":
        return None
    return RotaryEmbedding(
        dim, config.rotary_base, config.rotary_scaling, config.rotary_interleaved
    )


class RotaryEmbedding:
    """RoPE for the leading `dim` dimensions of each head.

    Args:
        dim: rotated dimensions, even.
        base: base of the frequencies.
        scaling: see `frequencies`; None means none.
        interleaved: pairs are neighbours.
    """

    reads_host, is_ragged, backends = True, False, ()  # for recorders, as of an op

    def __init__(
        self,
        dim: int,
        base: float,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
    ):
        self.dim = dim
        self.base = base
        self.interleaved = interleaved
        self._scaling = json.dumps(scaling or {}, sort_keys=True)  # hashable: a key of the tables

    def tables(
        self, num_positions: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        # Tables grow in powers of two, so that a growing sequence makes few of them.
        size = max(_SMALLEST_TABLE, 1 << (num_positions - 1).bit_length())
        return tables(self.dim, self.base, self._scaling, size, device, dtype)

    def cos_sin_of_batch(
        self, layout: RaggedLayout, positions_T: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles of all rows of a call, each [T, 1, dim / 2] in `dtype`,
        cached in the layout."""
        key = "rotary", self.dim, self.base, self._scaling, positions_T.device, dtype
        # By itself, as a tape would need tables of all positions that there may be.
        return layout.derived(key, lambda: served(self, (layout, positions_T, dtype)))

    def serve(
        self, layout: RaggedLayout, positions_T: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute `cos_sin_of_batch`; the layout says on the host how far positions reach."""
        # The layout holds the tables, too: a recorded step reads them as long as it is replayed.
        key = "rotary tables", self.dim, self.base, self._scaling, positions_T.device, dtype
        cos, sin = layout.cached(key, lambda: self.tables(layout.last_end, *key[-2:]))
        return cos[positions_T], sin[positions_T]

    def rotate(self, x_THD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the leading `dim` dimensions of `x_THD`; the rest is unchanged."""
        return rotate(x_THD, *cos_sin, self.interleaved)


@lru_cache(maxsize=16)
def tables(
    dim: int, base: float, scaling: str, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin at positions [0, size), each [size, 1, dim / 2]; shared by all layers."""
    # Outside inference mode, as a later training step may use the table.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        radians, amplitude = frequencies(dim, base, json.loads(scaling))
        positions = torch.arange(size, dtype=torch.float32)
        angles = torch.outer(positions, radians).unsqueeze(1).to(device)
        return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)
