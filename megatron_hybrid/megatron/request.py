"""Megatron's records of requests: statuses, events, DynamicInferenceRequest and its record."""

from __future__ import annotations

import time
import uuid
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.megatron.errors import (
    ContextErrorFactory,
    ContextOverflowError,
    reads_data,
)
from megatron_hybrid.megatron.sampling_params import SamplingParams


class Status(Enum):
    """State of a request."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


class DynamicInferenceEventType(Enum):
    """Kinds of events of a request."""

    ADD_ENGINE = auto()
    ADD_CONTEXT = auto()
    GENERATED_TOKEN = auto()
    PAUSE = auto()
    EVICT = auto()
    FINISH = auto()
    FAIL = auto()
    ERROR_TRANSIENT = auto()
    ERROR_NONTRANSIENT = auto()


_ERRORS = (DynamicInferenceEventType.ERROR_TRANSIENT, DynamicInferenceEventType.ERROR_NONTRANSIENT)


@dataclass(kw_only=True)
class DynamicInferenceEvent:
    """One event of a request.

    The payload is {"token_id": int} for a generated token, the exception for an error, and None for
    other events. After `deserialize` it is an exception only if the request did not fit
    (`errors.py`), otherwise {"type": name of its class, "message": its text}.
    """

    timestamp: float = field(default_factory=time.time)
    """Seconds since 1970."""
    type: DynamicInferenceEventType
    payload: Any = None

    def __post_init__(self) -> None:
        if self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            fits = isinstance(self.payload, dict) and "token_id" in self.payload
        else:
            fits = (self.payload is not None) == (self.type in _ERRORS)
        if not (fits and isinstance(self.type, DynamicInferenceEventType)):
            raise AssertionError(f"an event of type {self.type} has the payload {self.payload!r}")

    def __str__(self) -> str:
        text = ""
        if self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            text = f", token={self.payload['token_id']}"
        elif self.payload is not None:
            text = f", {self.serialize()['payload']['type']}"
        return f"[{self.timestamp:.3f}] {self.type.name}{text}"

    def serialize(self) -> dict[str, Any]:
        """Return the event as plain data."""
        payload = self.payload
        if isinstance(payload, ContextOverflowError):
            payload = ContextErrorFactory.serialize(payload)
        elif isinstance(payload, BaseException):
            payload = {"type": type(payload).__name__, "message": str(payload)}
        return {"timestamp": self.timestamp, "type": self.type.name, "payload": payload}

    @classmethod
    @reads_data
    def deserialize(cls, data: dict[str, Any]) -> DynamicInferenceEvent:
        """Make an event from the data of `serialize`. Exceptions unknown to Megatron stay data."""
        payload = data["payload"]
        if isinstance(payload, dict) and "is_transient" in payload:
            payload = ContextErrorFactory.deserialize(payload)
        kind = DynamicInferenceEventType[data["type"]]
        return cls(timestamp=data["timestamp"], type=kind, payload=payload)


@dataclass(kw_only=True)
class DynamicInferenceRequest:
    """A request and its answer, with the fields that scripts read."""

    request_id: int
    prompt: str | None = None
    sampling_params: SamplingParams | None = None
    prompt_tokens: Tensor | None = None
    """int64 [L], on the CPU."""
    prompt_length: int | None = None
    arrival_time: float | None = None
    status: Status | None = None
    generated_text: str | None = None
    generated_tokens: list[int] = field(default_factory=list)
    """Generated ids, with the token that ended the answer, without the tokens of a stop word."""
    generated_length: int | None = None
    prompt_log_probs: list[float] | None = None
    generated_log_probs: list[float] | None = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    ttft: float | None = None
    """Seconds from `add_request` to the first token."""
    tpot: list[float] = field(default_factory=list)
    """Duration of the step of each token, in seconds."""
    latency: float | None = None
    """Seconds from `add_request` to the end."""
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    routing_indices: Any = None
    """Always None, since routing is not tracked."""
    policy_epoch: list[tuple[int, int]] | None = None
    """Epochs of an answered request: (index of a token, prompt included; epoch of the weights that
    drew the tokens after it, until the next entry)."""
    kv_cache_epoch: list[tuple[int, int]] | None = None
    """The same for the KV of the tokens. It is computed anew for new weights, so there is one
    entry."""
    uid: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    """A name that is unique over all engines and processes; a request id is the caller's, and an
    engine may see it twice."""

    def __str__(self) -> str:
        status = "[NOT ADDED]" if self.status is None else self.status.name
        return (
            f"id {self.request_id}, {status}, prompt len {self.prompt_length}, "
            f"gen len {len(self.generated_tokens)}, num events {len(self.events)}"
        )

    def add_event(
        self, type: DynamicInferenceEventType, payload: Any = None
    ) -> DynamicInferenceEvent:
        event = DynamicInferenceEvent(type=type, payload=payload)
        self.events.append(event)
        return event

    add_event_add_engine = partialmethod(add_event, DynamicInferenceEventType.ADD_ENGINE)
    add_event_add_context = partialmethod(add_event, DynamicInferenceEventType.ADD_CONTEXT)
    add_event_pause = partialmethod(add_event, DynamicInferenceEventType.PAUSE)
    add_event_evict = partialmethod(add_event, DynamicInferenceEventType.EVICT)
    add_event_finish = partialmethod(add_event, DynamicInferenceEventType.FINISH)
    add_event_fail = partialmethod(add_event, DynamicInferenceEventType.FAIL)
    add_event_error_transient = partialmethod(add_event, _ERRORS[0])
    add_event_error_nontransient = partialmethod(add_event, _ERRORS[1])

    def add_event_generated_token(self, token: int, **counts: int) -> DynamicInferenceEvent:
        payload = {"token_id": token, **counts}
        return self.add_event(DynamicInferenceEventType.GENERATED_TOKEN, payload)

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        self.status = Status.FAILED
        self.generated_text = self.generated_text or ""
        self.add_event_error_nontransient(error)
        self.add_event_fail()

    def succeeded(self) -> bool:
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        return self.status is Status.FAILED

    def serialize(self) -> dict[str, Any]:
        """Return the request as plain data, with the prompt's tokens if `return_prompt_tokens`."""
        data = dict(self.__dict__)
        data["status"] = self.status and self.status.name
        data["sampling_params"] = self.sampling_params and self.sampling_params.serialize()
        data["events"] = [event.serialize() for event in self.events]
        kept = self.sampling_params is None or self.sampling_params.return_prompt_tokens
        tokens = self.prompt_tokens if kept else None
        data["prompt_tokens"] = None if tokens is None else ("tensor", tokens.tolist())
        return data

    @classmethod
    @reads_data
    def deserialize(cls, data: dict[str, Any]) -> DynamicInferenceRequest:
        """Make a request from the data of `serialize`, or of a reply of Megatron's coordinator."""
        data = dict(data)
        data.pop("inference_parameters", None)
        data["status"] = data["status"] and Status[data["status"]]
        params = data["sampling_params"]
        data["sampling_params"] = params and SamplingParams.deserialize(params)
        data["events"] = [DynamicInferenceEvent.deserialize(event) for event in data["events"]]
        if data["prompt_tokens"] is not None:
            data["prompt_tokens"] = torch.tensor(data["prompt_tokens"][1], dtype=torch.long)
        return cls(**data)


