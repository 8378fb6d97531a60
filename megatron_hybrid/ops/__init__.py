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
per faster backend. `dispatch.py` chooses among them. Those that carry a state are also written as
they are defined, token by token, in `naive.py`.

Inside the chunked scans `S` counts chunks and `L` the rows of one chunk.
"""

from megatron_hybrid.ops.activate import activate as activate
from megatron_hybrid.ops.attention import AttentionPattern as AttentionPattern
from megatron_hybrid.ops.attention import paged_attention as paged_attention
from megatron_hybrid.ops.attention import varlen_attention as varlen_attention
from megatron_hybrid.ops.conv import causal_conv1d as causal_conv1d
from megatron_hybrid.ops.delta_rule import gated_delta_rule as gated_delta_rule
from megatron_hybrid.ops.delta_rule import kimi_delta_attention as kimi_delta_attention
from megatron_hybrid.ops.experts import ExpertPairs as ExpertPairs
from megatron_hybrid.ops.experts import expert_mlps as expert_mlps
from megatron_hybrid.ops.linear import linear as linear
from megatron_hybrid.ops.norm import gated_rms_norm as gated_rms_norm
from megatron_hybrid.ops.norm import rms_norm as rms_norm
from megatron_hybrid.ops.norm import rms_norm_of_sum as rms_norm_of_sum
from megatron_hybrid.ops.packed import packed_linear as packed_linear
from megatron_hybrid.ops.packed import unpack as unpack
from megatron_hybrid.ops.ragged import RaggedLayout as RaggedLayout
from megatron_hybrid.ops.rotary import rotate_heads as rotate_heads
from megatron_hybrid.ops.selective_scan import selective_scan as selective_scan
from megatron_hybrid.ops.slot_linear import slot_linear as slot_linear
from megatron_hybrid.ops.slot_states import SlotStates as SlotStates
from megatron_hybrid.ops.ssd import ssd_scan as ssd_scan
from megatron_hybrid.ops.state_codec.codec import StatesCodec as StatesCodec
from megatron_hybrid.ops.time_steps import time_steps as time_steps
