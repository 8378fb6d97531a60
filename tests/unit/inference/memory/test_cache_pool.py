"""CachePool: views that share no byte, copies that lose none."""

from collections import Counter
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from host_syncs import no_host_syncs
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hybrid.cache.pages.spec import common_spec
from megatron_hybrid.distributed.ranks import ONE_RANK
from megatron_hybrid.inference.memory.cache_pool import (
    CachePool,
    _zero,
    agree_on_spec,
    cache_spec_of,
)
from megatron_hybrid.models.mixers.base import KVShape, LayerCache, StateTensor

HIDDEN = 24
FULL = KVShape(num_heads=2, head_dim=8)
WIDE = KVShape(num_heads=4, head_dim=8)
WINDOW = KVShape(num_heads=2, head_dim=8, window=20)
ODD_WINDOW = KVShape(num_heads=3, head_dim=4, window=9)
CHUNK = KVShape(num_heads=2, head_dim=8, chunk=32)
LATENT = KVShape(num_heads=1, head_dim=18, value_dim=0)  # its values are a part of its keys
NARROW_VALUES = KVShape(num_heads=2, head_dim=12, value_dim=5)
GLOBAL = KVShape(num_heads=1, head_dim=32)  # half the bytes of a local layer, as in Gemma 4
LOCAL = KVShape(num_heads=4, head_dim=16, window=40)
STATES = (
    StateTensor("conv", (5, 3), torch.bfloat16),  # 30 bytes: the next one needs alignment
    StateTensor("ssm", (2, 4, 3), torch.float32),
)
MODELS = {
    "one group": [LayerCache(kv=FULL)] * 3,
    "hybrid": [LayerCache(states=STATES), LayerCache(kv=FULL), LayerCache(), LayerCache(kv=FULL)],
    "window": [LayerCache(kv=WINDOW), LayerCache(states=STATES), LayerCache(kv=FULL)],
    "windows alone": [LayerCache(kv=WINDOW)] * 2,
    "states alone": [LayerCache(states=STATES), LayerCache(states=STATES[1:])],
    "four groups": [
        LayerCache(kv=shape, states=STATES[:1]) for shape in (FULL, WINDOW, WIDE, ODD_WINDOW, WIDE)
    ],
    "chunks": [LayerCache(kv=CHUNK), LayerCache(kv=FULL), LayerCache(kv=CHUNK)],
    "latents": [LayerCache(kv=LATENT), LayerCache(states=STATES), LayerCache(kv=LATENT)],
    "other values": [LayerCache(kv=shape) for shape in (NARROW_VALUES, LATENT, WINDOW, FULL)],
    "alternating": [LayerCache(kv=shape) for shape in (*[LOCAL] * 5, GLOBAL) * 2],
    "nothing": [LayerCache()],
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("size", [1, 4096, 8191, 8192, 12288, 100_001, 3 << 20])
@pytest.mark.parametrize("offset", [0, 1, 4095, 4096])
def test_zeros_are_zeros_over_what_was_there(size, offset):
    whole = torch.full((offset + size + 5000,), 255, dtype=torch.uint8)
    _zero(whole[offset : offset + size])
    assert not whole[offset : offset + size].any()
    assert (whole[:offset] == 255).all() and (whole[offset + size :] == 255).all()


def test_what_nobody_used_of_a_pool_takes_no_memory():
    """Neither when it is made, nor after a suspension."""
    process = psutil.Process()
    before = process.memory_info().rss
    memory = memory_of([LayerCache(kv=FULL)], num_pages=1 << 17, num_slots=1)
    memory.release()
    memory.reacquire()
    memory.refill()
    memory.pool[-1] = 7
    assert memory.pool.numel() == 256 << 20 and process.memory_info().rss - before < 64 << 20
    assert not memory.pool[-2].any()


def memory_of(layers, dtype=torch.float32, num_pages=14, num_slots=3, block=16) -> CachePool:
    spec = cache_spec_of(layers, HIDDEN, dtype, block)
    return CachePool(spec, layers, HIDDEN, dtype, num_pages, num_slots, torch.device("cpu"))


def parts(memory, layers):
    """Every view of the pool, page table column and all, and every view of the slots."""
    kv = [
        (number, memory.kv_pages(number))
        for number, layer in enumerate(layers, start=1)
        if layer.kv is not None
    ]
    states = [
        memory.state(number, state.name)
        for number, layer in enumerate(layers, start=1)
        for state in layer.states
    ]
    return kv, [*states, memory.hidden()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", MODELS.values(), ids=MODELS)
def test_no_two_views_share_a_byte(layers, dtype):
    """Each layer's K and V in its own column of pages, each state in its own part of a slot: what
    one writes is all that changes, and each reads back what it wrote."""
    memory = memory_of(layers, dtype)
    spec = memory.spec
    kv, states = parts(memory, layers)
    columns = spec.kv_pages_per_block + sum(spec.pages_per_block[g] for g in spec.local_groups)
    assert columns < 14
    written = {}
    for number, views in kv:
        window, column = memory.table_of_layer[number]
        first = 0 if window is None else spec.kv_pages_per_block
        first += sum(spec.pages_per_block[g] for g in spec.local_groups[: window or 0])
        for name, view in zip("kv", views):
            page = 1 + first + column  # as if one block's table were 1, 2, 3, ...
            view[page] = torch.randn(view.shape[1:]).to(dtype)
            written[number, name] = view[page], view[page].clone()
    for (number, name), (view, value) in written.items():
        assert torch.equal(view, value), f"{name} of layer {number} was overwritten"
    assert not memory.pool[0].any() and not memory.pool[1 + columns :].any()

    values = []
    for view in states:
        view[1] = torch.randn(view.shape[1:]).to(view.dtype)
        values.append(view[1].clone())
    assert all(torch.equal(view[1], value) for view, value in zip(states, values))
    assert not memory.slots[0].any() and not memory.slots[2].any()


class Launches(TorchDispatchMode):
    """Counts the operators that read or write the pool."""

    def __init__(self, pool: torch.Tensor):
        super().__init__()
        self._storage = pool.untyped_storage().data_ptr()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        if any(x.untyped_storage().data_ptr() == self._storage for x in inputs):
            self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_a_checkpoint_is_gathered_and_scattered_in_one_launch_each():
    memory = memory_of(MODELS["hybrid"], num_pages=60)
    pages = np.arange(1, 1 + memory.spec.checkpoint_pages, dtype=np.int32)
    with Launches(memory.pool) as saving, no_host_syncs():
        memory.save_checkpoint(memory.slots[0], pages)
    with Launches(memory.pool) as loading, no_host_syncs():
        memory.load_checkpoint(pages, 1)
    assert saving.counts == {"index_copy_": 1}
    assert loading.counts == {"index_select": 1}


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32, 40, 48])
@pytest.mark.parametrize("shared_blocks", [0, 1])
@pytest.mark.parametrize("model", ["window", "chunks"])
def test_parked_bytes_come_back_elsewhere(num_tokens, shared_blocks, model):
    """Blocks go to other pages, those that are shared again are left alone, and so are local
    blocks that no later token sees."""
    memory = memory_of(MODELS[model], num_pages=40)
    memory.pool.random_()
    memory.slots.random_()
    columns = memory.spec.kv_pages_per_block
    (group,) = memory.spec.local_groups
    blocks = -(-num_tokens // 16)
    table = np.arange(1, 1 + 3 * columns, dtype=np.int32).reshape(3, columns)
    rolled = memory.spec.first_local_block(group, num_tokens)
    local = np.arange(20, 23, dtype=np.int32)[:, None]
    local[:rolled] = 0
    expected = memory.pool[torch.from_numpy(table)], memory.pool[torch.from_numpy(local)]
    slot = memory.slots[0].clone()
    parked = memory.park([table, local], num_tokens, slot=0)
    assert parked.num_bytes == slot.numel() + memory.spec.page_bytes * (
        blocks * columns + blocks - rolled
    )

    memory.pool.zero_()  # so that what comes back came from the parked bytes
    memory.slots.zero_()
    new_table = table + 10
    new_local = local + 10
    new_local[:rolled] = 0
    first = min(shared_blocks, blocks)
    memory.unpark(parked, [new_table, new_local], first_block=first, slot=2)
    assert torch.equal(memory.slots[2], slot)
    back = memory.pool[torch.from_numpy(new_table)], memory.pool[torch.from_numpy(new_local)]
    assert torch.equal(back[0][first:blocks], expected[0][first:blocks])
    assert not back[0][:first].any() and not back[0][blocks:].any()
    assert torch.equal(back[1][rolled:blocks], expected[1][rolled:blocks])
    assert not back[1][:rolled].any() and not back[1][blocks:].any()
    assert not memory.pool[0].any()


@pytest.mark.parametrize(
    ("shape", "bytes_per_token"),
    [
        (KVShape(4, 8), 4 * (8 + 8) * 2),
        (KVShape(4, 8, value_dim=8), 4 * (8 + 8) * 2),
        (KVShape(4, 8, value_dim=3), 4 * (8 + 3) * 2),
        (KVShape(1, 576, value_dim=0), 576 * 2),
    ],
)
def test_bytes_per_token_count_keys_and_values(shape, bytes_per_token):
    spec = cache_spec_of([LayerCache(kv=shape)] * 2, HIDDEN, torch.bfloat16, 16)
    assert [group.bytes_per_token for group in spec.groups] == [bytes_per_token]
    assert spec.page_bytes == 2 * 16 * bytes_per_token


def test_groups_of_layers_with_different_shapes():
    """Each layer finds the pages of its own group, whatever lies between."""
    layers = MODELS["alternating"]
    memory = memory_of(layers)
    spec = memory.spec
    assert [(g.num_layers, g.bytes_per_token, g.window) for g in spec.groups] == [
        (2, 2 * 32 * 4, None),
        (10, 2 * 64 * 4, 40),
    ]
    # A page is one pair of a local layer, or two of a global one: nothing is left over.
    assert spec.pages_per_block == (1, 10)
    assert spec.page_bytes == 16 * 2 * 64 * 4
    assert memory.table_of_layer == {
        **{number: (0, number - 1 - number // 6) for number in range(1, 13)},
        6: (None, 0),
        12: (None, 0),
    }


STAGES = {
    "more layers of a group": (MODELS["alternating"], MODELS["alternating"][:5]),
    "other groups": (MODELS["four groups"], MODELS["chunks"]),
    "states alone beside attention": (MODELS["states alone"], MODELS["other values"]),
    "nothing beside something": (MODELS["nothing"], MODELS["latents"]),
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("order", [1, -1])
def test_invariant_7_stages_with_other_layers_follow_one_spec(stages, order):
    """Each stage has all its views inside of its pages, in columns of its own groups."""
    specs = [cache_spec_of(layers, HIDDEN, torch.float32, 16) for layers in stages[::order]]
    spec = common_spec(specs, attention_parity=300.0)
    assert spec.attention_parity == 300.0
    for layers in stages:
        memory = CachePool(spec, layers, HIDDEN, torch.float32, 20, 2, torch.device("cpu"))
        kv, states = parts(memory, layers)
        page_of = {table: 1 + i for i, table in enumerate({*memory.table_of_layer.values()})}
        written = [v[page_of[memory.table_of_layer[n]]] for n, views in kv for v in views] + states
        for value, view in enumerate(written, start=1):
            view.fill_(value)
        for value, view in enumerate(written, start=1):  # unless two of them overlap
            assert view.numel() == 0 or (view == value).all()
        for number, _ in kv:
            local, column = memory.table_of_layer[number]
            group = None if local is None else spec.local_groups[local]
            columns = spec.kv_pages_per_block if local is None else spec.pages_per_block[group]
            assert 0 <= column < columns
            shape = layers[number - 1].kv
            assert (local is not None) == shape.is_local
            if group is not None:
                assert spec.groups[group].reach == (shape.window or shape.chunk)


def test_a_common_spec_of_equal_ranks_is_their_own():
    for layers in MODELS.values():
        own = cache_spec_of(layers, HIDDEN, torch.bfloat16, 16, attention_parity=77.0)
        assert common_spec([own, own], 77.0) == own


def test_one_process_agrees_with_itself():
    own = cache_spec_of(MODELS["latents"], HIDDEN, torch.float32, 16)
    assert agree_on_spec(own, (0, 0, 0), 90.0, 3.0, ONE_RANK) == replace(own, attention_parity=30.0)
    assert agree_on_spec(own, (0, 0, 0), 90.0, 0.0, ONE_RANK) == own
