"""Whole models in the engine: decode steps, prefills, first tokens, copies of states."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.common import ONE_TOKEN
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.models import SHAPES, cut_model
from megatron_hybrid import (
    DynamicInferenceEngine,
    HybridModel,
    InferenceConfig,
    RequestOptions,
    SamplingParams,
)
from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.inference.worker.graph_runner import graph_sizes, planned_bytes
from megatron_hybrid.tools.rates import RESTORED
from megatron_hybrid.tools.roofline import ModelWork

CAPTURED = 4
"""States saved inside of a prefill."""
SUFFIXES = 128, 256, 512, 1024  # tokens after those restored
COPY_SECONDS = 50e-6
"""Allowed to a restore in addition to 1.1 times its bytes / bandwidth."""


def run(bench: Bench, name: str) -> Iterator[Row]:
    """Measure one model, by its name in `SHAPES`. What takes longest comes last."""
    model = cut_model(name, bench)
    short, long = bench.size(8192, 48), bench.size(65536, 64)
    parts = ([short - n for n in bench.size(SUFFIXES, (8,))], [short * n // 100 for n in RESTORED])
    for part in (
        partial(decodes, batches=bench.size((1, 8), (3,))),
        *(
            partial(first_tokens, length=short, parts=own, rounds=bench.size(3, 1), has_graphs=by)
            for own, by in ((parts[0], False), (parts[0], True), (parts[1], False))
        ),
        saves,
        prefill_with_saves,
        partial(first_tokens, length=long, parts=bench.size((0, long), (0,)), rounds=1),
        partial(decodes, batches=bench.size((64,), ())),
    ):
        for row in bench.guarded("does not run", part(bench, model)):
            yield named(SHAPES[name].name, row)
        bench.free()


def named(name: str, row: Row) -> Row:
    """The row with the name of its model in front."""
    return replace(row, what=f"{name}: {row.what}")


def make_engine(bench: Bench, model: HybridModel, longest: int, batch: int, **fields):
    """An engine whose pool holds `batch` requests of `longest` tokens, or two with their states.
    Where all is called once, several of these and cut models share a GPU."""
    config = InferenceConfig(
        cache_bytes=16 << 20 if bench.toy else (4 if bench.once else 24) << 30,
        max_requests=batch,
        max_tokens=bench.size(8192, 32),
        max_sequence_length=longest,
        block_size_tokens=bench.size(64, 16),
        warm_up=False,  # of all sizes; few of them are timed
        **fields,
    )
    return DynamicInferenceEngine(model, None, config)


def work_of(engine: DynamicInferenceEngine) -> ModelWork:
    """Return the least that the engine's forward passes cost."""
    return ModelWork.of(engine.model, engine.cache.spec)


def random_prompt(rng: np.random.Generator, model: HybridModel, length: int) -> list[int]:
    """Tokens that no cache knows."""
    return rng.integers(0, model.config.vocab_size, length).tolist()


