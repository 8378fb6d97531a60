"""Causal attention over ragged sequences: from a paged cache, or uncached for training."""

from megatron_hybrid.ops.attention import flash, reference
from megatron_hybrid.ops.attention.pattern import AttentionPattern as AttentionPattern
from megatron_hybrid.ops.dispatch import Backend, Op
from megatron_hybrid.ops.kernels import kernel_backend

_GROUPS = {"K and H % K == 0": "{H} query heads are not a multiple of {K} kv heads"}
paged_attention = Op(
    "paged_attention",
    reference.paged_attention,
    {
        "q_THD": "T H D",
        "k_pages_nBKD": "number pages B K D",
        "v_pages_nBKP": "number pages B K any",
        "block_table_RM": "int R M",
        "sinks_H": "H or None",
    },
    {
        **_GROUPS,
        "layout.last_end <= M * B": "a sequence has {layout.last_end} keys, but the block table "
        "has {M} columns of {B} tokens: give it more columns",
    },
    reads_host=True,
)
paged_attention.register(
    kernel_backend(
        "fa3",
        "megatron_hybrid.ops.attention.fa3",
        {"flash_attn_interface": "tokenspeed-fa3"},
        has_gradient=False,
    )
)
paged_attention.register(
    kernel_backend(
        "flash", "megatron_hybrid.ops.attention.flash", suffix="_paged", has_gradient=False
    )
)
paged_attention.register(
    kernel_backend("triton", "megatron_hybrid.ops.attention.triton", has_gradient=False)
)
varlen_attention = Op(
    "varlen_attention",
    reference.varlen_attention,
    {"q_THD": "T H D", "k_TKD": "T K D", "v_TKP": "T K any", "sinks_H": "H or None"},
    _GROUPS,
)
varlen_attention.register(Backend("flash", flash.run, flash.verify, flash.MISSING, "cuda"))
varlen_attention.register(kernel_backend("triton", "megatron_hybrid.ops.attention.triton_varlen"))
