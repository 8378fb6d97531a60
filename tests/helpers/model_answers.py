"""Answers as models write them, and as the engine gives them."""

import json

from megatron_hybrid.cache.report import MissReason, PrefixReport
from megatron_hybrid.inference.requests.request import GenerationResult, RequestOutput

REPORT = PrefixReport(10, 8, 6, MissReason.STATE_EVICTED)


def function(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    function("weather", city={"type": "string"}, days={"type": "integer"}),
    function("time"),
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź", "days": 3}}\n</tool_call>'


def result_of(text: str, reason: str) -> GenerationResult:
    """Of a prompt of 10 tokens and an answer of two."""
    return GenerationResult(0, [1] * 10, [1, 2], text, reason, REPORT)


def output_of(text: str, reason: str | None = None) -> RequestOutput:
    """A token of a stream."""
    result = None if reason is None else result_of(text, reason)
    return RequestOutput(0, 0, [1], text, reason, REPORT, 0, result)


def said_in(events: bytes) -> list[dict]:
    """The JSON of server-sent events."""
    return [json.loads(event.partition(b"data: ")[2]) for event in events.split(b"\n\n")[:-1]]
