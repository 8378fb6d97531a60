"""Bytes and FLOPs of forward passes, against real tiny models, torch's counter and brute force; and
the bounds of speed that follow from them."""

import itertools
import math
import sys
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import random_tokens, tiny_engine, tiny_model
from test_plan import NEMOTRON_H_8B
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_hybrid import ops
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.ops import AttentionPattern
from megatron_hybrid.ops.attention import reference
from megatron_hybrid.ops.attention.naive import visibility
from megatron_hybrid.tools.plan import plan, render, spec_of
from megatron_hybrid.tools.rates import BATCHES, RESTORED, duration, predict, render_rates
from megatron_hybrid.tools.roofline import (
    DEVICES,
    Attention,
    Experts,
    ModelWork,
    Work,
    device_of,
    num_bytes,
)


def work_of(model) -> ModelWork:
    return ModelWork.of(model, spec_of(model, 16, "exact"))


@pytest.fixture(scope="module")
def nemotron() -> ModelWork:
    with torch.device("meta"):
        return work_of(build_hybrid_model(NEMOTRON_H_8B))


@pytest.mark.parametrize("pattern", ["MG*-W-", "M-", "E*", "SKC+LE", "H-", "RQ", "UW"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_pass_of_many_tokens_reads_every_weight_once_but_for_the_embedding(pattern, tied):
    model = tiny_model(
        pattern,
        share_embeddings_and_output_weights=tied,
        moe_router_topk=2,
    )
    embedding = 0 if tied else num_bytes(model.embedding.parameters())
    work = work_of(model)
    passes = work.forward([(0, 10_000)]), work.forward([(0, 10_000)], num_logits=0)
    kept = 10_000 * sum(each.bytes_per_token for each in work.attention) + work.state_bytes
    weights = [one.num_bytes - kept for one in passes]
    assert weights[0] == pytest.approx(num_bytes(model.parameters()) - embedding, rel=1e-12)
    output = num_bytes([model.shared_embedding_or_output_weight()])
    assert weights[0] - weights[1] == pytest.approx(output)


@pytest.mark.parametrize("pattern", ["MG*-W-", "SC*L", "+*"])
def test_a_decode_reads_and_writes_what_an_engine_keeps_of_a_request(pattern):
    """State bytes are those of the views of a live slot; KV those of the rows of the pool."""
    model = tiny_model(pattern)
    engine = tiny_engine(model)
    memory = engine.memory
    position, state, kv = 100, 0, 0
    for number, layer in enumerate(model.cache_requirements(), start=1):
        for each in layer.states:
            state += num_bytes([memory.state(number, each.name)[0]])
        if layer.kv is not None:
            row = num_bytes(pages[0, 0] for pages in memory.kv_pages(number))
            pattern_of = AttentionPattern(1.0, window=layer.kv.window, chunk=layer.kv.chunk)
            positions = torch.arange(position + 1)
            kv += row * int(visibility(positions[-1:], positions, pattern_of).sum())
    work = work_of(model)
    no_request = work.forward([], num_logits=1).num_bytes
    for batch in (1, 3):
        moved = work.forward([(position, 1)] * batch, num_logits=1).num_bytes
        assert moved - no_request == batch * (2 * state + kv)


@pytest.mark.parametrize("pattern", ["*-", "*-*-", "*E", "W-*"])
def test_flops_of_a_pass_are_what_torch_counts(pattern, monkeypatch):
    """In one tile torch computes all T * T pairs of a prompt of T tokens, also the masked ones."""
    model, T = tiny_model(pattern), 24  # whole rows of a batch, and within the window
    for name in ("QUERY_TILE", "SCORE_TILE"):
        monkeypatch.setattr(reference, name, T)
    monkeypatch.setattr(sys.modules[ops.linear.__module__], "_DTYPES", ())  # it knows torch's
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(torch.tensor([random_tokens(T)]))
    work = work_of(model)
    masked = T * T - T * (T + 1) // 2
    expected = work.forward([(0, T)], num_logits=T).flops
    expected += masked * sum(each.flops_per_pair for each in work.attention)
    assert counter.get_total_flops() == expected


@given(
    locality=st.one_of(
        st.just({}),
        st.builds(lambda n: {"window": n}, st.integers(1, 40)),
        st.builds(lambda n: {"chunk": n}, st.integers(1, 40)),
    ),
    start=st.integers(0, 90),
    length=st.integers(1, 60),
)
def test_pairs_are_those_of_the_mask(locality, start, length):
    attention = Attention(locality.get("window"), locality.get("chunk"), 1, 1.0)
    positions = torch.arange(start + length)
    mask = visibility(positions[start:], positions, AttentionPattern(1.0, **locality))
    assert attention.pairs(start, start + length) == int(mask.sum())
    assert attention.seen(start) == int(mask[0].sum()) - 1


@pytest.mark.parametrize(("count", "topk", "tokens"), [(4, 2, 1), (4, 2, 3), (5, 1, 4), (3, 3, 2)])
def test_expected_experts_are_those_of_all_choices(count, topk, tokens):
    sets = list(itertools.combinations(range(count), topk))
    choices = list(itertools.product(sets, repeat=tokens))
    mean = sum(len(set().union(*choice)) for choice in choices) / len(choices)
    assert Experts(count, topk, 100 * count).bytes_read(tokens) == pytest.approx(100 * mean)


def test_passes_of_a_prefill_are_its_tokens(nemotron):
    one, many = (list(nemotron.prefill(100, 1124, size)) for size in (2048, 256))
    assert len(one) == 1 and len(many) == 4
    assert math.fsum(work.flops for work in many) == pytest.approx(one[0].flops)
    weights = nemotron.layer_bytes
    assert sum(w.num_bytes for w in many) - one[0].num_bytes >= 3 * weights


def test_of_what_is_restored_nothing_is_computed(nemotron):
    def flops(restored):
        return sum(work.flops for work in nemotron.first_token(8000, restored, 2048))

    assert flops(4000) == sum(work.flops for work in nemotron.prefill(4000, 8000, 2048))
    assert flops(8000) == nemotron.output_flops
    copied, logits = nemotron.first_token(8000, 8000, 2048)
    assert copied == nemotron.restore() == Work(2 * (nemotron.state_bytes + 4096 * 2))
    assert logits.num_bytes == nemotron.output_bytes
    assert work_of(tiny_model("*-")).restore() == Work()  # full attention alone has no state


def test_devices_by_name_and_by_hand():
    assert device_of("h100") == DEVICES["h100"]
    measured = device_of("h100", None, 798, 3.0)
    assert (measured.flops, measured.bandwidth, measured.source) == (798e12, 3e12, "as given")
    assert measured.memory_bytes == 80 * 10**9
    mine = device_of(None, 24 * 10**9, 165, 1.0)
    assert (mine.flops, mine.bandwidth, mine.memory_bytes) == (165e12, 1e12, 24 * 10**9)
    assert device_of(None, 24 * 10**9) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h1000",), r"--device is 'h1000'; use one of \['a100', 'b200', 'h100', 'h200'\]"),
        ((None, None, 100.0, 1.0), "without --device give --flops, --bandwidth and --memory"),
        ((None, 10, None, 1.0), "without --device give"),
    ],
)
def test_devices_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=message):
        device_of(*arguments)


