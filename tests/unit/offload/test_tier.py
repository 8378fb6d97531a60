"""A tier's records against brute force: what is kept can be used, and the least valuable goes."""

from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_hybrid.cache.pages.spec import CacheSpec, KVGroup
from megatron_hybrid.offload.prefix_keys import PrefixKeys
from megatron_hybrid.offload.tier import Tier, state_record_pages

FULL, WINDOW = KVGroup(2, 64), KVGroup(2, 64, window=24)
HYBRID = CacheSpec(16, (FULL,), state_bytes=3000, hidden_bytes=64)
SPECS = {
    "hybrid": HYBRID,
    "pure attention": CacheSpec(16, (FULL,), state_bytes=0, hidden_bytes=64),
    "hybrid with window": CacheSpec(16, (WINDOW, FULL), state_bytes=2000, hidden_bytes=64),
    "state only": CacheSpec(16, (), state_bytes=3000, hidden_bytes=64),
}


class Bytes:
    """Store and source in one: the data of a record is what it stands for."""

    def __init__(self):
        self.data = {}
        self.is_full = False

    def accepts(self):
        return not self.is_full

    def put(self, record, data):
        assert record.key not in self.data
        self.data[record.key] = data

    def get(self, record):
        return self.data[record.key]

    def drop(self, record):
        del self.data[record.key]


