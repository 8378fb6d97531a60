"""Steps of decodes as graphs, on a CPU: a recorder takes the place of capture and replay."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from differential import RandomRun
from drafted import Oracle, draft_with, poison_rejected
from graph_recorder import EVERY_LAYER, RecordedGraph, recorded_graphs
from grouped_experts import grouped_experts
from matrix import matrix_rows
from reference import greedy, greedy_tokens, is_greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker import allocation, graph_runner
from megatron_hybrid.inference.worker.graph_runner import sizes_up_to

MODEL = tiny_model("M*GW-")
PROMPTS = [random_tokens(70), random_tokens(9, seed=1), random_tokens(33, seed=2)]


@pytest.fixture(autouse=True)
def graphs():
    with recorded_graphs():
        yield


@pytest.mark.parametrize("most", [1, 3, 8, 50, 64, 100, 256])
def test_sizes_are_few_and_little_of_a_step_is_filled_up(most):
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and len(sizes) <= 20
    for decodes in range(1, most + 1):
        size = next(size for size in sizes if size >= decodes)
        rows = -(-decodes // 8) * 8
        assert size <= (rows if most <= 64 else 1.25 * rows)


@pytest.mark.parametrize("pattern", EVERY_LAYER)
def test_replayed_decodes_give_the_tokens_of_launched_ones(pattern):
    """Greedy and drawn ones, of requests that end at different steps, in every kind of layer."""
    model = tiny_model(pattern)
    params = [greedy(12), SamplingParams(seed=1, num_tokens_to_generate=5), greedy(9)]
    with grouped_experts() if {"E", "B"} & set(pattern) else nullcontext():
        engines = [tiny_engine(model, cuda_graphs=on) for on in (False, True)]
        launched, replayed = (
            [result.token_ids for result in engine.generate(PROMPTS, params)] for engine in engines
        )
    assert replayed == launched
    stats = engines[1].stats()
    assert stats["graphs"] == 7 and stats["graph_steps"] >= 8
    assert engines[0].stats()["graph_steps"] == 0


@pytest.mark.parametrize(
    "pattern",
    matrix_rows(["M*GW-", "S*CJ", "+E", "K-", "H", "L-", "Z", "P*", "B", "QRUV"], "M*GW-"),
)
def test_replayed_decodes_with_drafts_give_the_tokens_of_launched_ones(pattern):
    """Requests with all drafts, with some and with none in a step, right ones and wrong ones; what
    is behind them is NaN."""
    model = tiny_model(pattern)
    params = [greedy(26), SamplingParams(seed=1, num_tokens_to_generate=7), greedy(9)]
    with grouped_experts() if {"E", "B"} & set(pattern) else nullcontext():
        plain = tiny_engine(model).generate(PROMPTS, params)
        expected = [result.token_ids for result in plain]
        engine = tiny_engine(model, cuda_graphs=True, speculation="lookup")
        draft_with(engine, Oracle(dict(enumerate(expected)), 0.3))
        poison_rejected(engine)
        found = engine.generate(PROMPTS, params)
    assert [result.token_ids for result in found] == expected
    stats, graphs = engine.stats(), engine.runner.graphs._graphs
    assert 0 < stats["draft_tokens_accepted"] < stats["draft_tokens"]
    assert stats["graph_steps"] >= 6 and {(4, 4), (1, 4)} <= graphs.keys()


@pytest.mark.parametrize("pattern", EVERY_LAYER)
def test_prompts_in_pieces_have_the_bits_of_launched_ones(pattern):
    """Whole ones, and the rest behind a prefix, whose states are saved and restored, also beside
    decodes; of more rows than there are graphs for they are launched."""
    model, shared = tiny_model(pattern), random_tokens(50, seed=7)
    ends = [random_tokens(count, seed=count) for count in (5, 17, 40, 100)]
    params = SamplingParams(
        num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=True
    )

    def answers(engine):
        engine.add_request(random_tokens(9), greedy(30))
        found = [engine.generate([shared + end], params)[0] for end in [[], *ends, *ends]]
        return [(*each.token_ids, *each.log_probs, each.prefix.skipped_tokens) for each in found]

    with grouped_experts() if {"E", "B"} & set(pattern) else nullcontext():
        engines = [tiny_engine(model, cuda_graphs=on) for on in (False, True)]
        runner, launched = engines[1].runner, []
        begin_step = runner.context.begin_step
        runner.context.begin_step = lambda *a, **k: (launched.append(k), begin_step(*a, **k))[1]
        plain, replayed = map(answers, engines)
    assert replayed == plain and max(skipped for *_, skipped in replayed) >= 49
    in_pieces = [each["padded_to"] for each in launched if each.get("padded_to")]
    assert sorted(set(in_pieces)) == [16, 40, 80]
    assert len({key[0] for key in runner.graphs._rooms}) <= 8  # of all layers


def test_steps_with_drafts_beyond_the_budget_of_a_graph_are_launched():
    """A graph's rows are as many as a step's, at most; a step of few drafts may have more
    decodes."""
    prompts = [random_tokens(9, seed) for seed in range(5)]
    expected = [r.token_ids for r in tiny_engine(MODEL).generate(prompts, greedy(8))]
    engine = tiny_engine(MODEL, cuda_graphs=True, speculation="lookup", max_tokens=14)
    draft_with(engine, Oracle(dict(enumerate(expected))))
    assert engine.runner.graphs.sizes == {1: [1, 2, 4, 8], 4: [1, 2, 3]}
    assert [r.token_ids for r in engine.generate(prompts, greedy(8))] == expected
    assert engine.stats()["draft_tokens_accepted"] > 5
    engine = tiny_engine(MODEL, cuda_graphs=True, speculation="lookup", max_tokens=3)
    assert engine.runner.graphs.sizes == {1: [1, 2, 3]}


class GraphRun(RandomRun):
    """Forks, preemption, tiers, cancellations, failing steps, all modes; each row of logits is
    compared with a forward pass without any cache, and memory that holds nothing is NaN."""

    def _draw_sizes(self) -> dict:
        return super()._draw_sizes() | {"cuda_graphs": True, "async_scheduling": self.seed % 2 == 0}


@pytest.mark.parametrize(
    ("seed", "crowded", "tiers"),
    matrix_rows(
        [(seed, crowded, tiers) for seed in range(8) for crowded, tiers in ((1, 0), (0, 1))],
        (0, 1, 0),
        (1, 0, 1),
    ),
)
def test_random_runs_with_graphs(seed, crowded, tiers):
    run = GraphRun(
        seed,
        num_requests=5,
        longest_prompt=60,
        longest_answer=16,
        patterns=("M*W-", "G+-", "SC*"),
        crowded=bool(crowded),
        tiers=bool(tiers),
    )
    run.run()


def noted(calls, make):
    def call(*inputs):
        calls.append(inputs)
        make(*inputs)

    return call


def test_graphs_stay_where_weights_and_memory_do(monkeypatch):
    model = tiny_model.__wrapped__("M*")
    engine = tiny_engine(model, cuda_graphs=True)

    captured = []
    monkeypatch.setattr(RecordedGraph, "__init__", noted(captured, RecordedGraph.__init__))

    def answer() -> None:
        (result,) = engine.generate([PROMPTS[1]], greedy(4))
        assert result.token_ids == greedy_tokens(model, PROMPTS[1], 4)
        assert engine.stats()["graphs"] == 7

    answer()
    with torch.no_grad():
        for parameter in model.parameters():  # in place
            parameter += 0.05 * torch.randn_like(parameter)
    answer()
    assert engine.stats()["weight_changes"] == 1 and not captured
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter + 0.05 * torch.randn_like(parameter)
    answer()
    assert engine.stats()["weight_changes"] == 2 and len(captured) == 7
    mixer = model.decoder.layers[0].mixer
    mixer.forward = mixer.forward  # another function may run with the same weights
    engine.generate([PROMPTS[1]], greedy(4))
    assert engine.stats()["graphs"] == 0
    del mixer.forward
    answer()
    for keep in ("drop", "host"):
        engine.suspend(keep)
        assert engine.stats()["graphs"] == 0
        engine.resume()
        answer()
    engine.close()
    assert engine.stats()["graphs"] == 0


def test_what_cannot_be_captured_runs_without_and_says_why_once(caplog):
    """Experts whose numbers of rows the host reads; a hook."""
    model = tiny_model.__wrapped__("*E")
    with caplog.at_level(logging.WARNING):
        engine = tiny_engine(model, cuda_graphs=True)
        for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, greedy(4))):
            assert is_greedy(model, prompt, result.token_ids)
        handle = model.decoder.layers[0].register_forward_hook(lambda *_: None)
        engine.generate(PROMPTS, greedy(4))
        handle.remove()
    told = [record.getMessage() for record in caplog.records if "CUDA graphs" in record.msg]
    assert len(told) == 2 and "tolist" in told[0] and "forward hooks" in told[1]
    assert engine.stats()["graph_steps"] == 0


def test_a_device_without_graphs_says_so_at_the_start(monkeypatch, caplog):
    monkeypatch.delitem(graph_runner.CAPTURES, "cpu")
    with caplog.at_level(logging.WARNING):
        engine = tiny_engine(MODEL, cuda_graphs=True, max_requests=3)
    assert "CUDA devices, and the model is on cpu" in caplog.text
    assert engine.runner.graphs is None and len(engine.memory.slots) == 3


def test_memory_of_graphs_is_asked_for_beside_the_pool(monkeypatch):
    asked, pool_pages = {}, allocation.pool_pages

    def noted(config, device, page_bytes, step, parts, ranks):
        asked.update({part.what: part.num_bytes for part in parts})
        return pool_pages(config, device, page_bytes, step, parts, ranks)

    monkeypatch.setattr(allocation, "pool_pages", noted)
    engine = tiny_engine(MODEL, cuda_graphs=True)
    logits = sum(sizes_up_to(8)) * MODEL.vocab_size * 4
    without = asked["CUDA graphs"]
    assert without > logits + len(sizes_up_to(8)) * (4 << 20)
    slot_bytes = engine.cache.spec.slot_bytes
    assert asked["live slots"] == 8 * slot_bytes == engine.memory.slots.numel() - slot_bytes
    inputs = asked["inputs of a step"]
    tiny_engine(MODEL, cuda_graphs=True, speculation="lookup", num_speculative_tokens=3)
    # As many graphs again, of four rows each, with the states before each draft.
    states = 8 * 3 * slot_bytes
    assert asked["CUDA graphs"] > without + 4 * logits + 4 * (4 << 20) + states
    assert asked["inputs of a step"] > inputs


NUMBERS = torch.arange(8.0)
HOST = [1.0]


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: NUMBERS * HOST[0], "has .* in place of"),
        (lambda: NUMBERS.narrow(0, 0, 4 + int(HOST[0])) + 1, "operation 0"),
        (lambda: NUMBERS + torch.as_tensor(HOST), "made on the host"),
        (lambda: NUMBERS[: int(HOST[0])].clone() if HOST[0] > 1 else NUMBERS + 1, "operation 0 is"),
        (lambda: NUMBERS + NUMBERS.sum().item(), "item"),
        (lambda: NUMBERS[NUMBERS > 3], "values"),
    ],
    ids=["number", "shape", "tensor", "operations", "read", "mask"],
)
def test_the_recorder_finds_what_a_replay_would_not_see(run, message):
    HOST[0] = 1.0
    with pytest.raises((AssertionError, RuntimeError), match=message):
        graph = RecordedGraph(run, NUMBERS.device, None)
        HOST[0] = 2.0
        graph.replay()


def test_decodes_are_replayed_beside_last_states_and_cached_prompts():
    """Only steps with a part of a prompt are launched."""
    engine = tiny_engine(MODEL, cuda_graphs=True, max_requests=4)
    plain = tiny_engine(MODEL, max_requests=4)
    params = [SamplingParams(top_k=1, num_tokens_to_generate=most) for most in (3, 9, 5, 12)]
    prompts = [*PROMPTS, random_tokens(40, seed=4)]
    launch, launched, kinds = engine.runner.launch, [], set()

    def noted_launch(plan):
        before, step = engine.runner.graphs.num_replays, launch(plan)
        if plan.work and engine.runner.graphs.num_replays == before:
            launched.append(max(len(work.tokens) for work in plan.work))
        elif plan.work:
            kinds.add((bool(plan.ready), any(not work.num_logits for work in plan.work)))
        return step

    engine.runner.launch = noted_launch
    for turn in range(2):
        found, expected = (each.generate(prompts * 2, params * 2) for each in (engine, plain))
        assert [r.token_ids for r in found] == [r.token_ids for r in expected]
        assert turn == 0 or all(each.prefix.skipped_tokens for each in found)
    assert all(length > 1 for length in launched)
    assert {(False, True), (True, False)} <= kinds


def test_a_capture_that_fails_leaves_the_other_graphs(monkeypatch, caplog):
    made = RecordedGraph.__init__

    def fails_for_two(self, run, *more):
        made(self, run, *more)
        if len(self.output) == 2:
            raise RuntimeError("no room")

    monkeypatch.setattr(RecordedGraph, "__init__", fails_for_two)
    with caplog.at_level(logging.WARNING):
        engine = tiny_engine(MODEL, cuda_graphs=True)
    assert engine.stats()["graphs"] == 6 and "without CUDA graphs: no room" in caplog.text
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, greedy(6))):
        assert is_greedy(MODEL, prompt, result.token_ids)
    assert engine.stats()["graph_steps"] > 0


class Fake:
    """Stands in for torch.cuda: notes the order of calls. calls: what happened, where."""

    def __init__(self):
        self.calls, self.current, self.has_failed = [], "own", False

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def Stream(self, name="side"):
        def wait_stream(other):
            self.calls.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait_stream)

    def CUDAGraph(self):
        def capture_end():
            if self.has_failed:
                raise RuntimeError("a failed capture cannot end")

        return SimpleNamespace(capture_begin=lambda **_: None, capture_end=capture_end)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_failed_capture_leaves_no_work_and_no_stream(fails_at, monkeypatch):
    fake = Fake()
    none = dict.fromkeys(("synchronize", "empty_cache", "set_sync_debug_mode"), lambda *_: None)
    for name, value in {
        **{"Stream": fake.Stream, "stream": fake.stream, "CUDAGraph": fake.CUDAGraph, **none},
        "current_stream": lambda: fake.Stream("own"),
        "memory_reserved": lambda: 0,
        "get_sync_debug_mode": lambda: 0,
        "device": lambda device: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(graph_runner.CudaGraph, "_streams", {})
    numbers = count(1)

    def run():
        fake.calls.append(f"kernels on {fake.current}")
        if next(numbers) == fails_at:
            fake.has_failed = True
            raise RuntimeError("out of memory")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match=r"out of memory|cannot end"):
        graph_runner.CudaGraph(run, torch.device("cuda:0"), None)
    ends = [i for i, call in enumerate(fake.calls) if call == "own waits for side"]
    last = max(i for i, call in enumerate(fake.calls[: 1 + min(fails_at, 2)]) if "kernels" in call)
    assert fake.calls[0] == "side waits for own" and len(ends) == 1 and ends[0] > last
    assert fake.current == "own"


class Rank:
    """One of two ranks, each in a thread."""

    size = 2

    def __init__(self, barrier, said, rank):
        self._barrier, self._said, self._rank = barrier, said, rank

    def maximum(self, values):
        self._said[self._rank] = values
        self._barrier.wait(10)
        found = [max(each) for each in zip(*self._said)]
        self._barrier.wait(10)
        return found


@pytest.mark.parametrize("fails_after", [0, 1, 2, 3, None])
def test_ranks_agree_on_a_capture_before_each_forward(fails_after):
    """One that cannot go on tells the other, which would wait for it in the next forward."""
    barrier, said = threading.Barrier(2), [[0], [0]]

    def capture(rank, fails_after):
        exchange, forwards = graph_runner._Exchange(Rank(barrier, said, rank)), 0
        try:
            while forwards != fails_after and forwards < 3:
                exchange.require_all()
                forwards += 1
            if fails_after is not None:
                raise RuntimeError("no room")
        except RuntimeError:
            return forwards, exchange.end(has_failed=True)
        return forwards, exchange.end(has_failed=False)

    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(capture, 1, fails_after)
        own = threads.submit(capture, 0, None)
        expected = (3, False) if fails_after is None else (fails_after, True)
        assert own.result(20) == other.result(20) == expected
