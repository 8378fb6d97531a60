"""Steps that change states in the pool: the bits of steps on gathered states, and no other slot."""

import pytest
import torch
from recurrences import CONVS, assert_bits_of_calls_of_their_own
from recurrences import OPS as OPS_WITH_STATES

from megatron_hybrid import ops
from megatron_hybrid.ops import RaggedLayout, SlotStates, slot_states

pytestmark = pytest.mark.bits

SLOTS = 11


def randn(generator, *shape):
    return torch.randn(*shape, generator=generator)


def mamba2(g, T, H, groups, N, P):
    decays = -randn(g, H).abs()
    return (
        *(randn(g, T, H, P), randn(g, T, H).abs(), decays, randn(g, T, groups, N)),
        *(randn(g, T, groups, N), randn(g, H)),
    )


def delta(g, T, H, groups, N, P, per_channel=False):
    heads = H if per_channel else groups
    decays = -randn(g, T, H, N).abs() if per_channel else -randn(g, T, H).abs()
    keys = randn(g, T, heads, N), randn(g, T, heads, N)
    return *keys, randn(g, T, H, P), decays, randn(g, T, H).sigmoid()


OPS = {
    "ssd_scan": (mamba2, lambda H, N, P: (H, P, N)),
    "gated_delta_rule": (delta, lambda H, N, P: (H, N, P)),
    "kimi_delta_attention": (
        lambda *args: delta(*args, per_channel=True),
        lambda H, N, P: (H, N, P),
    ),
}


def pool_of(generator, shape, dtype=torch.float32):
    """States at multiples of 16 bytes inside wider slots, as those of the engine."""
    size = -(-torch.Size(shape).numel() // 8) * 8
    slots = randn(generator, SLOTS, size + 24).to(dtype)
    return slots, slots[:, 8 : 8 + torch.Size(shape).numel()].unflatten(1, shape)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("sizes", [(4, 2, 16, 64), (2, 1, 5, 6), (3, 3, 130, 32), (1, 1, 64, 1)])
@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_steps_in_place_have_the_bits_of_steps_on_gathered_states(
    monkeypatch, name, sizes, num_padding, dtype
):
    make, shape_of = OPS[name]
    generator = torch.Generator().manual_seed(sum(sizes))
    shape = shape_of(sizes[0], *sizes[2:])
    layout = RaggedLayout((1,) * 7, tuple(range(7)), (2, 3, 7), num_padding)
    inputs = make(generator, layout.num_rows, *sizes)
    _, gathered = pool_of(generator, shape, dtype)
    slots, in_place = pool_of(generator, shape, dtype)
    around = slots.clone()
    in_place.copy_(gathered)
    ids = torch.randperm(SLOTS, generator=generator)[:7]
    idle = torch.tensor(sorted({*range(SLOTS)} - {*ids.tolist()}))

    def run(pool):
        captured = torch.empty(3, *shape, dtype=dtype)
        ys = [getattr(ops, name)(*inputs, SlotStates(pool, ids, captured), layout)]
        ys.append(getattr(ops, name)(*inputs, SlotStates(pool, ids, captured), layout))
        return *ys, captured, pool.clone()

    before = gathered.clone()
    results = run(in_place)
    reads = []
    monkeypatch.setattr(slot_states, "_are_steps_in_place", lambda *_: reads.append(1))
    expected = run(gathered)
    assert len(reads) == 2
    for given, wanted in zip(results, expected):
        assert torch.equal(given, wanted)
    assert torch.equal(in_place[idle], before[idle])
    assert not torch.equal(in_place[ids], before[ids])
    size = torch.Size(shape).numel()
    for beside in (slice(0, 8), slice(8 + size, None)):
        assert torch.equal(slots[:, beside], around[:, beside])


def test_steps_are_in_place_only_where_nothing_else_can_tell():
    def are_in_place(**fields):
        states = SlotStates(torch.zeros(3, 2, 2, 2), torch.tensor([2, 0]))
        return slot_states._are_steps_in_place(states, RaggedLayout((1, 1), (5, 6), **fields))

    with torch.no_grad():
        assert are_in_place()
        assert not are_in_place(starts=torch.tensor([5, 6], dtype=torch.int32))
    assert not are_in_place()  # a graph of gradients may need the states before


@pytest.mark.parametrize("place", ["pool_S", "captured_n"])
def test_states_that_share_memory_are_refused(place):
    generator = torch.Generator().manual_seed(0)
    make, shape_of = OPS["ssd_scan"]
    layout = RaggedLayout((3, 2), (0, 0), (1, 4))
    states = SlotStates(pool_of(generator, shape_of(2, 4, 4))[1], torch.tensor([1, 5]))
    states = states._replace(captured_n=torch.zeros(2, *shape_of(2, 4, 4)))
    shared = getattr(states, place)
    states = states._replace(**{place: shared[:1].expand(shared.shape)})
    with pytest.raises(ValueError, match=f"the states in {place} share memory"):
        ops.ssd_scan(*make(generator, 5, 2, 1, 4, 4), states, layout)


@pytest.mark.parametrize("op", OPS_WITH_STATES, ids=lambda op: op.name)
@pytest.mark.parametrize("lengths", [(1, 4, 2), (1, 4, 2, 9), (1, 1, 5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_tokens_of_decodes_have_the_bits_of_calls_of_their_own(op, lengths, dtype):
    """Also next to a prefill, with states captured after them, and rounded ones."""
    decodes = sum(length < 9 for length in lengths)
    captures = tuple(count for count in range(2, sum(lengths)) if count != 5)
    layout = RaggedLayout(lengths, (5, 17, 3, 40)[: len(lengths)], captures, 3, None, decodes)
    dtype = torch.float32 if op in CONVS else dtype  # whose tails are in the dtype of its inputs
    assert_bits_of_calls_of_their_own(op, layout, dtype)