class Prefix:
    """A source that names what it gives."""

    def __init__(self, tokens, salt=""):
        self.tokens, self.salt = list(tokens), salt
        self.copied = []

    def __call__(self, wanted):
        blocks = [index for index in wanted if index < len(self.tokens) // 16]
        self.copied += blocks
        state = [("state", self.salt, *self.tokens)] * (len(wanted) - len(blocks))
        return [(self.salt, *self.tokens[: 16 * index + 16]) for index in blocks] + state


def keep(tier, tokens, spec=HYBRID, salt="", saved=None, uses=1):
    """Offers what a prefix leaves behind; its source, or None if it was refused."""
    keys, source = PrefixKeys(np.array(tokens, dtype=np.int32), salt, 16), Prefix(tokens, salt)
    state = {}
    if spec.needs_state:
        saved = len(tokens) if saved is None else saved
        position = len(tokens)
        state = {"state": keys.state(position), "position": position, "saved_work": saved}
    done = tier.keep(keys.blocks(len(tokens) // 16), source, uses=uses, **state)
    return source if done else None


def find(tier, tokens, salt=""):
    """Tokens that a prompt can go on from."""
    record = tier.find(PrefixKeys(np.array(tokens, dtype=np.int32), salt, 16))
    return record.position if record else 0


def some_tokens(length, pattern):
    return [(pattern >> i // 8 % 4) & 1 for i in range(length)]


class TierMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(SPECS)), pages=st.integers(1, 60))
    def make(self, name, pages):
        self.spec, self.store, self.left = SPECS[name], Bytes(), []
        capacity = pages * self.spec.page_bytes
        self.tier = Tier("host", self.spec, capacity, self.store)
        self.tier.on_evict = self.leaves
        self.prefixes = []
        self.pinned = []

    def leaves(self, record):
        assert record.key in self.store.data and not record.pins
        self.left.append(record)

    @rule(
        length=st.integers(16, 90),
        pattern=st.integers(0, 15),
        salt=st.sampled_from(["", "", "other"]),
        saved=st.integers(1, 90),
    )
    def keep(self, length, pattern, salt, saved):
        tokens = some_tokens(length, pattern)
        before = set(self.store.data)
        source = keep(self.tier, tokens, self.spec, salt, saved=saved)
        if source is None:
            assert set(self.store.data) == before
            return
        self.prefixes.append((salt, tokens))
        reached = length if self.spec.needs_state else length // 16 * 16
        assert find(self.tier, tokens, salt) == reached
        assert find(self.tier, [*tokens, 5, 5], salt) == reached

    @precondition(lambda self: self.prefixes)
    @rule(which=st.integers(0, 1000), pin=st.booleans())
    def use(self, which, pin):
        salt, tokens = self.prefixes[which % len(self.prefixes)]
        record = self.tier.find(PrefixKeys(np.array(tokens, dtype=np.int32), salt, 16))
        if record is not None:
            self.tier.count_use(record)
            if pin:
                self.tier.pin(record)
                self.pinned.append(record)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 1000))
    def unpin(self, which):
        self.tier.unpin(self.pinned.pop(which % len(self.pinned)))

    @precondition(lambda self: hasattr(self, "tier") and self.tier.num_records)
    @rule(which=st.integers(0, 1000))
    def damage(self, which):
        records = self.tier.records()
        self.tier.remove(records[which % len(records)])

    @invariant()
    def all_adds_up(self):
        if not hasattr(self, "tier"):
            return
        records = self.tier.records()
        assert {record.key for record in records} == set(self.store.data)
        assert self.tier.used_bytes == sum(record.num_bytes for record in records)
        assert self.tier.used_bytes <= self.tier.capacity_bytes
        assert self.tier.num_states == sum(record.is_state for record in records)
        here = set(map(id, records))
        for record in records:
            children = [other for other in records if other.parent is record]
            assert record.parent is None or id(record.parent) in here
            assert record.num_children == len(children)
            states_at = Counter(child.position for child in children if child.is_state)
            assert record.states_at == states_at
            if self.spec.needs_state and not record.is_state:
                assert children or record.pins, "blocks that lead nowhere"

    @invariant()
    def what_is_found_is_what_is_there(self):
        """Against a search through the names of all data."""
        if not hasattr(self, "tier"):
            return
        data = set(self.store.data.values())
        for salt, tokens in self.prefixes[-5:]:
            blocks = 0
            while (salt, *tokens[: 16 * blocks + 16]) in data and 16 * blocks + 16 <= len(tokens):
                blocks += 1
            best = 0 if self.spec.needs_state else 16 * blocks
            for position in range(16, len(tokens) + 1):
                if ("state", salt, *tokens[:position]) in data and position // 16 <= blocks:
                    best = max(best, position)
            assert find(self.tier, tokens, salt) == best


TierMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTierMachine = TierMachine.TestCase


def bytes_of(spec, *lengths):
    """Bytes of separate prefixes with a state at the end of each."""
    pages = sum(
        state_record_pages(spec, length) + length // 16 * spec.kv_pages_per_block
        for length in lengths
    )
    return pages * spec.page_bytes


def test_what_is_there_is_not_copied_again():
    tier = Tier("host", HYBRID, 1 << 30, Bytes())
    tokens = some_tokens(100, 5)
    assert keep(tier, tokens[:40]).copied == [0, 1]
    assert keep(tier, tokens).copied == [2, 3, 4, 5]
    assert keep(tier, tokens).copied == []
    assert (tier.num_states, tier.num_blocks) == (2, 6)


def test_the_state_that_saves_least_per_byte_is_evicted_first():
    prompts = {16 + i: [i] * 40 for i in range(4)}
    tier = Tier("host", HYBRID, bytes_of(HYBRID, 40, 40, 40), Bytes())
    for saved, tokens in zip((30, 10, 20), prompts.values()):
        assert keep(tier, tokens, saved=saved)
    assert keep(tier, [9] * 40, saved=25)
    assert [find(tier, tokens) for tokens in prompts.values()][:3] == [40, 0, 40]
    assert keep(tier, [8] * 40, saved=5) is None  # worth less than any that is here
    assert tier.num_evicted == 1


@pytest.mark.parametrize("name", ["hybrid", "pure attention"])
def test_what_is_refused_costs_nothing(name):
    """Something worth more is in the way, behind much that is worth less."""
    spec = SPECS[name]
    store = Bytes()
    tier = Tier("host", spec, 1 << 30, store)
    keep(tier, [100] * 1600, spec, saved=10**6)
    tier.pin(tier.find(PrefixKeys(np.full(1600, 100, dtype=np.int32), "", 16)))
    for token in range(10):
        assert keep(tier, [token] * 40, spec, saved=10)
    tier.capacity_bytes = tier.used_bytes
    before = dict(store.data)
    assert keep(tier, [101] * 1600, spec, saved=10**5) is None
    assert store.data == before and not tier.num_evicted
    assert keep(tier, [102] * 100, spec, saved=10**5)  # room for this one can be made
    assert find(tier, [100] * 1600) == 1600 and tier.num_evicted > 0
    for token in range(103, 120):
        assert keep(tier, [token] * 40, spec, saved=10**5)
    assert tier.used_bytes == sum(record.num_bytes for record in tier.records())


def test_a_lookup_hashes_each_position_once(monkeypatch):
    """However many prompts have their full blocks in common."""
    tier = Tier("host", HYBRID, 1 << 30, Bytes())
    for token in range(60):
        assert keep(tier, [0] * 16 + [token] * (1 + token % 5))
    hashed = []
    state = PrefixKeys.state
    monkeypatch.setattr(
        PrefixKeys, "state", lambda keys, position: hashed.append(position) or state(keys, position)
    )
    assert find(tier, [0] * 16 + [70] * 4) == 0
    assert sorted(hashed) == [17, 18, 19, 20]
    assert find(tier, [0] * 16 + [7] * 6) == 19


def test_what_nobody_returns_to_does_not_keep_others_out_for_ever():
    """Full of states that save ten times as much each, of which one is used now and then."""
    tier = Tier("host", HYBRID, bytes_of(HYBRID, *[40] * 4), Bytes())
    for token in range(4):
        keep(tier, [token] * 40, saved=100)
    kept = []
    for token in range(100, 400):
        if token % 10 == 0:
            tier.count_use(tier.find(PrefixKeys(np.full(40, 0, dtype=np.int32), "", 16)))
        if keep(tier, [token] * 40, saved=10):
            kept.append(token)
    assert 110 < kept[0] < 160
    assert [find(tier, [token] * 40) for token in range(4)] == [40, 0, 0, 0]
    assert find(tier, [399] * 40) == 40


def test_what_is_refused_for_the_second_of_two_that_would_have_to_go_gets_in_at_last():
    """The clock moves on with every refusal; the first of the two must not turn it back."""
    tier = Tier("host", HYBRID, bytes_of(HYBRID, 40, 40), Bytes())
    for token, saved in ((1, 1), (2, 1000)):
        keep(tier, [token] * 40, saved=saved)
    tier.capacity_bytes = tier.used_bytes
    offers = (keep(tier, [token] * 72, saved=100) for token in range(10, 200))
    assert any(offer is not None for offer in offers)


def test_a_tier_below_that_fails_costs_nothing_but_its_records():
    tier = Tier("host", HYBRID, bytes_of(HYBRID, 40, 40), Bytes())
    tier.on_evict = Mock(side_effect=ValueError("a disk"))
    for token in (1, 2):
        keep(tier, [token] * 40, saved=1)
    with pytest.raises(ValueError, match="a disk"):
        keep(tier, [3] * 40, saved=10)
    tier.on_evict = lambda record: None
    assert keep(tier, [4] * 72, saved=1000)  # both can still go
    assert tier.num_states == 1


def test_in_pure_attention_kv_is_evicted_from_its_ends():
    spec = SPECS["pure attention"]
    block = spec.kv_pages_per_block * spec.page_bytes
    tier = Tier("host", spec, 4 * block, Bytes())
    keep(tier, [1] * 64, spec)
    keep(tier, [2] * 16, spec)
    assert (find(tier, [1] * 64), find(tier, [2] * 64)) == (48, 16)


@pytest.mark.parametrize("name", SPECS)
def test_a_store_that_takes_no_more_changes_nothing(name):
    spec, store = SPECS[name], Bytes()
    tier = Tier("disk", spec, 1 << 30, store)
    assert keep(tier, [1] * 40, spec)
    store.is_full = True
    before = dict(store.data)
    assert keep(tier, [2] * 40, spec) is None
    assert keep(tier, [1] * 40, spec)  # it is here
    assert store.data == before


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_source_that_finds_no_memory_is_a_refusal(caplog, error):
    store = Bytes()
    tier = Tier("host", HYBRID, bytes_of(HYBRID, 100, 40), store)
    keep(tier, [1] * 40)
    before = dict(store.data)
    for tokens in ([1] * 100, [2] * 30):
        keys = PrefixKeys(np.array(tokens, dtype=np.int32), "", 16)
        source, end = Mock(side_effect=error), len(tokens)
        blocks = keys.blocks(end // 16)
        assert not tier.keep(blocks, source, state=keys.state(end), position=end, saved_work=1)
    assert store.data == before and not any(record.pins for record in tier.records())
    assert tier.num_without_memory == 2
    (logged,) = caplog.messages
    assert logged.startswith("no memory to copy items evicted from the pool (")
    assert keep(tier, [3] * 140, saved=10**6)  # all that is old can go
    assert find(tier, [1] * 40) == 0


def test_a_source_that_is_wrong_is_an_error():
    wrong = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access"))
    tier = Tier("host", HYBRID, bytes_of(HYBRID, 100), Bytes())
    keys = PrefixKeys(np.ones(40, dtype=np.int32), "", 16)
    with pytest.raises(RuntimeError, match="illegal"):
        tier.keep(keys.blocks(2), wrong, state=keys.state(40), position=40, saved_work=1)
    assert not tier.num_records and not tier.num_without_memory


@pytest.mark.parametrize("name", SPECS)
def test_what_was_removed_and_came_again_is_another_record(name):
    """A fetch may still hold what was damaged, while its prompt is computed and kept again."""
    spec = SPECS[name]
    tier = Tier("host", spec, bytes_of(spec, 48, 48), Bytes())
    keep(tier, [1] * 48, spec)
    before = tier.find(PrefixKeys(np.full(48, 1, dtype=np.int32), "", 16))
    tier.pin(before)
    tier.remove(before.chain()[0])
    assert find(tier, [1] * 48) == 0
    tier.remove(before.chain()[0])  # a second fetch met the same damage
    assert keep(tier, [1] * 48, spec)
    tier.remove(before)
    tier.unpin(before)
    assert find(tier, [1] * 48) == 48
    for token in range(2, 9):  # all that is old has to go
        assert keep(tier, [token] * 48, spec)
    assert tier.used_bytes == sum(record.num_bytes for record in tier.records())
    assert find(tier, [1] * 48) == 0 and find(tier, [8] * 48) == 48


def test_what_can_not_fit_behind_its_own_blocks_costs_nothing():
    deeper = [*[1] * 48, *[3] * 160]
    tier = Tier("host", HYBRID, bytes_of(HYBRID, len(deeper)) - HYBRID.page_bytes, Bytes())
    assert keep(tier, [1] * 48, saved=1) and keep(tier, [2] * 48, saved=1)
    assert keep(tier, deeper, saved=10**6) is None
    assert find(tier, [1] * 48) == find(tier, [2] * 48) == 48
