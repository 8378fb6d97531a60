"""Spans as a collector of OpenTelemetry gets them."""

import sys

import httpx
import pytest
from http_server import running_server
from reference import random_tokens, tiny_engine, tiny_model
from span_collector import CALLER, TRACE, TRACEPARENT, span_collector

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import SamplingParams


@pytest.fixture
def collector():
    with span_collector() as made:
        yield made


def attributes(span) -> dict:
    kinds = ("string_value", "int_value", "double_value", "array_value")
    return {
        each.key: next(getattr(each.value, kind) for kind in kinds if each.value.HasField(kind))
        for each in span.attributes
    }


def test_a_request_has_a_span_of_each_phase_inside_of_its_callers(collector):
    prompt, params = random_tokens(100), SamplingParams(temperature=0, num_tokens_to_generate=4)
    fields = {"host_cache_bytes": 64 << 20, "otlp_traces_endpoint": collector.endpoint}
    with tiny_engine(tiny_model("MG*-"), **fields) as engine:
        engine.generate([prompt[:60]], params)
        engine.cache.evict(1 << 30)
        options = RequestOptions(traceparent=TRACEPARENT)
        (result,) = engine.generate([prompt], params, options)
    spans = collector.spans
    whole = spans["llm_request"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, CALLER)
    phases = [spans[name] for name in ("queue", "restore", "prefill", "decode")]
    assert all(phase.parent_span_id == whole.span_id for phase in phases)
    times = [whole.start_time_unix_nano, *(phase.end_time_unix_nano for phase in phases)]
    assert times == sorted(times) and times[-1] == whole.end_time_unix_nano
    starts = [phase.start_time_unix_nano for phase in phases]
    assert starts == times[:-1]
    (event,) = whole.events
    assert event.name == "first_token" and event.time_unix_nano == starts[-1]
    found = attributes(whole)
    assert found["gen_ai.usage.input_tokens"] == 100 and found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.usage.cache_read.input_tokens"] == result.prefix.skipped_tokens == 60
    assert found["megatron_hybrid.fetched_tokens"] == 60
    assert result.prefix.miss_reason is None and "megatron_hybrid.miss_reason" not in found


@pytest.mark.parametrize("name", ["", "fleet"])
def test_headers_of_http_name_the_caller_and_the_environment_the_service(
    name, collector, monkeypatch
):
    monkeypatch.setenv("OTEL_SERVICE_NAME", name)
    body = {"prompt": "Once", "max_tokens": 2}
    with running_server({"otlp_traces_endpoint": collector.endpoint}) as server:
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=a"}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=None)
    span = collector.spans["llm_request"]
    assert (span.parent_span_id.hex(), span.trace_state) == (CALLER, "vendor=a")
    (reason,) = attributes(span)["gen_ai.response.finish_reasons"].values
    assert reason.string_value == "length"
    assert collector.services == {name or "megatron_hybrid"}
    assert attributes(span)["megatron_hybrid.miss_reason"] == "no_shared_prefix"


def test_a_collector_that_is_not_there_harms_no_request():
    endpoint = "http://127.0.0.1:1/v1/traces"
    with tiny_engine(tiny_model("M*-"), otlp_traces_endpoint=endpoint) as engine:
        assert engine.generate([random_tokens(9)], SamplingParams(temperature=0))


def test_without_opentelemetry_the_engine_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[tracing\]'"):
        tiny_engine(tiny_model("M*-"), otlp_traces_endpoint="http://127.0.0.1:1")
