"""Requests of NVIDIA Dynamo's frontend, and the chunks that answer them, as plain data.

A request becomes one of /v1/completions with token ids, so that it is checked, and refused, like
any other request of the server. Dynamo need not be installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from megatron_hybrid.inference.requests.request import RequestOutput
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.serving.http.errors import ApiError, refusal_of_field
from megatron_hybrid.serving.parsers.choice import Style
from megatron_hybrid.serving.protocols.answers import LEAST_LOG_PROB, Answer, usage
from megatron_hybrid.serving.protocols.fields import CompletionFields
from megatron_hybrid.serving.protocols.request_mapping import (
    guide_of,
    is_thinking,
    sampling_params,
    thinking_budget,
)
from megatron_hybrid.text.guide import Guide
from megatron_hybrid.text.tokenizer import Tokenizer

Json = dict[str, Any]
SALT_MARK = "dynamo-cache-salt:"
"""Mark that Dynamo's reader looks for in the salts of KV events; it takes what follows."""
GROUPS = {
    "sampling_options": {
        **{name: name for name in ("n", "best_of", "temperature", "top_p", "top_k", "min_p")},
        **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
        **{name: name for name in ("seed", "logit_bias", "use_beam_search", "length_penalty")},
        **{name: name for name in ("include_stop_str_in_output", "allowed_token_ids")},
        "guided_decoding": "structured_outputs",
    },
    "stop_conditions": {
        **{name: name for name in ("max_tokens", "min_tokens", "stop", "ignore_eos")},
        "stop_token_ids": "stop_token_ids",
    },
    "output_options": {
        **{name: name for name in ("logprobs", "prompt_logprobs", "skip_special_tokens")},
    },
}
"""Groups of a request's fields, each with Dynamo's names and those of /v1/completions."""
UNSUPPORTED = (
    *("prompt_embeds", "multi_modal_data", "encoder_result"),
    *("prefill_result", "bootstrap_info"),
)
"""Fields of a request for what this worker lacks: pictures, and prefill apart from decoding."""


@dataclass(frozen=True)
class Asked:
    """A request in the form that the engine takes."""

    fields: CompletionFields
    params: SamplingParams
    guide: tuple[Guide, str] | None
    """The guide, and the field that asks for it."""
    salt: str
    shown_stops: frozenset[int]
    """Stop tokens that the caller has named."""


def read_request(
    request: Mapping[str, Any], tokenizer: Tokenizer, style: Style, room: int
) -> Asked:
    """Read and check a request, in a thread if it is a long one.

    Args:
        style: how the model answers a chat.
        room: most tokens of prompt and answer.

    Raises:
        ApiError: it asks for what this worker lacks.
    """
    for name in UNSUPPORTED:
        if request.get(name):
            raise ApiError(400, f"{name} is not supported by this worker: leave it out", name)
    groups = {name: dict(request.get(name) or {}) for name in GROUPS}
    extra = request.get("extra_args") or {}
    groups["sampling_options"] |= extra.get("sampling_options") or {}
    routing = request.get("routing") or {}
    if routing.get("lora_name"):
        raise ApiError(400, "there are no LoRA adapters: ask for the model itself", "lora_name")
    prompt = list(request.get("token_ids") or ())
    body = {"prompt": prompt, "priority": -(routing.get("priority") or 0)}  # higher ones first
    for group, names in GROUPS.items():
        body |= {ours: _decimal(groups[group].get(name)) for name, ours in names.items()}
    limit = body["max_tokens"]
    if limit is None:
        limit = body["max_tokens"] = max(1, room - len(prompt))
    if (least := body["min_tokens"]) is not None:
        # A request that was moved here asks for the rest of its tokens, but for the same minimum.
        body["min_tokens"] = min(least, limit)
        # The frontend looks for stop strings only after these tokens, the engine in all.
        del body["stop"]
    hidden = groups["stop_conditions"].get("stop_token_ids_hidden") or ()
    shown = frozenset(body["stop_token_ids"] or ())
    body["stop_token_ids"] = sorted({*shown, *hidden} - {*tokenizer.end_tokens} | shown)
    if isinstance(guided := body["structured_outputs"], Mapping):
        # Dynamo names a library for guides; here there is only one.
        body["structured_outputs"] = {
            name: _calls_alone(value) if name == "structural_tag" else value
            for name, value in guided.items()
            if name != "backend" and value is not None
        }
    try:
        fields = CompletionFields.model_validate(
            {name: value for name, value in body.items() if value is not None}
        )
    except ValidationError as error:
        raise refusal_of_field(error.errors()) from error
    fields.check()
    params = sampling_params(tokenizer, fields, limit)
    if runs := groups["sampling_options"].get("bad_words_token_ids"):
        params.bad_words_ids = tuple(map(tuple, runs))
    thoughts = style.thoughts
    thinks = thoughts and is_thinking(tokenizer, fields, thoughts, prompt)
    if (most := groups["stop_conditions"].get("max_thinking_tokens")) is not None:
        params.thinking_budget = thinking_budget(tokenizer, most, thoughts, bool(thinks))
    if not request.get("require_reasoning"):  # the guide is of the whole answer, reasoning included
        thinks = None
    salt = routing.get("cache_salt") or (extra.get("nvext") or {}).get("cache_salt")
    return Asked(
        fields,
        params,
        guide_of(fields, style, thinks),
        f"{SALT_MARK}{salt}" if salt else "",
        shown,
    )


