"""Recorded steps by the kernels, on the very tensors that a graph's launches hold.

Elsewhere steps are recorded on a CPU with the reference, which reads tensors as torch does. A
kernel has addresses alone, so here each is run on what a recorded step gives it.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from launch_counts import counted_launches
from matrix import matrix_rows
from reference import random_tokens, tiny_engine, tiny_model
from torch import Tensor

from megatron_hybrid.inference.scheduling.step_plan import StepPlan, Work
from megatron_hybrid.inference.worker import graph_runner
from megatron_hybrid.inference.worker.graph_runner import sizes_up_to
from megatron_hybrid.ops import dispatch
from megatron_hybrid.ops.attention import work as attention_work

FIELDS = {
    **{"hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1, "kv_channels": 16},
    **{"mamba_num_heads": 2, "mamba_num_groups": 1, "linear_num_key_heads": 1},
    **{"linear_num_value_heads": 2, "ffn_hidden_size": 32, "moe_ffn_hidden_size": 32},
    **{"sliding_window": 70, "attention_chunk_size": 100, "qk_layernorm": True},
    **{"softmax_type": "learnable", "attention_logit_softcap": 20.0},
}
BLOCK, LONGEST = 16, 160
COUNTS = [(1,), (1,) * 3, (1,) * 8, (1,) * 64, (4,), (3, 1, 2), (3, 4) * 4, (2,) * 64]
"""Rows of each decode."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Keys in small parts; engines on a CPU have layouts of recorded steps, and record nothing."""
    monkeypatch.setattr(attention_work, "PART", 64)
    monkeypatch.setattr(attention_work, "MAX_PARTS", 2)
    monkeypatch.setitem(graph_runner.CAPTURES, "cpu", None)
    monkeypatch.setattr(graph_runner.GraphRunner, "capture", lambda *_: False)


def engine_of(pattern, most, num_rows):
    """An engine whose memory is full of numbers."""
    sizes = dict(max_requests=most, max_tokens=most * num_rows, cuda_graphs=True, warm_up=False)
    sizes |= dict(max_sequence_length=LONGEST, block_size_tokens=BLOCK, cache_bytes=8 << 20)
    if num_rows > 1:
        sizes |= dict(speculation="lookup", num_speculative_tokens=num_rows - 1)
    engine = tiny_engine(tiny_model(pattern, **FIELDS), **sizes)
    for memory in (engine.memory.pool, engine.memory.slots):
        numbers = memory.view(torch.float32)
        numbers.copy_(torch.randn(numbers.shape, generator=torch.Generator().manual_seed(0)))
    return engine


def plan_of(engine, counts):
    """Decodes of so many rows each at any positions, with pages of their own where they write."""
    spec, rng = engine.memory.spec, np.random.default_rng(len(counts))
    widths = [spec.kv_pages_per_block, *(spec.pages_per_block[g] for g in spec.local_groups)]
    num_pages = len(engine.memory.pool)
    pages, works = iter(range(1, num_pages)), []
    for slot, count in enumerate(counts):
        start = int(rng.integers(0, LONGEST - count))
        tables = [
            rng.integers(num_pages // 2, num_pages, (LONGEST // BLOCK, n), dtype=np.int32)
            for n in widths
        ]
        for table in tables:
            written = table[start // BLOCK : (start + count - 1) // BLOCK + 1]
            written[:] = [[next(pages) for _ in row] for row in written]
        tokens = np.array(random_tokens(count, slot), np.int32)
        drafts = [None] * (count - 1)
        works.append(Work(slot, slot, start, tokens, 0, tables, count, draft_draws=drafts))
    assert next(pages) < num_pages // 2
    return StepPlan(work=works)


class Step(NamedTuple):
    """What a step leaves."""

    logits: Tensor
    pool: Tensor
    """But for the null page."""
    states: list[Tensor]
    """Those of requests, and their last hidden ones."""
    captured: list[Tensor]
    """Each state of each layer behind the rows that have drafts behind them."""


def step(engine, plan, *recorded):
    """A step as `begin_step` lays it out; memory is then as before."""
    context, memory = engine.context, engine.memory
    kept = memory.pool.clone(), memory.slots.clone()
    with torch.inference_mode():
        context.begin_step(plan, *recorded)
        context.begin_pass()
        logits = engine.model(context.input_ids, inference_context=context)[0].clone()
    counts = [len(work.tokens) for work in plan.work]
    if recorded:
        context.end_recorded(plan)
        rows = [i * recorded[1] + j for i, count in enumerate(counts) for j in range(count)]
        logits = logits[rows]
    places = [
        first + j for first, count in zip(context.first_captures, counts) for j in range(count - 1)
    ]
    captured = context.captured_states()[places]
    layers = enumerate(engine.model.cache_requirements(), start=1)
    states = [(number, state.name) for number, layer in layers for state in layer.states]
    live = [*(memory.state(*one) for one in states), memory.hidden()]
    found = Step(
        logits,
        memory.pool[1:].clone(),
        [own[: len(counts)].clone() for own in live],
        [memory.state(*one, captured) for one in states],
    )
    for own, before in zip((memory.pool, memory.slots), kept):
        own.copy_(before)
    return found


ALL = "M*SGCKWL+E-"
CASES = [(kinds, counts) for kinds in (ALL, "H", "Z", "P*", "B") for counts in COUNTS]
KEPT = [("*W", (1,)), ("*L+", (1,) * 3), ("MGKSC", (1,) * 8), (ALL, (3, 1))]


@pytest.mark.parametrize(("pattern", "counts"), matrix_rows([*KEPT, *CASES], *KEPT))
def test_a_recorded_step_has_the_bits_of_a_launched_one(pattern, counts):
    """Those are, but for rounding, what the references give."""
    engine, plan, recorded = recorded_step(pattern, counts)
    launched, replayed = step(engine, plan), step(engine, plan, *recorded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "forced", "reference")
        expected = step(engine, plan)
    for name, one, other, near in zip(Step._fields, replayed, launched, expected, strict=True):
        for number, right, close in zip(one, other, near, strict=True):
            assert torch.equal(number, right), name
            assert_near(*(x.view(torch.float32) if name == "pool" else x for x in (number, close)))


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("pattern", [ALL, "HZ"])
def test_tensors_of_recorded_steps_fit_the_contracts_of_kernels(pattern, counts):
    """They are checked before a launch, and nothing is launched here."""
    engine, plan, recorded = recorded_step(pattern, counts)
    with counted_launches() as counts:
        step(engine, plan, *recorded)
    assert counts["attention.attention_kernel"] >= 1 and counts["attention.join_kernel"] >= 1


def recorded_step(pattern, counts):
    """An engine, a plan, and how it is laid out to be recorded."""
    num_rows, sizes = max(counts), sizes_up_to(64)
    size = next(size for size in sizes if size >= len(counts))
    engine = engine_of(pattern, size, num_rows)
    return engine, plan_of(engine, counts), (size, num_rows)
