"""Router: where requests go. What replicas have is given as deltas."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_hybrid.inference.routing.prefix_hash import PrefixHash
from megatron_hybrid.inference.routing.restorable import Delta
from megatron_hybrid.inference.routing.router import (
    DECODE_TOKENS,
    GRID_TOKENS,
    MAX_NOTES,
    NOTE_DELTAS,
    Router,
)


def text(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length, dtype=np.int32)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def keys(tokens: np.ndarray, *positions: int, salt: str = "") -> dict[int, int]:
    return dict(zip(PrefixHash(salt).keys(tokens, positions), positions))


def delta(added: dict[int, int] | None = None, removed=(), pages=0, cleared=False) -> Delta:
    return Delta(pages, cleared, list(removed), added or {})


PREFIX = text(2048)
PROMPT = joined(PREFIX, text(52, 1))


def send(router: Router, name: object, tokens: np.ndarray, to: int | None = None, salt="") -> int:
    """Send a request, to a given replica or where the router chooses."""
    route = router.choose(tokens, salt)
    router.note_sent(name, route if to is None else replace(route, replica=to))
    return route.replica if to is None else to


def load(router: Router, number: int, queued: int = 0, decoding: int = 0) -> None:
    """Prompts of other texts on a replica."""
    for i in range(decoding):
        send(router, ("decoding", number, i), text(1, 50 + i), to=number)
        router.note_prefilled(("decoding", number, i))
    if queued:
        send(router, ("queued", number), text(queued, 99), to=number)


def test_there_must_be_a_replica():
    with pytest.raises(ValueError, match="num_replicas is 0"):
        Router(0)


def test_a_tie_goes_to_the_fewest_pages_then_to_the_least_number():
    router = Router(3)
    assert router.choose(PROMPT).replica == 0
    for number, pages in enumerate((9, 5, 5)):
        router.apply(number, delta(pages=pages))
    assert router.choose(PROMPT).replica == 1


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        # (position told, tokens queued, requests in decode) of two replicas
        pytest.param((0, 0, 0), (2048, 0, 0), 1, id="prefix wins"),
        pytest.param((500, 0, 0), (2048, 0, 0), 1, id="deeper prefix wins"),
        pytest.param((2048, 0, 0), (2048, 1, 0), 0, id="less queued wins"),
        pytest.param((0, 0, 0), (2048, 2047, 0), 1, id="prefix is worth its queue"),
        pytest.param((0, 0, 0), (2048, 2049, 0), 0, id="longer queue: spills"),
        pytest.param((2048, 0, 1), (2048, 0, 0), 1, id="fewer decodes win"),
        pytest.param((0, 0, 0), (2048, 0, 2048 // DECODE_TOKENS - 1), 1, id="prefix and decodes"),
        pytest.param((0, 0, 0), (2048, 0, 2048 // DECODE_TOKENS + 1), 0, id="decodes: spills"),
        # no replica is idle: 2100 tokens count twice, and as often again with one that waits
        pytest.param((0, 0, 1), (2048, 4100, 0), 1, id="all busy: prefix is worth more"),
        pytest.param((0, 0, 1), (2048, 4200, 0), 0, id="all busy: spills later"),
        pytest.param((0, 100, 0), (2048, 8200, 0), 1, id="all wait: prefix is worth still more"),
        pytest.param((0, 100, 0), (2048, 8400, 0), 0, id="all wait: spills still later"),
    ],
)
def test_the_least_cost_wins(first, second, chosen):
    router = Router(2)
    for number, (position, queued, decoding) in enumerate((first, second)):
        if position:
            router.apply(number, delta(keys(PREFIX, position)))
        load(router, number, queued, decoding)
    route = router.choose(PROMPT)
    assert route.replica == chosen
    assert route.restorable == (first[0], second[0])
    assert route.computed_tokens == len(PROMPT) - (first[0], second[0])[chosen]


def test_a_hot_prefix_spills_and_then_both_replicas_have_it():
    router = Router(2)
    router.apply(0, delta(keys(PREFIX, 2048)))
    sent_to = [send(router, i, joined(PREFIX, text(500, i))) for i in range(20)]
    assert sent_to[:5] == [0] * 5  # until the queue is longer than the prefix
    assert 1 in sent_to
    router.apply(1, delta(keys(PREFIX, 2048)))
    for i in range(20):
        router.note_prefilled(i)
        router.note_done(i)
    sent_to = [send(router, i, joined(PREFIX, text(500, i))) for i in range(100, 120)]
    assert sent_to == [0, 1] * 10


def test_choosing_changes_nothing():
    router = Router(2)
    router.apply(1, delta(keys(PREFIX, 2048)))
    assert len({router.choose(PROMPT).replica for _ in range(100)}) == 1
    assert router.choose(text(100, 5)).replica == 0


def test_salts_are_never_shared():
    router = Router(2)
    router.apply(1, delta(keys(PREFIX, 2048, salt="a")))
    send(router, 1, PROMPT, to=1, salt="a")
    router.note_done(1, text(10, 3))
    longer = joined(PROMPT, text(10, 3), text(10, 4))
    assert router.choose(longer, "a").restorable == (0, len(PROMPT) + 10)
    for other in ("", "b", "aa"):
        route = router.choose(longer, other)
        assert route.restorable == route.known == (0, 0) and route.replica == 0


class TestSingleFlight:
    def test_a_prompt_that_is_being_computed_counts_as_restorable(self):
        router = Router(2)
        send(router, "first", PROMPT, to=1)
        load(router, 0, queued=3000)
        route = router.choose(joined(PREFIX, text(60, 2)))
        assert route.replica == 1 and route.restorable == (0, 2048)

    def test_it_counts_down_to_the_grid(self):
        router = Router(2)
        send(router, "first", PROMPT, to=1)
        part = joined(PREFIX[: 2 * GRID_TOKENS + 7], text(60, 2))
        assert router.choose(part).restorable == (0, 2 * GRID_TOKENS)

    @pytest.mark.parametrize("ends", ["prefilled", "cancelled"])
    def test_it_ends_with_the_prefill(self, ends):
        """From then on the replica tells what it has saved; that it knows the text still counts."""
        router = Router(2)
        send(router, "first", PROMPT, to=1)
        if ends == "prefilled":
            router.note_prefilled("first")
        else:
            router.note_done("first")
        route = router.choose(joined(PREFIX, text(60, 2)))
        assert route.restorable == (0, 0) and route.known == (0, 2048)

    def test_two_of_one_text(self):
        router = Router(2)
        for name in "ab":
            send(router, name, PROMPT, to=1)
        router.note_prefilled("a")
        assert router.choose(PROMPT).restorable == (0, 2048)
        router.note_prefilled("b")
        assert router.choose(PROMPT).restorable == (0, 0)


class TestEndsOfAnswers:
    def test_the_next_turn_may_arrive_before_the_delta(self):
        router = Router(2)
        send(router, 1, PROMPT, to=1)
        router.note_prefilled(1)
        router.note_done(1, text(30, 5))
        turn = joined(PROMPT, text(30, 5), text(8, 6))
        assert router.choose(turn).restorable == (0, len(PROMPT) + 30)
        other = joined(PROMPT, text(29, 5), text(8, 7))
        assert router.choose(other).restorable == (0, 0)

    def test_the_note_ends(self):
        router = Router(2)
        send(router, 1, PROMPT, to=1)
        router.note_done(1, text(30, 5))
        turn = joined(PROMPT, text(30, 5), text(8, 6))
        for _ in range(NOTE_DELTAS):
            assert router.choose(turn).restorable[1] > 0
            router.apply(0, delta())
            router.apply(1, delta())
        assert router.choose(turn).restorable == (0, 0)

    def test_notes_are_bounded(self):
        router = Router(1)
        for i in range(MAX_NOTES + 1):
            send(router, i, np.array([i], np.int32))
            router.note_done(i, np.array([7], np.int32))
        assert router.choose(np.array([0, 7, 8], np.int32)).restorable == (0,)
        assert router.choose(np.array([1, 7, 8], np.int32)).restorable == (2,)


class TestKnownText:
    def test_text_without_a_state_counts_half(self):
        router = Router(2)
        send(router, 1, PROMPT, to=1)
        router.note_done(1)
        assert router.choose(PROMPT).replica == 1
        load(router, 1, queued=1025)
        assert router.choose(PROMPT).replica == 0

    def test_a_dropped_key_leaves_a_known_prefix(self):
        """The least recently sent goes first, its end before its start."""
        router = Router(2, max_keys=8)
        send(router, 1, PREFIX, to=1)
        assert router.choose(PREFIX).known == (0, 2048)
        send(router, 2, text(3 * GRID_TOKENS, 8), to=1)
        assert router.choose(PREFIX).known == (0, 5 * GRID_TOKENS)
        assert router.choose(PREFIX).restorable == (0, 5 * GRID_TOKENS)
        router.note_done(1)
        assert router.choose(PREFIX).restorable == (0, 0)


class TestReplicas:
    def test_what_was_removed_counts_no_more(self):
        router = Router(2)
        told = keys(PREFIX, 500, 2048)
        router.apply(1, delta(told))
        router.apply(1, delta(removed=[key for key, p in told.items() if p == 2048]))
        assert router.choose(PROMPT).restorable == (0, 500)

    @pytest.mark.parametrize("how", ["cleared", "delta"])
    def test_a_cleared_replica_has_nothing(self, how):
        router = Router(2)
        router.apply(0, delta(keys(PREFIX, 500)))
        router.apply(1, delta(keys(PREFIX, 500, 2048)))
        send(router, 1, PROMPT, to=1)
        router.note_done(1, text(5, 2))
        if how == "cleared":
            router.cleared(1)
        else:
            router.apply(1, delta(keys(PREFIX, 100), cleared=True))
        route = router.choose(joined(PROMPT, text(5, 2)))
        assert route.restorable == (500, 0 if how == "cleared" else 100)
        assert route.known == (0, 0)

    def test_requests_under_way_stay(self):
        router = Router(2)
        send(router, 1, PROMPT, to=0)
        router.cleared(0)
        assert router.choose(PROMPT).restorable == (2048, 0)  # it is computed anew
        assert router.choose(text(5)).replica == 1
        router.note_prefilled(1)
        router.note_done(1, text(5))
        assert router.choose(text(5)).replica == 0

    def test_keys_that_no_longer_hold_cost_time_only(self):
        """A replica evicts and does not tell: requests go on being served and accounted for."""
        router = Router(2)
        router.apply(1, delta(keys(PREFIX, 2048)))
        for i in range(50):
            assert send(router, i, PROMPT) == 1
            router.note_prefilled(i)
            router.note_done(i, text(5, i))
            router.apply(1, delta(removed=[123]))  # unknown here
        assert router.choose(text(9, 3)).replica == 0

    def test_memory_is_bounded_and_the_least_recently_used_key_goes(self):
        router = Router(1, max_keys=2)
        texts = [text(300, i) for i in range(3)]
        for tokens in texts[:2]:
            router.apply(0, delta(keys(tokens, 200)))
        send(router, "use", texts[0])
        router.note_done("use")
        router.apply(0, delta(keys(texts[2], 201)))
        assert [router.choose(tokens).restorable for tokens in texts] == [(200,), (0,), (201,)]
        assert router._lengths == [200, 201]


def test_requests_need_names_of_their_own():
    router = Router(1)
    send(router, 1, PROMPT)
    with pytest.raises(ValueError, match="request 1 is under way"):
        send(router, 1, PROMPT)
    router.note_done(1)
    with pytest.raises(KeyError):
        router.note_done(1)
    send(router, 1, PROMPT)
    router.note_prefilled(1)
    with pytest.raises(KeyError):
        router.note_prefilled(1)


def test_loads_return_to_zero():
    router, random = Router(3), np.random.default_rng(0)
    under_way = []
    for i in range(300):
        send(router, i, joined(PREFIX[: int(random.integers(0, 2048))], text(20, i)))
        under_way.append(i)
        while len(under_way) > random.integers(0, 20):
            name = under_way.pop(int(random.integers(len(under_way))))
            if random.random() < 0.7:
                router.note_prefilled(name)
            router.note_done(name, text(3, i) if random.random() < 0.5 else None)
    for name in under_way:
        router.note_done(name)
    for replica in router._replicas:
        assert replica.queued_tokens == 0 and not replica.prefilling and not replica.decoding
        assert not any(replica.sent.values())
    assert not router._sent_to