def decodes(bench: Bench, model: HybridModel, batches: Sequence[int]) -> Iterator[Row]:
    """Whole steps, with scheduling and sampling, of requests that share nothing."""
    context, steps = bench.size(8192, 40), 2 if bench.toy or bench.once else 12
    rng = np.random.default_rng(0)
    for batch, has_graphs in itertools.product(batches, (False, True)):
        engine = make_engine(
            bench, model, 2 * context, batch, prefix_caching="off", cuda_graphs=has_graphs
        )
        # The first ones decode while the last ones are computed: none may end before the timing.
        count = 2 * (batch + steps) + 8
        params = SamplingParams(top_k=1, num_tokens_to_generate=count, ignore_termination=True)
        requests = [
            engine.add_request(random_prompt(rng, model, context), params, growing_text=False)
            for _ in range(batch)
        ]
        until_first_tokens(engine, requests)
        for _ in range(3):  # the first decodes compile kernels
            engine.step()
        middle = [context + len(r.token_ids) + steps // 2 for r in requests]
        times = [bench.wall_seconds(engine.step) for _ in range(steps)]
        activity = bench.activity(engine.step)
        assert not any(request.closed for request in requests)
        works = work_of(engine).forward([(position, 1) for position in middle])
        what = f"decode step, batch {batch}, context {context:,}"
        if has_graphs:
            what += ", graphs" if engine.stats()["graph_steps"] else ", no graph: see the log"
        seconds = statistics.median(times)
        yield Row(
            what,
            seconds,
            bench.bound(works),
            numbers={"busy ms": activity.busy_seconds * 1e3, "launches": activity.launches},
            goal=">= 80 %" if batch == 64 else "",
            note=f"{batch / seconds:,.0f} tokens/s",
        )
        shares = {
            f"{name[:40]} x{launches}": f"{spent * 1e3:.3g} ms"
            for name, launches, spent in activity.most
        }
        yield Row(f"{what}, most busy in", activity.busy_seconds, numbers=shares)
        engine.close()
        bench.free()


def graphs(bench: Bench, name: str) -> Iterator[Row]:
    """Requests that start and end, by launches and by graphs, and the memory of graphs."""
    model, rng = cut_model(name, bench), np.random.default_rng(3)
    slots, count, first = bench.size((64, 96, 40), (4, 6, 3))
    longest, sampling = bench.size(8192, 48), dict(top_k=1, ignore_termination=True)
    sampling |= dict(return_log_probs=True, skip_prompt_log_probs=True)
    prompts = [random_prompt(rng, model, bench.size(64, 4) + 2 * i) for i in range(count)]
    params = [SamplingParams(**sampling, num_tokens_to_generate=first + i) for i in range(count)]
    used, expected, engine = [], None, None
    for what in ("launched", "by graphs", "by graphs after a resume"):
        if what != "by graphs after a resume":
            used.append(bench.used_bytes())
            engine = make_engine(bench, model, longest, slots, cuda_graphs=what == "by graphs")
            used.append(bench.used_bytes())
        else:
            engine.suspend()
            engine.resume()
        before, replayed = engine.num_steps, engine.stats()["graph_steps"]
        began = time.perf_counter()
        answers = engine.generate(prompts, params)
        seconds, steps = time.perf_counter() - began, engine.num_steps - before
        found = [(each.token_ids, each.log_probs) for each in answers]
        expected = expected or found
        yield Row(
            f"{count} requests that start and end, {what}",
            seconds,
            numbers={"steps": steps, "replayed": engine.stats()["graph_steps"] - replayed},
            note=f"{sum(len(tokens) for tokens, _ in found) / seconds:,.0f} tokens/s",
            fault="" if found == expected else "other bits than launched",
        )
        if what == "launched":
            engine = engine.close()
    most_tokens = engine.config.max_tokens
    sizes = graph_sizes(slots, most_tokens, 0)
    asked, taken = (d - c - b + a for a, b, c, d in zip(*used))
    planned = planned_bytes(model, engine.memory.spec, sizes, most_tokens, longest)
    numbers = {"asked MiB": asked >> 20, "planned MiB": planned >> 20, "taken MiB": taken >> 20}
    yield Row("memory of graphs", numbers=numbers)
    engine.close()


def first_tokens(
    bench: Bench,
    model: HybridModel,
    length: int,
    parts: Sequence[int],
    rounds: int,
    has_graphs: bool = False,
) -> Iterator[Row]:
    """Time to the first token of a prompt that is alone, with so many tokens of it restored, and
    the launches where few are not. has_graphs: of prompts in pieces."""
    rng = np.random.default_rng(length)
    engine = make_engine(bench, model, length + 64, 2, cuda_graphs=has_graphs)
    work, max_tokens = work_of(engine), engine.config.max_tokens
    first_token(bench, engine, random_prompt(rng, model, length))  # compiles kernels
    for restored in parts:
        times, numbers, suffix = [], {}, length - restored
        for number in range(2 if bench.once else rounds + 1):
            prompt = random_prompt(rng, model, length)
            if restored:
                first_token(bench, engine, prompt[:restored])
            call = partial(first_token, bench, engine, prompt, skipped=restored)
            if number:
                times.append(call())
            elif 0 < suffix <= max(SUFFIXES):
                activity = bench.activity(call)
                numbers = {"busy ms": activity.busy_seconds * 1e3, "launches": activity.launches}
        seconds = statistics.median(times)
        yield Row(
            f"first token of {length:,}, {round(100 * restored / length)} % restored"
            + (", graphs" if has_graphs else ""),
            seconds,
            bench.bound(work.first_token(length, restored, max_tokens)),
            numbers=numbers,
            note=f"{suffix:,} computed, {suffix / seconds:,.0f} tokens/s",
        )
    engine.close()


def prefill_with_saves(bench: Bench, model: HybridModel) -> Iterator[Row]:
    """Time a prefill that saves states on its way, against one that saves none."""
    length, rng = bench.size(8192, 48), np.random.default_rng(2)
    breakpoints = [length * i // (CAPTURED + 1) + 1 for i in range(1, CAPTURED + 1)]
    times = {}
    saved = RequestOptions(cache_breakpoints=breakpoints)
    for mode, options in (("restore", saved), ("off", None)):
        engine = make_engine(bench, model, length + 64, 2, prefix_caching=mode)
        found = [
            first_token(bench, engine, random_prompt(rng, model, length), options=options)
            for _ in range(2 if bench.toy or bench.once else 4)
        ]
        times[mode] = statistics.median(found[1:])
        engine.close()
    yield Row(
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
    options: RequestOptions | None = None,
) -> float:
    """Seconds from the arrival of a request that is alone to its first token.

    Args:
        skipped: tokens that have to be restored; None: any number.
        options: of the request.
    """
    request = engine.add_request(prompt, ONE_TOKEN, options)
    elapsed = bench.wall_seconds(lambda: until_first_tokens(engine, [request]))
    while engine.has_work:
        engine.step()
    found = request.result().prefix.skipped_tokens
    # The answer after what is restored may be the prompt's next token.
    assert skipped is None or found - skipped in (0, 1), f"{found} were restored, not {skipped}"
    return elapsed


def until_first_tokens(engine: DynamicInferenceEngine, requests: Sequence[Request]) -> None:
    """Run steps until each request has its first token. Raises RuntimeError where one has ended
    without, as by NaN: waited for, it would take all of the part's time."""
    while waiting := [request for request in requests if request.first_token_at is None]:
        for request in waiting:
            if request.closed:
                raise RuntimeError(f"a request ended before its first token: {request.error}")
        engine.step()


def saves(bench: Bench, model: HybridModel) -> Iterator[Row]:
    """One state copied to pages, and back: bytes are read once and written once."""
    engine = make_engine(bench, model, 256, 2)
    memory, spec = engine.memory, engine.cache.spec
    pages = np.arange(1, 1 + memory.slots.shape[1] // spec.page_bytes)
    bound = bench.bound(work_of(engine).restore())
    limit = None if bound is None else 1.1 * bound + COPY_SECONDS
    goal = "" if limit is None else f"<= {limit * 1e6:.0f} us"
    size = memory.slots.shape[1]
    for what, call in (
        ("saved", lambda: memory.save_checkpoint(memory.slots[0], pages)),
        ("restored", lambda: memory.load_checkpoint(pages, 0)),
    ):
        timing = bench.timing(call, by_graph=False)  # page numbers come from the host
        yield Row(
            f"a state {what}, {size / 1e6:.1f} MB",
            timing.seconds,
            bound,
            numbers=timing.numbers() | {"TB/s": 2 * size / timing.seconds / 1e12},
            goal=goal if what == "restored" else "",
        )
    engine.close()
