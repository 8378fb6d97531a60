"""Means between two reports, of a model on one rank."""

import math

import pytest
import torch
from small_models import small_model
from stock_megatron import core_groups

from megatron_hybrid.models.flops import training_flops
from megatron_hybrid.training.data.batches import Batch
from megatron_hybrid.training.measures import Measures


def batch(*lengths):
    size = sum(lengths)
    tokens = torch.zeros(1, size, dtype=torch.int64)
    return Batch(tokens, tokens, torch.ones(1, size), list(lengths))


@pytest.fixture(autouse=True)
def groups():
    core_groups()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that `time.perf_counter` tells."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_speed_is_of_all_tokens_and_work_of_full_attention_grows_with_a_sequence(clock):
    model = small_model("M*")
    of_token, of_pair = training_flops(model)
    measures = Measures(model, peak_tflops=2e-6)
    measures.count_batch(batch(6, 2))
    clock[0] = 2.0
    values = measures.take()
    assert values["tokens_per_second"] == 4
    flops = 8 * of_token + (6 * 6 / 2 + 2 * 2 / 2) * of_pair
    assert values["tflops_per_rank"] == pytest.approx(flops / 2 / 1e12)
    assert values["flops_utilisation"] == pytest.approx(flops / 2 / 2e6)


def test_the_loss_is_that_of_a_token_and_leaves_out_what_is_not_finite():
    measures = Measures(small_model("M"))
    for loss, labels in ((1.0, 30), (math.nan, 40), (2.0, 10)):
        measures.add_step({"loss": (loss * labels, labels)})
    assert measures.take()["loss"] == pytest.approx(1.25)
    assert math.isnan(measures.take()["loss"])  # each call begins anew


def test_there_is_no_utilisation_of_an_unknown_device():
    assert "flops_utilisation" not in Measures(small_model("M")).take()
