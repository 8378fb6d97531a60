"""RequestTracer: spans of requests for OpenTelemetry, sent to a collector."""

import time
from typing import Any

from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.version import __version__


class RequestTracer:
    """Sends the spans of each request after its end: `llm_request`, and inside of it `queue`,
    `restore` (from host memory or disk), `prefill` and `decode`. A thread of OpenTelemetry sends
    them in batches. If a collector does not answer for 2 s, spans are lost, but no request.

    Args:
        endpoint: URL of a collector that takes OTLP over HTTP, such as
            http://localhost:4318/v1/traces.

    Raises:
        ValueError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str):
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ValueError(
                f"otlp_traces_endpoint is {endpoint!r}, which needs packages of OpenTelemetry "
                f"({error}): pip install -e '.[tracing]'."
            ) from error
        resource = Resource.create()
        if resource.attributes["service.name"].startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "megatron_hybrid"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=2)))
        self._tracer = self._provider.get_tracer("megatron_hybrid", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._inside = trace.set_span_in_context

    def note_end(self, request: Request) -> None:
        """Write the spans of a request, or of one sample of it, that has ended."""
        shift = time.time_ns() - time.perf_counter_ns()
        given, names = request.options, ("traceparent", "tracestate")
        caller = self._extract({name: getattr(given, name) for name in names})
        whole = self._tracer.start_span(
            "llm_request",
            caller,
            attributes=_attributes(request),
            start_time=shift + int(request.added_at * 1e9),
        )
        ended = request.finished_at or time.perf_counter()
        started, first = request.started_at or ended, request.first_token_at or ended
        searched = min(request.restore_at or started, started)
        phases = [
            ("queue", request.added_at, searched),
            ("restore", searched, started),
            ("prefill", started, first),
            ("decode", first, ended),
        ]
        for name, begin, end in phases:
            if begin < end:
                span = self._tracer.start_span(
                    name, self._inside(whole), start_time=shift + int(begin * 1e9)
                )
                span.end(shift + int(end * 1e9))
        if request.first_token_at is not None:
            whole.add_event("first_token", timestamp=shift + int(first * 1e9))
        whole.end(shift + int(ended * 1e9))

    def close(self) -> None:
        """Send the spans that are left."""
        self._provider.shutdown()


def _attributes(request: Request) -> dict[str, Any]:
    """Return the attributes of a request, by OpenTelemetry's names where it has them.

    https://opentelemetry.io/docs/specs/semconv/gen-ai/
    """
    params, report = request.params, request.lease_report
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.num_tokens_to_generate,
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_generated,
        "gen_ai.response.finish_reasons": [request.finish_reason or request.status.value],
        "megatron_hybrid.request_id": request.request_id,
        "megatron_hybrid.sample": request.sample_index,
    }
    if report is not None:
        found |= {
            "gen_ai.usage.cache_read.input_tokens": report.skipped_tokens,
            "megatron_hybrid.shared_tokens": report.shared_tokens,
            "megatron_hybrid.fetched_tokens": report.fetched_tokens,
            "megatron_hybrid.miss_reason": report.miss_reason and report.miss_reason.value,
        }
    return {name: value for name, value in found.items() if value is not None}
