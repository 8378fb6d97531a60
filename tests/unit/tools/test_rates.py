"""Bounds of the speed: what follows from the rooflines, and how it is printed."""

from dataclasses import asdict, replace

import pytest
import torch
from test_plan import NEMOTRON_H_8B

from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.tools.plan import plan, render, spec_of
from megatron_hybrid.tools.rates import BATCHES, RESTORED, duration, predict, render_rates
from megatron_hybrid.tools.roofline import DEVICES, ModelWork

H100 = DEVICES["h100"]


@pytest.fixture(scope="module")
def nemotron() -> ModelWork:
    with torch.device("meta"):
        model = build_hybrid_model(NEMOTRON_H_8B)
    return ModelWork.of(model, spec_of(model, 16, "exact"))


def test_first_tokens_are_sums_of_passes(nemotron):
    rates = predict(nemotron, H100, {8000: 1})
    (prefill,) = rates.prefill
    assert prefill.seconds_to_first_token[50] == pytest.approx(
        H100.seconds(nemotron.restore())
        + H100.seconds(nemotron.forward([(4000, 2048)], num_logits=0))
        + H100.seconds(nemotron.forward([(6048, 1952)]))
    )
    assert prefill.tokens_per_second == 8000 / prefill.seconds_to_first_token[0]
    times = [prefill.seconds_to_first_token[percent] for percent in RESTORED]
    assert times == sorted(times, reverse=True)


def test_decode_is_bound_by_bytes_then_by_flops(nemotron):
    rates = predict(nemotron, H100, {8000: 8, 64_000: 1})
    assert [(rate.context, rate.batch) for rate in rates.decode] == [
        (context, batch) for context in (8000, 64_000) for batch in BATCHES
    ]
    assert [rate.fits for rate in rates.decode] == [True, True, False, True, False, False]
    for rate in rates.decode:
        work = nemotron.forward([(rate.context, 1)] * rate.batch)
        assert rate.seconds == work.num_bytes / 3.35e12 > work.flops / 989e12
        assert rate.tokens_per_second == rate.batch / rate.seconds
    slow = predict(nemotron, replace(H100, flops=1e12), {8000: 64}).decode[-1]
    assert slow.seconds == nemotron.forward([(8000, 1)] * 64).flops / 1e12


def test_the_report_fits_80_columns_and_says_what_it_is(nemotron):
    result = plan(NEMOTRON_H_8B, 80 * 10**9, 100_000, device=H100)
    text = render(result)
    assert max(map(len, text.splitlines())) <= 80
    assert "not measurements" in " ".join(text.split())
    assert render(plan(NEMOTRON_H_8B, 80 * 10**9, 100_000)) in text
    assert "* so many requests need more memory than there is" in text
    assert "*" not in "".join(render_rates(predict(nemotron, H100, {8000: 64})))
    rates = asdict(result)["rates"]
    assert [each["tokens"] for each in rates["prefill"]] == [8000, 64_000, 100_000]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (1.0, "1.00 s"), (0.0123, "12.3 ms"), (2e-3, "2.00 ms"), (5e-6, "5.00 us")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
