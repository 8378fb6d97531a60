"""Attention by FlashAttention 2 and 3: by stand-ins with their signatures, and by real shapes."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flash_stand_in import (
    ARGUMENTS,
    backward,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    forward,
)
from paged import Pool, paged_case, paged_expectation
from recurrences import assert_near, randn, seeded
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_hybrid.ops import AttentionPattern, RaggedLayout, attention, varlen_attention
from megatron_hybrid.ops.attention import fa3, flash, reference
from megatron_hybrid.ops.dispatch import Planning, planning

PATTERNS = {
    "all": AttentionPattern(0.3),
    "window": AttentionPattern(0.3, window=21),
    "chunk": AttentionPattern(0.3, chunk=20),
}
each_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
with_or_without_sinks = pytest.mark.parametrize("with_sinks", [False, True])


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(flash, "forward_op", forward)
    monkeypatch.setattr(flash, "backward_op", backward)
    monkeypatch.setattr(flash, "capped_attention", lambda: flash_attn_varlen_func)


def leaves(generator, *shapes):
    return [randn(generator, *shape).requires_grad_() for shape in shapes]


@each_pattern
@pytest.mark.parametrize("kind", ["plain", "sinks", "softcap"])
@pytest.mark.parametrize("lengths", [(1, 47, 20, 1), (64,)], ids=str)
@pytest.mark.parametrize("P", [8, 5])
def test_outputs_and_gradients_are_those_of_the_reference(pattern, kind, lengths, P):
    with_sinks = kind == "sinks"
    pattern = replace(pattern, softcap=0.7) if kind == "softcap" else pattern
    layout = RaggedLayout(lengths, (0,) * len(lengths), num_padding=3)
    T, generator = layout.num_rows, seeded(3)
    tensors = leaves(generator, (T, 4, 8), (T, 2, 8), (T, 2, P), (4,))
    weights = randn(generator, T, 4, P)
    results = []
    for op in (flash.run, reference.varlen_attention):
        out = op(*tensors[:3], layout, pattern, tensors[3] if with_sinks else None)
        used = tensors[: 4 if with_sinks else 3]
        results.append([out, *torch.autograd.grad((out * weights).sum(), used)])
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected)
    assert not results[0][0][layout.num_tokens :].any()


@each_pattern
@with_or_without_sinks
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("run", [flash.run_paged, fa3.run], ids=["flash", "fa3"])
def test_prefills_read_keys_from_pages_and_leave_short_ones_to_the_kernel(
    monkeypatch, run, pattern, with_sinks, by_row
):
    def few_alone(*inputs, takes_whole):
        out, layout = reference.paged_attention(*inputs), inputs[4]
        for r, length in enumerate(layout.lengths):
            if length > 16 and r >= layout.num_decodes and not takes_whole:
                out[layout.cu_seqlens[r] : layout.cu_seqlens[r + 1]] = math.nan
        return out

    monkeypatch.setattr(attention, "triton", SimpleNamespace(run=few_alone), raising=False)
    wheel = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", wheel)
    mixed = (1, 40, 9, 30, 17), (70, 0, 33, 59, 60)
    for lengths, starts, decodes in ((*mixed, 0), (*mixed, 2), ((1, 1), (7, 90), 0)):
        layout, generator = RaggedLayout(lengths, starts, num_decodes=decodes), seeded(1)
        q, keys, values = paged_case(layout, 2, generator, 8)
        sinks = randn(generator, 4) if with_sinks else None
        pool = Pool(keys, values, 16, generator, torch.float64, columns=2, by_row=by_row)
        used = {*pool.block_table.flatten().tolist()}
        null = next(page for page in range(len(pool.k_pages)) if page not in used)  # of NaN
        for r, start in enumerate(starts):
            pool.block_table[r, : max(0, int(pattern.first_visible(start))) // 16] = null
        found = run(q, *pool, layout, pattern, sinks)
        assert_near(found, paged_expectation(layout, q, keys, values, pattern, sinks))


@each_pattern
@with_or_without_sinks
def test_torch_takes_these_arguments_and_gives_these_shapes(monkeypatch, pattern, with_sinks):
    monkeypatch.undo()
    for op, names in zip((flash.forward_op, flash.backward_op), ARGUMENTS, strict=True):
        given = [one.name for one in op.default._schema.arguments]
        assert given[: len(names)] == names
    layout = RaggedLayout((33, 1, 70), (0, 0, 0), num_padding=2)
    token = planning.set(Planning("cuda"))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            half = {"dtype": torch.bfloat16, "requires_grad": True}
            q, k, v, sinks = (
                torch.empty(shape, **half)
                for shape in ((106, 4, 192), (106, 2, 192), (106, 2, 128), (4,))
            )
            out = varlen_attention(q, k, v, layout, pattern, sinks if with_sinks else None)
            assert (out.shape, out.dtype) == ((106, 4, 128), torch.bfloat16)
            out.sum().backward()
            for tensor in (q, k, v) + (sinks,) * with_sinks:
                assert tensor.grad.shape == tensor.shape
        assert planning.get().served == {("varlen_attention", "flash")}
    finally:
        planning.reset(token)


def test_it_says_what_it_cannot_serve(monkeypatch):
    layout, half = RaggedLayout((20,), (0,)), {"dtype": torch.bfloat16}
    q, k = torch.empty(20, 4, 64, **half), torch.empty(20, 2, 64, **half)
    plain = AttentionPattern(0.1)
    for fields, word in (
        ({"dropout": 0.1}, "dropout"),
        ({"skips_first": True}, "skips_first"),
    ):
        assert word in flash.verify(q, k, k, layout, replace(plain, **fields))
    capped = replace(plain, softcap=2.0)
    assert "without sinks" in flash.verify(q, k, k, layout, capped, q[0, :, 0])
    monkeypatch.setattr(flash, "capped_attention", lambda: None)
    assert "flash-attn 2.6" in flash.verify(q, k, k, layout, capped)
    assert "16 bits" in flash.verify(q.float(), k.float(), k.float(), layout, plain)
    assert "float16" in flash.verify(q, k, k.half(), layout, plain)
    for D in (60, 264):
        wide = torch.empty(20, 2, D, **half)
        assert f"{D} and {D} wide" in flash.verify(wide, wide, wide, layout, plain)
    assert "cuda" in flash.verify(q, k, k, layout, plain)
    pages = torch.empty(2, 16, 2, 64, **half)
    for own, word in (((pages.half(), pages), "float16"), ((pages, pages[..., :32]), "64 and 32")):
        assert word in fa3.verify(q, *own, torch.zeros(1, 2), layout, plain)
    assert "no softcap" in fa3.verify(q, pages, pages, torch.zeros(1, 2), layout, capped)
