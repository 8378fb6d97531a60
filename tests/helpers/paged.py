"""Attention over pages: pools as the engine lays them, and patterns to try."""

import torch
from hypothesis import strategies as st
from recurrences import assert_near, randn, seeded

from megatron_hybrid.ops import AttentionPattern, paged_attention
from megatron_hybrid.ops.attention.naive import attention

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
    parts = zip(layout.cu_seqlens, layout.cu_seqlens[1:], keys, values)
    return torch.cat([attention(q[first:end], k, v, pattern, sinks) for first, end, k, v in parts])


def check_paged(layout, pattern, block_size=16, group=2, P=D, sinks=False, by_row=False, seed=0):
    """`paged_attention` of fp32 equals brute force, and padding is 0. Returns the output."""
    generator = seeded(seed)
    q, keys, values = paged_case(layout, group, generator, P)
    sinks = random_sinks(generator, K_HEADS * group, sinks)
    pool = Pool(keys, values, block_size, generator, columns=2, by_row=by_row)
    out = paged_attention(q.float(), *pool, layout, pattern, as_float(sinks))
    assert_near(
        out[: layout.num_tokens], paged_expectation(layout, q, keys, values, pattern, sinks)
    )
    assert not out[layout.num_tokens :].any()
    return out
