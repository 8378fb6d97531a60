"""KV events: who applies them holds exactly the blocks that the cache can resume."""

import logging
import sys
import threading

import msgpack
import numpy as np
import pytest
import torch
import zmq
from reference import greedy, random_tokens, tiny_engine, tiny_model
from simulator import SPECS, Simulator
from waiting import wait_until

from megatron_hybrid import AsyncEngine, cli
from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.serving import kv_publisher
from megatron_hybrid.serving.kv_events import BlockEvents
from megatron_hybrid.serving.kv_publisher import KvPublisher

SIZE = 16
VLLM_STORED = {
    "type": "BlockStored",
    "block_hashes": [15760518052499183552],
    "parent_block_hash": None,
    "token_ids": [151644, 872, 198, 9064, 374, 279, 6722, 315, 5616, 30, 151645, 198, 151644],
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None],
}
"""An event of vLLM 0.26, as a user of it has reported it, without what may be left out."""


class Consumer:
    """Applies events, and refuses those that do not follow from the others."""

    def __init__(self):
        self.blocks: dict[int, tuple[int | None, tuple, str]] = {}

    def take(self, events: list[dict]) -> None:
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    del self.blocks[block]
            else:
                self._store(event)

    def _store(self, event: dict) -> None:
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        assert len(tokens) == SIZE * len(event["block_hashes"]) and event["block_size"] == SIZE
        for i, (block, extra) in enumerate(
            zip(event["block_hashes"], event["extra_keys"], strict=True)
        ):
            assert block not in self.blocks and (parent is None or parent in self.blocks)
            assert parent is None or extra is None  # the salt is a key of first blocks alone
            salt = extra[0] if extra else "" if parent is None else self.blocks[parent][2]
            self.blocks[block] = parent, tuple(tokens[i * SIZE : (i + 1) * SIZE]), salt
            parent = block

    def prefixes(self) -> set[tuple[str, tuple]]:
        return {(self.blocks[block][2], self._tokens(block)) for block in self.blocks}

    def _tokens(self, block: int | None) -> tuple:
        if block is None:
            return ()
        parent, tokens, _ = self.blocks[block]
        return self._tokens(parent) + tokens


def resumable(cache: PrefixCache, sequences: set[tuple[str, tuple]]) -> set[tuple[str, tuple]]:
    """Whole blocks that a prompt would skip, of all sequences that ever were."""
    found = set()
    for salt, tokens in sequences:
        prompt = np.array([*tokens, 999], dtype=np.int32)
        skipped = cache.match(prompt, salt).skipped_tokens
        found |= {(salt, tokens[:end]) for end in range(SIZE, skipped + 1, SIZE)}
    return found


class Traffic:
    """Random requests that part from each other, and all that makes a cache forget."""

    def __init__(self, name: str, seed: int, num_pages: int = 30):
        self.random = np.random.default_rng(seed)
        self.cache = PrefixCache(SPECS[name], num_pages)
        self.cache.policy.opportunistic_tokens = 20
        self.simulator = Simulator(self.cache)
        self.sequences: set[tuple[str, tuple]] = set()

    def step(self) -> None:
        random, did = self.random, int(self.random.integers(30))
        if did == 0:
            self.cache.clear()
        elif did < 4:
            self.cache.evict(int(random.integers(1, 20)))
        else:
            self._request()

    def _request(self) -> None:
        random = self.random
        salt, tokens = str(["", "", "tenant", "tenänt"][random.integers(4)]), ()
        if self.sequences and random.integers(4):
            before = sorted(self.sequences)
            salt, tokens = before[random.integers(len(before))]
            tokens = tokens[: int(random.integers(len(tokens) + 1))]
        prompt = [*tokens, *random.integers(3, size=random.integers(1, 50)).tolist()][:120]
        simulator, room = self.simulator, int(random.integers(1, 25))
        running = simulator.start(prompt, salt, chunk=40, room=room)
        if running is None:
            return
        leaves = not random.integers(5)
        while running.done < len(prompt):
            if not simulator.forward(running, min(40, len(prompt) - running.done)) or leaves:
                break
        else:
            for token in random.integers(3, size=room).tolist():
                running.tokens.append(token)
                if not simulator.forward(running, 1):
                    break
        self.sequences.add((salt, tuple(running.tokens)))
        simulator.finish(running, save=not leaves)


