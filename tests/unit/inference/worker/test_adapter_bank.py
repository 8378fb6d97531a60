"""Requests choose among adapters of one engine, and get what the merged model answers."""

import asyncio
import threading
from itertools import chain

import pytest
import torch
from graph_recorder import recorded_graphs
from small_models import fill_adapters, small_model

from megatron_hybrid.inference.async_engine import AsyncEngine
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.inference.worker import adapter_bank
from megatron_hybrid.ops.dispatch import OPS
from megatron_hybrid.training.lora import LoraFields, add_adapters, merge_adapters, save_adapters

PATTERN, NAMES = "MG*-S+K", (None, "a", "b")
PROMPTS = [[(7 * i + seed) % 61 for i in range(40)] for seed in range(3)]
PARAMS = SamplingParams(
    num_tokens_to_generate=6,
    temperature=0,
    return_log_probs=True,
    skip_prompt_log_probs=True,
    ignore_termination=True,
)


def base():
    torch.manual_seed(5)
    return small_model(PATTERN)


def write(folder, seed, rank=3):
    """An adapter with numbers of this seed; returns the merged model."""
    model = base()
    add_adapters(model, LoraFields(rank=rank, alpha=4.0, seed=seed))
    fill_adapters(model, 0.2, seed)
    save_adapters(model, folder)
    merge_adapters(model)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(folder):
    """What the model, and its merges, answer each alone."""
    models = {None: base(), "a": write(folder / "a", 1), "b": write(folder / "b", 2)}
    answers = {}
    for name, model in models.items():
        with DynamicInferenceEngine(model, None, InferenceConfig(cache_bytes=4 << 20)) as engine:
            answers[name] = engine.generate(PROMPTS, PARAMS)
    return answers


def engine_of(**fields):
    config = {"cache_bytes": 16 << 20, "max_adapters": 2, "max_adapter_rank": 12, **fields}
    return DynamicInferenceEngine(base(), None, InferenceConfig(**config))


def answers_of(engine):
    """Of all prompts by all adapters in one batch, and the tokens that they skipped."""
    options = [RequestOptions(adapter=name) for name in NAMES for _ in PROMPTS]
    results = engine.generate(PROMPTS * len(NAMES), PARAMS, options)
    return {name: results[len(PROMPTS) * i :][: len(PROMPTS)] for i, name in enumerate(NAMES)}


def test_a_mixed_batch_answers_as_the_merged_models(folder, expected):
    with engine_of() as engine:
        for name in ("a", "b"):
            engine.adapters.load(name, folder / name)
        for turn in range(2):
            found = answers_of(engine)
            for name in NAMES:
                for one, other in zip(found[name], expected[name]):
                    assert one.token_ids == other.token_ids
                    assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
                    assert (one.prefix.skipped_tokens > 30) == (turn == 1)
        engine.check_integrity()
    assert len({tuple(answers[0].log_probs) for answers in expected.values()}) == 3


def slots_on_the_device(x, weights, slots):
    """As the kernel, which reads no slot on the host."""
    rows = torch.einsum("tc,toc->to", x, weights[slots.clamp(min=0)])
    return rows * (slots >= 0).unsqueeze(1)


def test_adapters_are_served_by_graphs(folder, expected, monkeypatch):
    """Decodes, and prompts in pieces; steps without adapters, too."""
    monkeypatch.setattr(OPS["slot_linear"], "reference", slots_on_the_device)
    with recorded_graphs(), engine_of(cuda_graphs=True) as engine:
        engine.generate(PROMPTS[:1], PARAMS)
        for name in ("a", "b"):
            engine.adapters.load(name, folder / name)
        for _ in range(2):
            found = answers_of(engine)
            pairs = (chain.from_iterable(each.values()) for each in (found, expected))
            for one, other in zip(*pairs):
                assert one.token_ids == other.token_ids
                assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
        stats = engine.stats()
    assert stats["graph_steps"] >= stats["steps"] - 3


def test_a_closed_engine_leaves_the_model_as_it_was(folder):
    model = base()
    config = InferenceConfig(cache_bytes=4 << 20, max_adapters=1)
    with DynamicInferenceEngine(model, None, config) as engine:
        engine.adapters.load("a", folder / "a")
        before = model(torch.tensor([PROMPTS[0]]))  # not by the engine: the model alone
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(torch.tensor([PROMPTS[0]])), before)


