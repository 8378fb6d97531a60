"""The warm-up, on a CPU that is said to compile kernels."""

import logging

import pytest
import torch
from graph_recorder import recorded_graphs
from reference import greedy, random_tokens, tiny_engine, tiny_model

from megatron_hybrid.inference import engine_parts
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker import warm_up
from megatron_hybrid.inference.worker.graph_runner import sizes_up_to
from megatron_hybrid.inference.worker.model_runner import ModelRunner

MODEL = tiny_model("M*GW-")
PROMPTS = [random_tokens(70), random_tokens(9, seed=1), random_tokens(33, seed=2)]
SMALL = {"max_requests": 3, "max_tokens": 64}


@pytest.fixture
def warmed(monkeypatch):
    monkeypatch.setattr(engine_parts, "WARMED", {"cpu"})


@pytest.fixture
def steps(monkeypatch):
    """Plans that runners have run."""
    plans, run = [], ModelRunner.run

    def noted(self, plan):
        plans.append(plan)
        return run(self, plan)

    monkeypatch.setattr(ModelRunner, "run", noted)
    return plans


def test_a_cpu_has_no_warm_up_nor_an_engine_that_leaves_it_out(steps, monkeypatch):
    assert tiny_engine(MODEL).stats()["warm_up_ms"] == 0
    monkeypatch.setattr(engine_parts, "WARMED", {"cpu"})
    assert tiny_engine(MODEL, warm_up=False).stats()["warm_up_ms"] == 0
    assert steps == []


@pytest.mark.parametrize(
    "fields",
    [
        {"state_encoding": "int8", "host_cache_bytes": 1 << 20},
        {"prefix_caching": "memory_only", "logprobs_mode": "processed_logprobs"},
    ],
    ids=["restore", "memory_only"],
)
def test_a_warm_up_leaves_no_trace(fields, warmed, tmp_path):
    """No page, state, counter, record, seed or id; later answers are those without it."""
    engines, folders = [], [tmp_path / name for name in ("warm", "cold")]
    for folder, is_warmed in zip(folders, (True, False)):
        if "host_cache_bytes" in fields:
            fields = {**fields, "cache_dir": folder}
        random_state = torch.get_rng_state()
        engines.append(tiny_engine(MODEL, warm_up=is_warmed, **SMALL, **fields))
        assert torch.get_rng_state().equal(random_state)
    warm, cold = engines
    assert warm.warm_up_seconds > 0
    assert warm.stats() | {"warm_up_ms": 0} == cold.stats()
    assert warm.stats()["warm_up_ms"] == round(warm.warm_up_seconds * 1000)
    counted = [[h.counts for h in e.live.meter.histograms.values()] for e in engines]
    assert counted[0] == counted[1] and warm.epoch == 0
    assert not warm.memory.pool.any() and not warm.memory.slots.any()
    assert not warm.context._tables.any() and warm.runner.parked_bytes == 0
    assert warm.cache.digest() == cold.cache.digest()
    warm.check_integrity()
    params = [greedy(3), SamplingParams(num_tokens_to_generate=3), greedy(5)]
    answers = []
    for engine in engines:
        found = engine.generate(PROMPTS, params) + engine.generate(PROMPTS, params)
        answers.append([(r.request_id, r.token_ids, r.prefix) for r in found])
        engine.close()
    assert answers[0] == answers[1]
    assert warm.stats() | {"warm_up_ms": 0} == cold.stats()


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ((1, 1, 1), 1),
        ((2, 1, 64), 1),
        ((1, 40, 64), 40),
        ((3, 40, 16), 40),
        ((5, 4, 32), 4),
        ((20, 64, 1024), 64),
    ],
)
def test_its_steps_are_of_all_sizes_within_the_limits(sizes, largest, warmed, steps):
    """The largest first, by which autotuned kernels choose; every number of decodes that has a
    graph; prompts, decodes and both."""
    names = ("max_requests", "max_tokens", "max_sequence_length")
    tiny_engine(MODEL, **dict(zip(names, sizes)))
    counts = [[len(work.tokens) for work in plan.work] for plan in steps if plan.work]
    assert sum(counts[0]) == largest == max(map(sum, counts))
    assert max(map(len, counts)) <= sizes[0] and max(map(max, counts)) <= sizes[2]
    decodes = [len(count) for count in counts if set(count) == {1}]
    assert set(sizes_up_to(min(sizes[:2]))) <= set(decodes)
    if min(sizes) > 1:
        assert any({1} < set(count) for count in counts)
    assert any(plan.restores for plan in steps)


def test_it_warms_steps_with_drafts_and_times_them(warmed, steps, monkeypatch):
    monkeypatch.setattr(warm_up, "_TIMED_MICROSECONDS", 0)
    with recorded_graphs():
        fields = {"speculation": "lookup", "num_speculative_tokens": 2, "warm_up": True}
        engine = tiny_engine(tiny_model("M*"), cuda_graphs=True, **fields, **SMALL)
    rows = {tuple(len(work.draft_draws) for work in plan.work) for plan in steps}
    assert rows >= {(2,) * size for size in (1, 2, 3)}
    stats = engine.stats()
    assert (stats["graphs"], stats["graph_steps"], stats["draft_tokens"]) == (8, 0, 0)
    assert engine.scheduler.draft_planner.costs.num_decodes == (1, 3)
    assert not engine.memory.pool.any() and not engine.memory.slots.any()


def test_all_graphs_are_there_before_the_first_request(warmed, caplog):
    with recorded_graphs(), caplog.at_level(logging.INFO):
        engine = tiny_engine(MODEL, cuda_graphs=True, **SMALL)
        assert engine.stats()["graphs"] == 5 and engine.stats()["graph_steps"] == 0
        captures = caplog.text.count("captured a graph")
        replayed = engine.generate(PROMPTS, greedy(4))
        assert caplog.text.count("captured a graph") == captures == 5
        assert engine.stats()["graph_steps"] > 0
    launched = tiny_engine(MODEL, warm_up=False, **SMALL).generate(PROMPTS, greedy(4))
    assert [r.token_ids for r in replayed] == [r.token_ids for r in launched]
    told = [r.getMessage() for r in caplog.records if r.name.endswith("warm_up")]
    assert len(told) == 2 and "warming up: " in told[0] and "warmed up in " in told[1]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (MemoryError("no room"), MemoryError, "max_tokens=512 and .*no room.*warm_up=False"),
        (ValueError("a fault"), ValueError, "a fault"),
    ],
)
def test_an_engine_whose_warm_up_ends_early_is_not_made(
    error, kind, message, warmed, monkeypatch, tmp_path
):
    """Nothing stays of it, such as the lock of a folder."""
    plans = []

    def fail(self, plan):
        plans.append(plan)
        if len(plans) == 3:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "run", fail)
        with pytest.raises(kind, match=message):
            tiny_engine(MODEL, cache_dir=tmp_path)
    with tiny_engine(MODEL, cache_dir=tmp_path, warm_up=False) as engine:
        assert engine.generate(PROMPTS[:1], greedy(2))[0].finish_reason == "length"