@pytest.mark.parametrize("name", SPECS)
def test_a_consumer_holds_what_the_cache_can_resume(name):
    consumer, num_removals, most = Consumer(), 0, 0
    for seed in range(2):  # the second process takes the place of the first, which was killed
        traffic = Traffic(name, seed)
        events = BlockEvents(traffic.cache)
        traffic.cache.watch(events)
        for _ in range(24):
            traffic.step()
            batch = events.take(0)
            consumer.take(batch)
            held = consumer.prefixes()
            assert held == resumable(traffic.cache, traffic.sequences)
            late = Consumer()
            late.take(events.all())
            assert late.blocks == consumer.blocks
            num_removals += sum(event["type"] == "BlockRemoved" for event in batch)
            most = max(most, len(held))
    assert num_removals > 6 and most > 8
    events.end()
    traffic.cache.clear()  # nobody is told
    batch = events.take(0)
    consumer.take(batch)
    assert events.has_ended and not consumer.blocks and not events.take(0)
    assert batch == [{"type": "AllBlocksCleared"}]


def test_events_have_the_fields_of_vllm():
    traffic = Traffic("hybrid", 0)
    events = BlockEvents(traffic.cache)
    traffic.cache.watch(events)
    traffic.simulator.run([1] * 40, salt="tenant")
    cleared, stored = events.take(0)
    assert cleared == {"type": "AllBlocksCleared"}
    assert list(stored) == list(VLLM_STORED)
    for field in ("type", "parent_block_hash", "block_size", "lora_id", "medium", "lora_name"):
        assert stored[field] == VLLM_STORED[field]
    assert stored["extra_keys"] == [["tenant"], None] and stored["token_ids"] == [1] * 32
    traffic.cache.evict(80)
    (removed,) = events.take(0)
    assert removed["type"] == "BlockRemoved" and removed["medium"] == "GPU"
    assert sorted(removed["block_hashes"]) == sorted(stored["block_hashes"])


@pytest.mark.parametrize("mode", ["off", "memory_only"])
def test_a_mode_in_which_nothing_is_resumed_has_no_events(mode):
    with pytest.raises(ValueError, match=f"'{mode}': nothing can be resumed.*use 'restore'"):
        BlockEvents(PrefixCache(SPECS["hybrid"], 90, mode))