def test_an_engine_that_closes_leaves_the_adapters_of_another(folder, expected):
    model, config = base(), InferenceConfig(cache_bytes=4 << 20, max_adapters=1)
    first, second = (DynamicInferenceEngine(model, None, config) for _ in range(2))
    second.adapters.load("a", folder / "a")
    first.close()
    (answer,) = second.generate(PROMPTS[0], PARAMS, RequestOptions(adapter="a"))
    assert answer.token_ids == expected["a"][0].token_ids
    second.close()
    assert torch.equal(model(torch.tensor([PROMPTS[0]])), base()(torch.tensor([PROMPTS[0]])))


def test_prefixes_belong_to_the_values_of_an_adapter_and_not_to_its_name(folder, expected):
    def skipped(name):
        options = RequestOptions(adapter=name)
        return engine.generate(PROMPTS[0], PARAMS, options)[0].prefix.skipped_tokens

    with engine_of() as engine:
        engine.adapters.load("a", folder / "a")
        assert skipped("a") == 0 and skipped("a") > 30
        engine.adapters.unload("a")
        assert engine.adapters.loaded == []
        engine.adapters.load("a", folder / "b")
        assert skipped("a") == 0 and engine.explain(PROMPTS[0]).match.skipped_tokens == 0
        assert engine.explain(PROMPTS[0], adapter="a").match.skipped_tokens > 30
        answer = engine.generate(PROMPTS[0], PARAMS, RequestOptions(adapter="a"))[0]
        assert answer.token_ids == expected["b"][0].token_ids
        engine.adapters.load("again", folder / "a")
        assert skipped("again") > 30


def test_what_cannot_be_loaded_changes_nothing(folder, expected):
    write(folder / "wide", 3, rank=13)
    with engine_of() as engine:
        engine.adapters.load("a", folder / "a")
        for name, of, match in (
            ("a", "b", "there is an adapter 'a': unload it first"),
            ("b", "n" * 300, "has no adapters to read"),  # too long a name for a file
            ("b", "wide", "adapters of rank 13, and max_adapter_rank is 12: raise it"),
        ):
            with pytest.raises(ValueError, match=match):
                engine.adapters.load(name, folder / of)
        assert [each.name for each in engine.adapters.loaded] == ["a"]
        engine.adapters.load("b", folder / "b")
        with pytest.raises(ValueError, match=r"max_adapters=2 adapters, 0 of .* one of 'a', "):
            engine.adapters.load("c", folder / "b")
        with pytest.raises(ValueError, match="adapter is 'c', and the engine has 'a', 'b': load"):
            engine.add_request(PROMPTS[0], PARAMS, RequestOptions(adapter="c"))
        request = engine.add_request(PROMPTS[0], PARAMS, RequestOptions(adapter="b"))
        engine.adapters.unload("b")  # its slot is not free yet
        with pytest.raises(ValueError, match="1 of which were unloaded and still have requests"):
            engine.adapters.load("c", folder / "b")
        while engine.has_work:
            engine.step()
        assert request.result().token_ids == expected["b"][0].token_ids
        engine.adapters.load("c", folder / "b")
        for name in ("", "a\n", "x" * 300):
            with pytest.raises(ValueError, match="use 1 to 256 printable letters"):
                engine.adapters.load(name, folder / "b")
        with pytest.raises(ValueError, match=r"salt is 'a\\x00'; NUL is for the engine"):
            RequestOptions(salt="a\0")
    none = "holds no adapters: make it with max_adapters=1"
    with engine_of(max_adapters=0) as engine, pytest.raises(ValueError, match=none):
        engine.adapters.load("a", folder / "a")


async def test_requests_are_answered_while_an_adapter_is_read(folder, expected, monkeypatch):
    read, may_read = adapter_bank.read_adapters, threading.Event()

    def read_late(*args):
        assert may_read.wait(60)
        return read(*args)

    monkeypatch.setattr(adapter_bank, "read_adapters", read_late)
    config = InferenceConfig(cache_bytes=4 << 20, max_adapters=1, max_adapter_rank=12)
    async with AsyncEngine(base(), None, config) as engine:
        loads = [asyncio.create_task(engine.load_adapter(of, folder / of)) for of in "-a"]
        alone = await engine.generate(PROMPTS[0], PARAMS)
        assert not any(load.done() for load in loads) and engine.adapters == []
        may_read.set()
        with pytest.raises(ValueError, match="has no adapters to read"):
            await loads[0]
        await loads[1]
        adapted = await engine.generate(PROMPTS[0], PARAMS, RequestOptions(adapter="a"))
    assert alone.token_ids == expected[None][0].token_ids
    assert adapted.token_ids == expected["a"][0].token_ids