def test_first_tokens_are_sums_of_passes(nemotron):
    rates = predict(nemotron, DEVICES["h100"], {8000: 1})
    (prefill,) = rates.prefill
    assert prefill.seconds_to_first_token[50] == pytest.approx(
        DEVICES["h100"].seconds(nemotron.restore())
        + DEVICES["h100"].seconds(nemotron.forward([(4000, 2048)], num_logits=0))
        + DEVICES["h100"].seconds(nemotron.forward([(6048, 1952)]))
    )
    assert prefill.tokens_per_second == 8000 / prefill.seconds_to_first_token[0]
    times = [prefill.seconds_to_first_token[percent] for percent in RESTORED]
    assert times == sorted(times, reverse=True)


def test_decode_is_bound_by_bytes_then_by_flops(nemotron):
    rates = predict(nemotron, DEVICES["h100"], {8000: 8, 64_000: 1})
    assert [(rate.context, rate.batch) for rate in rates.decode] == [
        (context, batch) for context in (8000, 64_000) for batch in BATCHES
    ]
    assert [rate.fits for rate in rates.decode] == [True, True, False, True, False, False]
    for rate in rates.decode:
        work = nemotron.forward([(rate.context, 1)] * rate.batch)
        assert rate.seconds == work.num_bytes / 3.35e12 > work.flops / 989e12
        assert rate.tokens_per_second == rate.batch / rate.seconds
    slow = predict(nemotron, replace(DEVICES["h100"], flops=1e12), {8000: 64}).decode[-1]
    assert slow.seconds == nemotron.forward([(8000, 1)] * 64).flops / 1e12


def test_the_report_fits_80_columns_and_says_what_it_is(nemotron):
    result = plan(NEMOTRON_H_8B, 80 * 10**9, 100_000, device=DEVICES["h100"])
    text = render(result)
    assert max(map(len, text.splitlines())) <= 80
    assert "not measurements" in " ".join(text.split())
    assert render(plan(NEMOTRON_H_8B, 80 * 10**9, 100_000)) in text
    assert "* so many requests need more memory than there is" in text
    assert "*" not in "".join(render_rates(predict(nemotron, DEVICES["h100"], {8000: 64})))
    rates = asdict(result)["rates"]
    assert [each["tokens"] for each in rates["prefill"]] == [8000, 64_000, 100_000]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (1.0, "1.00 s"), (0.0123, "12.3 ms"), (2e-3, "2.00 ms"), (5e-6, "5.00 us")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