async def test_an_engine_tells_what_its_requests_can_resume_and_forgets_it_with_its_weights():
    model = tiny_model("MG*-")
    consumer = Consumer()
    async with AsyncEngine(model, None, tiny_engine(model).config) as engine:
        events = await engine.watch_cache(BlockEvents)
        for forget in (engine.clear_cache, engine.update_weights, engine.clear_cache):
            prompt = random_tokens(100, seed=len(consumer.blocks))
            result = await engine.generate(prompt, greedy(30), RequestOptions(salt="tenant"))
            tokens = [*prompt, *result.token_ids]
            explained = await engine.explain(tokens, salt="tenant")
            consumer.take(events.take(0))
            end = explained.match.skipped_tokens // SIZE * SIZE
            assert end >= 96
            assert ("tenant", tuple(tokens[:end])) in consumer.prefixes()
            with torch.no_grad():
                next(model.parameters()).add_(0.1)
            await forget()
            consumer.take(events.take(0))
            assert not consumer.blocks


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--kv-events-topic", "a"], "--kv-events-topic need --kv-events-endpoint"),
        (["--kv-events-endpoint", "5557"], "--kv-events-endpoint 5557 cannot be used: Invalid"),
        (
            ["--kv-events-endpoint", "inproc://a", "--kv-events-replay-endpoint", "inproc://a"],
            "--kv-events-replay-endpoint inproc://a cannot be used: Address already in use",
        ),
        (["--kv-events-endpoint", "inproc://a", "--mode", "off"], "use 'restore' (--mode restore)"),
    ],
)
def test_endpoints_that_cannot_be_used_are_refused_before_the_model_is_loaded(
    arguments, message, capsys, monkeypatch
):
    monkeypatch.setattr("megatron_hybrid.serving.run.log_lines", lambda rank: None)
    assert cli.main(["serve", "/nowhere", "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_zeromq_the_remedy_is_told(monkeypatch, capsys):
    monkeypatch.setattr("megatron_hybrid.serving.run.log_lines", lambda rank: None)
    monkeypatch.delitem(sys.modules, "megatron_hybrid.serving.kv_publisher")
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert cli.main(["serve", "/nowhere", "--port", "0", "--kv-events-endpoint", "inproc://a"]) == 2
    assert "needs pip install -e '.[kv-events]'" in capsys.readouterr().err


class Reader(Consumer):
    """Reads as llm-d's picker does: numbers without a gap, and of a replay exactly what it asked
    for. After one without that it knows nothing, until it is told all."""

    def __init__(self, context: zmq.Context, publisher: KvPublisher):
        super().__init__()
        self.publisher, self._context = publisher, context
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"kv@pod@model")
        self.socket.connect(publisher.endpoint)
        self.last: int | None = None
        self.is_lost, self.num_replayed = True, 0

    def knows_all(self) -> bool:
        while self.socket.poll(20):
            topic, number, payload = self.socket.recv_multipart()
            number = int.from_bytes(number, "big")
            if self.last is None or number > self.last + 1:
                self._ask(0 if self.last is None else self.last + 1)
            if self.last is None or number == self.last + 1:
                self._apply(topic, number, payload)
        return not self.is_lost and self.last == self.publisher._next - 1

    def _apply(self, topic: bytes, number: int, payload: bytes) -> None:
        seconds, events, rank = msgpack.unpackb(payload)
        assert topic == b"kv@pod@model" and seconds > 1e9 and rank == 0
        self.last = number
        kinds = [event["type"] for event in events]
        if self.is_lost and "AllBlocksCleared" in kinds:
            self.is_lost, events = False, events[kinds.index("AllBlocksCleared") :]
        self.take([] if self.is_lost else events)

    def _ask(self, first: int) -> None:
        expected = first
        with self._context.socket(zmq.DEALER) as client:
            client.connect(self.publisher.replay_endpoint)
            client.send_multipart((b"", b"much"))  # is ignored
            client.send_multipart((b"", first.to_bytes(8, "big")))
            wait_until(lambda: self.publisher._turn(0) or client.poll(10))
            while (frames := client.recv_multipart())[3]:
                assert frames[0] == b"" and frames[2] == expected.to_bytes(8, "big")
                self._apply(frames[1], expected, frames[3])
                expected += 1
        assert frames == [b"", b"", b"\xff" * 8, b""]
        self.num_replayed += expected - first
        if expected == first:
            self.last, self.is_lost, _ = None, True, self.blocks.clear()


def test_readers_catch_up_after_gaps_and_a_restart_on_the_same_port(monkeypatch):
    where, topic = "tcp://127.0.0.1:*", "kv@pod@model"
    monkeypatch.setattr(kv_publisher, "KEPT_BATCHES", 8)
    places, readers = (where, where), []
    with zmq.Context() as context:
        for seed, num_steps in ((0, 20), (1, 50)):  # the second has sent more than the first had
            traffic, publisher = Traffic("hybrid", seed), KvPublisher(*places, topic)
            publisher._events = events = BlockEvents(traffic.cache)
            traffic.cache.watch(events)

            def step(traffic=traffic, publisher=publisher):
                traffic.step()
                publisher._turn(0)

            def is_told(step=step):
                step()
                return all([reader.knows_all() for reader in readers])

            for reader in readers:
                reader.publisher = publisher
            for _ in range(num_steps):
                step()
            readers.append(Reader(context, publisher))  # when the first batches are gone
            wait_until(is_told)
            for least in (0, 9):  # batches that are lost; all that is kept has the first
                number, before = readers[0].last, readers[0].num_replayed
                while publisher._next <= readers[0].last + 1 + least:
                    step()
                while number < publisher._next - 1:
                    number = int.from_bytes(readers[0].socket.recv_multipart()[1], "big")
                wait_until(is_told)
                assert (readers[0].num_replayed > before) is not bool(least)
            for reader in readers:
                assert reader.prefixes() == resumable(traffic.cache, traffic.sequences)
            places = publisher.endpoint, publisher.replay_endpoint
            if seed:
                publisher.begin(events)
                publisher.close()
                wait_until(lambda: all(reader.knows_all() for reader in readers))
                assert not any(reader.blocks for reader in readers)
            publisher._context.destroy(linger=0)  # the first is killed: it tells nobody
        context.destroy(linger=0)


class OddEvents(BlockEvents):
    """No format has them."""

    def take(self, seconds):
        return [{**event, "hash": object()} for event in super().take(seconds)]


def test_a_failure_is_logged_and_the_engine_queues_no_more(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron_hybrid"), "propagate", True)
    traffic = Traffic("hybrid", 0)
    events = OddEvents(traffic.cache)
    traffic.cache.watch(events)
    with KvPublisher("inproc://events") as publisher:
        publisher.begin(events)
        traffic.simulator.run([1] * 40)
        wait_until(lambda: all(one.name != "kv-events" for one in threading.enumerate()))
        assert "KV events end here" in caplog.text and "can not serialize" in caplog.text
        events.take(0)
        traffic.simulator.run([2] * 40)
        traffic.cache.clear()
        assert events.take(0) == []