def _calls_alone(tag: Any) -> Any:
    """Return a structural tag in which required calls are all of the answer, as in `serve`. In
    Dynamo's own tags, which have a style that callers leave out, any text may follow the calls. A
    single tool is called once: Dynamo's tag for a named tool is that for the only one."""
    form = _object(_object(tag).get("format"))
    tags = form.get("tags")
    if not (form.get("type") == "triggered_tags" and form.get("at_least_one")):
        return tag
    if not isinstance(tags, list) or not all(
        "style" in _object(_object(each).get("content")) for each in tags
    ):
        return tag
    only = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    once = bool(form.get("stop_after_first")) or len(tags) == 1
    return {**tag, "format": {**only, "stop_after_first": once}}


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _decimal(value: Any) -> Any:
    """Return a number as the caller wrote it: Dynamo keeps 32 bits, so that 0.7 is 0.699999988."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


class Chunks:
    """The chunks of one answer.

    Args:
        asked: the request.
        tokenizer: names the tokens.
    """

    def __init__(self, asked: Asked, tokenizer: Tokenizer):
        self._asked = asked
        self._answer = Answer(tokenizer, asked.fields, id="", model="")
        self._num_generated = 0

    def of(self, output: RequestOutput) -> Json:
        """Return the chunk of what a step added to one sample."""
        self._num_generated += len(output.token_ids)
        chunk: Json = {"token_ids": output.token_ids, "index": output.sample_index}
        num_top = self._asked.fields.num_top
        if num_top is not None and output.log_probs:
            chunk["log_probs"] = [max(value, LEAST_LOG_PROB) for value in output.log_probs]
            tops = output.top_n_logprobs or [{}] * len(output.log_probs)
            firsts = (self._answer.first(top, num_top) for top in tops)
            chunk["top_logprobs"] = [
                [
                    {"rank": rank, "token_id": token, **self._answer.entry(token, value)}
                    for rank, (token, value) in enumerate(first.items(), 1)
                ]
                for first in firsts
            ]
        if output.finish_reason is not None:
            chunk["finish_reason"] = output.finish_reason
            counts = usage([output.prefix], self._num_generated)
            del counts["prefix"]
            chunk["completion_usage"] = counts
        if (result := output.result) is not None:
            if isinstance(result.stop_reason, str) or result.stop_reason in self._asked.shown_stops:
                chunk["stop_reason"] = result.stop_reason
            if self._asked.fields.prompt_logprobs is not None:
                found = self._answer.prompt_logprobs(result)
                chunk["engine_data"] = {"prompt_logprobs": found}
        return chunk