_OF_TOKENS = ("tokens", "length", "text", "log_probs", "top_n_logprobs")
_JOINED = ("tpot", "events", *(f"generated_{name}" for name in _OF_TOKENS))
"""Fields of a whole request that are the sums of those of its segments."""


@dataclass(kw_only=True)
class DynamicInferenceRequestRecord:
    """A request in segments. Megatron's engine begins a new one when a preempted request goes on;
    ours continues the first."""

    requests: list[DynamicInferenceRequest] = field(default_factory=list)
    latency: float | None = None

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> DynamicInferenceRequestRecord:
        return cls(requests=[request])

    @classmethod
    def of_error(cls, request_id: int, error: BaseException) -> DynamicInferenceRequestRecord:
        """Return the record of a request that no engine took."""
        request = DynamicInferenceRequest(
            request_id=request_id,
            sampling_params=SamplingParams(),
            prompt_tokens=torch.empty(0, dtype=torch.long),
            prompt_length=0,
            generated_length=0,
        )
        request.fail(error)
        return cls.from_request(request)

    def __getitem__(self, index: int) -> DynamicInferenceRequest:
        return self.requests[index]

    @property
    def request_id(self) -> int:
        return self.requests[0].request_id

    def merge(self, tokenizer: object = None) -> DynamicInferenceRequest:
        """Return the whole request, with the record's latency. The tokenizer is not used."""
        merged = copy(self.requests[0])
        merged.latency = self.latency
        for each in self.requests[1:]:
            for name in _JOINED:
                one, other = getattr(merged, name), getattr(each, name)
                setattr(merged, name, None if one is None or other is None else one + other)
            for name in ("status", "policy_epoch", "kv_cache_epoch"):
                setattr(merged, name, getattr(each, name))
        return merged

    def serialize(self) -> dict[str, Any]:
        return {
            "requests": [request.serialize() for request in self.requests],
            "latency": self.latency,
        }

    @classmethod
    @reads_data
    def deserialize(cls, data: dict[str, Any]) -> DynamicInferenceRequestRecord:
        requests = [DynamicInferenceRequest.deserialize(each) for each in data["requests"]]
        return cls(requests=requests, latency=data["latency"])


@dataclass
class FinishedRequestRecord:
    """The values of a finished request that trainers read, and that no answer over HTTP has."""

    policy_epoch: list[tuple[int, int]] | None
    kv_cache_epoch: list[tuple[int, int]] | None
    num_evictions: int

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> FinishedRequestRecord:
        kinds = [event.type for event in request.events]
        return cls(
            request.policy_epoch,
            request.kv_cache_epoch,
            kinds.count(DynamicInferenceEventType.EVICT),
        )
