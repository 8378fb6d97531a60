"""Steps of decodes as graphs, on a CPU: a recorder takes the place of capture and replay."""

import logging
from contextlib import nullcontext

import pytest
import torch
from differential import RandomRun
from drafted import Oracle, draft_with, poison_rejected
from graph_recorder import RecordedGraph, recorded_graphs
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


@pytest.mark.parametrize(
    "pattern", matrix_rows(["M*SGCW-", "+E", "K-", "H", "L-", "Z", "P*", "B"], "M*SGCW-", "+E")
)
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
    assert stats["graphs"] == 3 and stats["graph_steps"] >= 8
    assert engines[0].stats()["graph_steps"] == 0


@pytest.mark.parametrize(
    "pattern", matrix_rows(["M*GW-", "S*C", "+E", "K-", "H", "L-", "Z", "P*", "B"], "M*GW-")
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
        return super()._draw_sizes() | {"cuda_graphs": True}


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


def test_graphs_go_where_weights_or_memory_do():
    model = tiny_model.__wrapped__("M*")
    engine = tiny_engine(model, cuda_graphs=True)

    def answer() -> None:
        (result,) = engine.generate([PROMPTS[1]], greedy(4))
        assert result.token_ids == greedy_tokens(model, PROMPTS[1], 4)
        assert engine.stats()["graphs"] == 1

    answer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter + 0.05 * torch.randn_like(parameter)
    answer()
    assert engine.stats()["weight_changes"] == 1
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
    assert asked["live slots"] == engine.memory.slots.numel() == 9 * slot_bytes
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
