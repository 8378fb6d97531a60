"""Tensor functions of the mixers. They know sequences and states, no request and no cache.

Shape letters, used as suffixes of tensor names in this package:

    T  tokens of a ragged batch, padding rows included      R  sequences of the batch
    H  heads          G  groups of B and C                  n  captures
    P  value head dim N  state dim, key head dim            D  head dim of attention
    C  channels       K  conv width, or key/value heads     k  K - 1, length of a conv tail
    B  block size in tokens                                 M  blocks per row of a block table
    S  live slots of the pool of states (`SlotStates`)

In attention, `b` counts sequences of one length, `s` query rows, `t` key rows, and `q` the query
rows of all heads of a key/value head.

Each op has a folder: the function and its contract in `__init__.py`, `reference.py`, and one file
per faster backend. `dispatch.py` chooses among them.

Inside the chunked scans `S` counts chunks and `L` the rows of one chunk.
"""

from megatron_hybrid.ops.activate import activate
from megatron_hybrid.ops.attention import AttentionPattern, paged_attention, varlen_attention
from megatron_hybrid.ops.conv import causal_conv1d
from megatron_hybrid.ops.delta_rule import gated_delta_rule, kimi_delta_attention
from megatron_hybrid.ops.experts import ExpertPairs, expert_mlps
from megatron_hybrid.ops.linear import linear
from megatron_hybrid.ops.norm import gated_rms_norm, rms_norm, rms_norm_of_sum
from megatron_hybrid.ops.packed import packed_linear, unpack
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.rotary import rotate_heads
from megatron_hybrid.ops.selective_scan import selective_scan
from megatron_hybrid.ops.slot_linear import slot_linear
from megatron_hybrid.ops.slot_states import SlotStates
from megatron_hybrid.ops.ssd import ssd_scan
from megatron_hybrid.ops.state_codec import StatesCodec
from megatron_hybrid.ops.time_steps import time_steps

__all__ = [
    "AttentionPattern",
    "ExpertPairs",
    "RaggedLayout",
    "SlotStates",
    "StatesCodec",
    "activate",
    "causal_conv1d",
    "expert_mlps",
    "gated_delta_rule",
    "gated_rms_norm",
    "kimi_delta_attention",
    "linear",
    "packed_linear",
    "paged_attention",
    "rms_norm",
    "rms_norm_of_sum",
    "rotate_heads",
    "selective_scan",
    "slot_linear",
    "ssd_scan",
    "time_steps",
    "unpack",
    "varlen_attention",
]
