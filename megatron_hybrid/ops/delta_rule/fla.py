"""The delta rules by fla-core's kernels inside of chunks, and ours between them.

Each chunk of the grid that is anchored at absolute position 0 is a sequence to fla-core, so what a
token gives does not depend on how its sequence is cut into calls, and nothing is padded. Our
recurrence goes over the chunks of a sequence, from the state in the pool to the next one there.
"""

from collections.abc import Callable
from typing import Any

from fla.ops.common.chunk_o import chunk_fwd_o
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda import chunk_kda
from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from megatron_hybrid.ops.anchored_chunks import AnchoredChunks
from megatron_hybrid.ops.checks import pad_rows, rows_between
from megatron_hybrid.ops.delta_rule.triton import MAX_KEY_BYTES, recur, run_steps, unit_rows
from megatron_hybrid.ops.hopper import compiles_wrongly
from megatron_hybrid.ops.kernels import aligned_rows, library_bounds, tf32_refusal
from megatron_hybrid.ops.launch import checked
from megatron_hybrid.ops.ragged import RaggedLayout
from megatron_hybrid.ops.slot_states import SlotStates
from megatron_hybrid.ops.steps import Steps

REMARKS = []
"""See `kernel_backend`."""
if compiles_wrongly():
    REMARKS.append(
        "gradients by plain torch: Triton 3.4 to 3.7.0 compile those of fla-core wrongly for Hopper"
    )

_cumsum = checked(chunk_local_cumsum)
_gated_factors = checked(chunk_gated_delta_rule_fwd_intra)
_kimi_factors = checked(chunk_kda_fwd_intra)
_gated_outputs = checked(chunk_fwd_o)
_kimi_outputs = checked(chunk_gla_fwd_o_gk)


def verify(*inputs: Any) -> str | None:
    q_THN, k_THN, v_THP, g_TH, _, states, _, chunk_size = inputs
    if (refusal := tf32_refusal(v_THP)) is not None:
        return refusal
    if not q_THN.dtype == k_THN.dtype == v_THP.dtype:
        return f"q, k and v are of {q_THN.dtype}, {k_THN.dtype} and {v_THP.dtype}"
    if states is not None and states.pool_S.stride(-1) != 1:
        return f"states have the strides {states.pool_S.stride()}; it takes rows of neighbours"
    most = MAX_KEY_BYTES // k_THN.element_size()
    if k_THN.shape[-1] > most:
        return f"heads of q and k have {k_THN.shape[-1]} channels; it takes up to {most}"
    sizes = (1, 16, 32, 64) if g_TH.dim() == 2 else (1, 32, 64)
    if chunk_size not in sizes:
        return f"chunk_size is {chunk_size}; it takes {sizes}"
    return None


def run(*inputs: Any) -> Tensor:
    """See `ops.gated_delta_rule`; with decays `[T, H, N]`, `ops.kimi_delta_attention`."""
    q_THN, k_THN, v_THP, g_TH, beta_TH, states, layout, chunk_size = inputs
    (_, H, P), N = v_THP.shape, k_THN.shape[2]
    if states is None:
        states = SlotStates.zeros(layout.num_sequences, (H, N, P), v_THP.device)
    inputs = [
        t if t.dim() == 2 or t.stride(-1) == 1 else t.contiguous()
        for t in (q_THN, k_THN, v_THP, g_TH, beta_TH)
    ]
    o_THP = v_THP.new_empty(v_THP.shape)
    steps = Steps.of(states, layout, chunk_size, o_THP)
    if steps.num_sequences:
        run_steps(*inputs, steps)
    if steps.num_sequences < layout.num_sequences:
        first, tokens = layout.num_step_tokens, layout.num_tokens
        rest = [aligned_rows(t[first:tokens]) for t in inputs]
        o_THP[first:tokens] = _scan(*rest, states, layout, chunk_size)
        o_THP[tokens:] = 0
    return o_THP


def again(*inputs: Any) -> Callable[..., Tensor] | None:
    """Return the function that has fla-core's gradient; None where that is compiled wrongly."""
    return None if compiles_wrongly() else _differentiable


def _differentiable(*given: Any) -> Tensor:
    """Run the op by fla-core alone, whose chunks begin with each sequence."""
    *tensors, _, layout, _ = given
    inputs = [rows_between(t, 0, layout.num_tokens)[None] for t in tensors]
    op = chunk_gated_delta_rule if inputs[3].dim() == 3 else chunk_kda
    bounds = library_bounds(layout, inputs[0].device)
    o_1THP, _ = op(*inputs, use_qk_l2norm_in_kernel=True, **bounds)
    return pad_rows(o_1THP[0], layout)


def _scan(
    q_THN: Tensor,
    k_THN: Tensor,
    v_THP: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    states: SlotStates,
    layout: RaggedLayout,
    chunk_size: int,
) -> Tensor:
    """Run all other sequences, in chunks; write final states and captures, return outputs."""
    chunks = AnchoredChunks.of(layout, chunk_size, v_THP.device)
    scale, inputs = k_THN.shape[2] ** -0.5, (q_THN, k_THN, v_THP, g_TH, beta_TH)
    q_THN, k_THN = unit_rows(q_THN, k_THN)
    # fla-core's tensors have a leading dimension of 1, and are contiguous.
    q, k, v, g, beta = (t.contiguous()[None] for t in (q_THN, k_THN, v_THP, g_TH, beta_TH))
    grid = {"cu_seqlens": chunks.boundaries_S, "chunk_indices": chunks.whole_S2}
    grid["chunk_size"] = chunk_size
    cum = _cumsum(g, scale=RCP_LN2, **grid)
    if g_TH.dim() == 2:
        W, U, _ = _gated_factors(k, v, cum, beta, **grid)
        decayed_k = k
    else:
        W, U, _, decayed_k, scores, _ = _kimi_factors(q, k, v, cum, beta, scale, **grid)
    slots_R = states.slot_ids_R[layout.num_steps :]
    starts_SHNP, written_THP, kept_HNP = recur(
        decayed_k[0], W[0], U[0], cum[0], states.pool_S, slots_R, chunks, chunk_size
    )
    if num := len(chunks.capture_places_n):
        inner = Steps.inside(chunks, kept_HNP)
        run_steps(*inputs, inner)
        states.captured_n[-num:] = inner.pool_S
    written, starts = written_THP[None], starts_SHNP[None]
    if g_TH.dim() == 2:
        return _gated_outputs(q, k, written, starts, cum, scale=scale, **grid)[0]
    return _kimi_outputs(q, written, cum, scores, starts, scale, **grid)[0]
