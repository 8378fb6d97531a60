"""Whole models behind the engine: decode steps, prefills, first tokens, copies of states."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from benchmarks.common import ONE_TOKEN
from benchmarks.gpu.bench import Bench, Result
from benchmarks.gpu.models import SHAPES, cut_model
from megatron_hybrid import DynamicInferenceEngine, HybridModel, InferenceConfig, SamplingParams
from megatron_hybrid.tools.rates import RESTORED
from megatron_hybrid.tools.roofline import ModelWork

CAPTURED = 4
"""States saved inside of a prefill."""
COPY_SECONDS = 50e-6
"""Allowed to a restore beside 1.1 times its bytes / bandwidth."""


def run(bench: Bench) -> Iterator[Result]:
    """All models, one after the other."""
    for name, shape in SHAPES.items():
        for result in bench.guarded("does not run", _of_model(bench, name)):
            yield named(shape.name, result)
        bench.free()


def _of_model(bench: Bench, name: str) -> Iterator[Result]:
    model = cut_model(name, bench)
    for part in (decodes, first_tokens, saves):
        yield from bench.guarded(part.__name__, part(bench, model))


def named(name: str, result: Result) -> Result:
    """The result with the name of its model in front."""
    return Result(**{**vars(result), "what": f"{name}: {result.what}"})


def make_engine(bench: Bench, model: HybridModel, longest: int, batch: int, **fields):
    """An engine whose pool holds `batch` requests of `longest` tokens, or two with their states."""
    config = InferenceConfig(
        cache_bytes=bench.size(24 << 30, 16 << 20),
        max_requests=batch,
        max_tokens=bench.size(8192, 32),
        max_sequence_length=longest,
        block_size_tokens=bench.size(64, 16),
        **fields,
    )
    return DynamicInferenceEngine(model, None, config)


def work_of(engine: DynamicInferenceEngine) -> ModelWork:
    """What the engine's forward passes cost at least."""
    return ModelWork.of(engine.model, engine.cache.spec)


def random_prompt(rng: np.random.Generator, model: HybridModel, length: int) -> list[int]:
    """Tokens that no cache knows."""
    return rng.integers(0, model.config.vocab_size, length).tolist()


def decodes(bench: Bench, model: HybridModel) -> Iterator[Result]:
    """Whole steps, with scheduling and sampling, of requests that share nothing."""
    batches, context = bench.size(((1, 8, 64), 8192), ((1, 3), 40))
    steps = bench.size(20, 2)
    rng = np.random.default_rng(0)
    for batch in batches:
        engine = make_engine(bench, model, 2 * context, max(batches), prefix_caching="off")
        # The first ones decode while the last ones are computed: none may end before the timing.
        count = 2 * (batch + steps) + 8
        params = SamplingParams(top_k=1, num_tokens_to_generate=count, ignore_termination=True)
        requests = [
            engine.add_request(random_prompt(rng, model, context), params, growing_text=False)
            for _ in range(batch)
        ]
        while any(request.first_token_at is None for request in requests):
            engine.step()
        for _ in range(3):  # the first decodes compile kernels
            engine.step()
        middle = [context + len(r.generated_tokens) + steps // 2 for r in requests]
        times = [bench.wall_seconds(engine.step) for _ in range(steps)]
        assert not any(request.closed for request in requests)
        works = work_of(engine).forward([(position, 1) for position in middle])
        yield Result(
            f"decode step, batch {batch}, context {context:,}",
            seconds := statistics.median(times),
            bench.bound(works),
            goal=">= 80 %" if batch == 64 else "",
            note=f"{batch / seconds:,.0f} tokens/s",
        )
        engine.close()


def first_tokens(bench: Bench, model: HybridModel) -> Iterator[Result]:
    """Time to the first token of a prompt that is alone, with parts of it restored."""
    lengths, rounds = bench.size(((8192, 65536), 3), ((48,), 1))
    rng = np.random.default_rng(1)
    for length in lengths:
        engine = make_engine(bench, model, length + 64, 2)
        work, max_tokens = work_of(engine), engine.config.max_tokens
        first_token(bench, engine, random_prompt(rng, model, length))  # compiles kernels
        for percent in RESTORED:
            restored, times = length * percent // 100, []
            for _ in range(rounds):
                prompt = random_prompt(rng, model, length)
                if restored:
                    first_token(bench, engine, prompt[:restored])
                times.append(first_token(bench, engine, prompt, skipped=restored))
            seconds = statistics.median(times)
            yield Result(
                f"first token of {length:,}, {percent} % restored",
                seconds,
                bench.bound(work.first_token(length, restored, max_tokens)),
                note="" if restored else f"prefill of {length / seconds:,.0f} tokens/s",
            )
        engine.close()
    yield _prefill_with_saves(bench, model, lengths[0], rounds, rng)


def _prefill_with_saves(
    bench: Bench, model: HybridModel, length: int, rounds: int, rng: np.random.Generator
) -> Result:
    """A prefill that saves states on its way, beside one that saves none."""
    breakpoints = [length * i // (CAPTURED + 1) + 1 for i in range(1, CAPTURED + 1)]
    times = {}
    for mode, arguments in (("restore", {"cache_breakpoints": breakpoints}), ("off", {})):
        engine = make_engine(bench, model, length + 64, 2, prefix_caching=mode)
        found = [
            first_token(bench, engine, random_prompt(rng, model, length), **arguments)
            for _ in range(rounds + 1)
        ]
        times[mode] = statistics.median(found[1:])
        engine.close()
    return Result(
        f"first token of {length:,} with {CAPTURED} states saved",
        times["restore"],
        others={"without a cache": times["off"]},
        goal=">= 0.97x",
    )


def first_token(
    bench: Bench,
    engine: DynamicInferenceEngine,
    prompt: list[int],
    skipped: int | None = None,
    **arguments,
) -> float:
    """Seconds from the arrival of a request that is alone to its first token.

    Args:
        skipped: tokens that have to be restored; None: any number.
        arguments: of `add_request`.
    """
    request = engine.add_request(prompt, ONE_TOKEN, **arguments)

    def until_first() -> None:
        while request.first_token_at is None:
            engine.step()

    elapsed = bench.wall_seconds(until_first)
    while engine.has_work:
        engine.step()
    found = request.result().prefix.skipped_tokens
    assert skipped in (None, found), f"{found} tokens were restored, not {skipped}"
    return elapsed


def saves(bench: Bench, model: HybridModel) -> Iterator[Result]:
    """One state copied to pages, and back: bytes are read once and written once."""
    engine = make_engine(bench, model, 256, 2)
    memory, spec = engine.memory, engine.cache.spec
    pages = np.arange(1, 1 + memory.slots.shape[1] // spec.page_bytes)
    bound = bench.bound(work_of(engine).restore())
    limit = None if bound is None else 1.1 * bound + COPY_SECONDS
    goal = "" if limit is None else f"<= {limit * 1e6:.0f} us"
    size = f"{memory.slots.shape[1] / 1e6:.1f} MB"
    yield Result(
        f"a state saved, {size}",
        bench.seconds(lambda: memory.save_checkpoint(memory.slots[0], pages)),
        bound,
    )
    yield Result(
        f"a state restored, {size}",
        bench.seconds(lambda: memory.load_checkpoint(pages, 0)),
        bound,
        goal=goal,
    )
    engine.close()
