"""A collector of OpenTelemetry's spans, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


class Collector(HTTPServer):
    """Keeps the spans that it is sent, the last one of each name."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans, self.services = {}, set()
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            kept = resource.resource.attributes
            self.server.services |= {e.value.string_value for e in kept if e.key == "service.name"}
            for scope in resource.scope_spans:
                self.server.spans |= {span.name: span for span in scope.spans}
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextmanager
def span_collector() -> Iterator[Collector]:
    """Context of a collector that listens."""
    with Collector() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
