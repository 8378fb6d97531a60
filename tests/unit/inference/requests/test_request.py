"""What is printed of an answer, and what is counted of its reasoning."""

import numpy as np
import pytest

from megatron_hybrid.cache.report import MissReason, PrefixReport
from megatron_hybrid.inference.requests.request import GenerationResult, Request, ThoughtMeter
from megatron_hybrid.inference.sampling_params import SamplingParams, ThinkingBudget

LONGEST = max(MissReason, key=len)


def result(text="a\nb", reason=None, new=2, prompt=5, skipped=3, **fields):
    report = PrefixReport(prompt, skipped, skipped, reason)
    return GenerationResult(0, [7] * prompt, [8] * new, text, "stop", report, **fields)


def test_a_printed_result_is_two_lines():
    assert str(result()) == "request 0: 'a\\nb'\ntokens: prompt 5, skipped 3, new 2 (stop)"
    assert "skipped 3 (budget)," in str(result(reason=MissReason.BUDGET))
    assert str(result(text=None)).startswith("request 0: [8, 8]\n")
    broken = result(text=None, error="ValueError: no\ntext")
    assert str(broken).startswith("request 0: ValueError: no text\n")
    assert str(result(other_samples=[result()])).startswith("request 0, 1 of 2 samples: 'a")


@pytest.mark.parametrize("text", ["word " * 1000, "\n" * 1000, None])
def test_a_printed_result_fits_80_columns(text):
    long = result(text, LONGEST, new=9999, prompt=131_072, skipped=131_071)
    first, second = str(long).split("\n")
    assert len(first) == 80 and first.endswith("...")
    assert len(second) <= 80


def test_a_request_that_was_not_looked_up_yet_can_be_printed():
    request = Request(3, np.array([1, 0]), 1, SamplingParams().resolved(), seed=1, num_tokens=1)
    shown = "request 3: []\ntokens: prompt 1, skipped 0 (not_admitted), new 0 (waiting)"
    assert str(request.result()) == shown


@pytest.mark.parametrize("begins_inside", [False, True])
def test_tokens_of_all_reasoning_are_counted_and_no_others(begins_inside):
    start, end, a = 1, 2, 5
    meter = ThoughtMeter(ThinkingBudget(3, end, start, begins_inside), vocab_size=40)
    answer = [*([] if begins_inside else [a, a, start]), a, a, end, a, a, a, start, a]
    for count in range(len(answer) + 1):
        tokens = np.array([a, *answer[:count]], np.int32)
        params = SamplingParams().resolved()
        request = Request(0, tokens, 1, params, seed=1, num_tokens=len(tokens))
        assert meter.is_over(request) == (count == len(answer))
    assert meter.end_bits.tolist() == [1 << end, 0]
