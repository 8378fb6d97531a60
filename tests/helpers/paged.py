"""Attention over pages: pools as the engine lays them, patterns to try, and brute force."""

import torch
from hypothesis import strategies as st
from recurrences import randn

from megatron_hybrid.ops import AttentionPattern

D, K_HEADS = 8, 2
SCALE = 0.3
PLAIN = AttentionPattern(SCALE)
sizes = st.integers(1, 260)
localities = st.one_of(
    st.just({}),
    st.builds(lambda n: {"window": n}, sizes),
    st.builds(lambda n: {"chunk": n}, sizes),
)
softcaps = st.sampled_from((None, None, 0.5, 3.0))
patterns = st.builds(
    lambda locality, softcap, skips_first: AttentionPattern(
        SCALE, softcap=softcap, skips_first=skips_first, **locality
    ),
    localities,
    softcaps,
    st.sampled_from((False, False, True)),
)
group_sizes = st.sampled_from((1, 2, 4))
value_dims = st.sampled_from((D, D, 5, 11))


def brute_force(q, k, v, visible, pattern, sinks=None):
    """q [T, H, D], k [S, K, D], v [S, K, P], visible [T, S], sinks [H] -> [T, H, P]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * pattern.scale
    if pattern.softcap is not None:
        scores = pattern.softcap * (scores / pattern.softcap).tanh()
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks[:, None, None].exp()
    return torch.einsum("hts,shp->thp", weights / total, v)


def visibility(query_positions, key_positions, pattern):
    rows, columns = query_positions[:, None], key_positions[None]
    visible = columns <= rows
    if pattern.window is not None:
        visible &= rows - columns < pattern.window
    if pattern.chunk is not None:
        visible &= rows // pattern.chunk == columns // pattern.chunk
    if pattern.skips_first:
        visible &= (columns > 0) | (rows == 0)
    return visible


def random_sinks(generator, heads, wanted=True):
    return 2 * randn(generator, heads) if wanted else None


def as_float(sinks):
    return None if sinks is None else sinks.float()


class Pool:
    """Pages as the engine lays them, K and V apart or row by row; garbage where unwritten.

    Values of None are the first numbers of the keys, as with a cache of latents.
    """

    def __init__(
        self, keys, values, block_size, generator, dtype=torch.float32, columns=0, by_row=False
    ):
        blocks = [-(-len(k) // block_size) for k in keys]
        width = max(blocks) + columns
        order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
        shape, P = (len(order), block_size, K_HEADS), values[0].shape[-1]
        if by_row:
            memory = torch.full((*shape, D + P + 3), torch.nan, dtype=dtype)
            self.k_pages, self.v_pages = memory[..., :D], memory[..., D : D + P]
        else:
            numbers = block_size * K_HEADS
            memory = torch.full((len(order), numbers * (D + P) + 16), torch.nan, dtype=dtype)
            k_memory, v_memory, _ = memory.split([numbers * D, numbers * P, 16], dim=1)
            self.k_pages = k_memory.unflatten(1, (*shape[1:], D))
            self.v_pages = v_memory.unflatten(1, (*shape[1:], P))
        self.block_table = torch.full((len(keys), width), -1, dtype=torch.int32)
        for r, (k, v) in enumerate(zip(keys, values)):
            for block in range(blocks[r]):
                page = order.pop()
                rows = slice(block * block_size, (block + 1) * block_size)
                self.block_table[r, block] = page
                self.k_pages[page, : len(k[rows])] = k[rows].to(dtype)
                self.v_pages[page, : len(v[rows])] = v[rows].to(dtype)

    def __iter__(self):
        return iter((self.k_pages, self.v_pages, self.block_table))


def paged_case(layout, group, generator, P=D):
    lengths = [s + n for s, n in zip(layout.start_positions, layout.lengths)]
    keys, values = ([randn(generator, n, K_HEADS, size) for n in lengths] for size in (D, P))
    return randn(generator, layout.num_rows, K_HEADS * group, D), keys, values


def paged_expectation(layout, q, keys, values, pattern, sinks=None):
    outs = []
    for r, (first, end) in enumerate(zip(layout.cu_seqlens, layout.cu_seqlens[1:])):
        key_positions = torch.arange(len(keys[r]))
        visible = visibility(key_positions[layout.start_positions[r] :], key_positions, pattern)
        outs.append(brute_force(q[first:end], keys[r], values[r], visible, pattern, sinks))
    return torch.cat(outs)
