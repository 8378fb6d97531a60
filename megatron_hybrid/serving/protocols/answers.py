"""Answers as OpenAI's clients read them: whole ones, and chunks of streams."""

from __future__ import annotations

import time
from codecs import getincrementaldecoder
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, starmap
from typing import Any, ClassVar, Self

from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.inference.metrics.prometheus import FINISH_REASONS
from megatron_hybrid.inference.requests.request import GenerationResult, RequestOutput
from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.http.json_response import encode_json
from megatron_hybrid.serving.parsers.answer_parser import AnswerParser
from megatron_hybrid.serving.parsers.choice import Style
from megatron_hybrid.serving.parsers.dialect import AnswerPart, Content, Reasoning, ToolCall
from megatron_hybrid.serving.protocols.fields import CompletionFields, GenerationFields
from megatron_hybrid.text.tokenizer import Tokenizer

Json = dict[str, Any]
LEAST_LOG_PROB = -9999.0
"""Value in place of minus infinity, which JSON lacks."""


def prefix_block(report: PrefixReport) -> Json:
    """Return what was reused of a prompt, and why not more; only its tenant's prefixes count."""
    return {
        "shared_tokens": report.shared_tokens,
        "skipped_tokens": report.skipped_tokens,
        "fetched_tokens": report.fetched_tokens,
        "miss_reason": report.miss_reason and report.miss_reason.value,
    }


def usage(
    prefixes: Sequence[PrefixReport], num_generated: int, num_reasoning: int | None = None
) -> Json:
    """Return the token counts of an answer to some prompts. A chat's has `num_reasoning`, too."""
    prompt = sum(report.prompt_tokens for report in prefixes)
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": num_generated,
        "total_tokens": prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(r.skipped_tokens for r in prefixes)},
    }
    if num_reasoning is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    blocks = [prefix_block(report) for report in prefixes]
    return found | {"prefix": blocks[0] if len(blocks) == 1 else blocks}


@dataclass
class Answer:
    """One answer of a request, as far as it exists.

    Args:
        tokenizer: names the tokens.
        fields: those of the request.
        id: that of all answers and chunks of the request.
        model: the served name.
        style: how the model answers a chat, None if it is no chat.
        is_thinking: see `AnswerParser`.
    """

    tokenizer: Tokenizer
    fields: GenerationFields
    id: str
    model: str
    style: Style | None = None
    is_thinking: bool = False
    prompts: Sequence[Sequence[int]] = ()
    """Tokens of a completion's prompts, for `echo` in a stream."""
    end_mark: ClassVar[bytes] = b"data: [DONE]\n\n"
    created: int = field(default_factory=lambda: int(time.time()))
    reports: dict[int, PrefixReport] = field(default_factory=dict)
    """Reports of a stream's prompts that have begun, by their number."""
    num_generated: int = 0
    """Tokens of a stream so far."""
    num_reasoning: int = 0
    """Reasoning tokens of the choices that have ended."""

    @property
    def is_chat(self) -> bool:
        """True for a chat; False for a text completion."""
        return not isinstance(self.fields, CompletionFields)

    def head(self, of_chunk: bool = False) -> Json:
        """Return the fields that all bodies begin with."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if of_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """Return the body of all answers. `results` has one for each prompt, with its samples."""
        samples = [sample for result in results for sample in result.samples]
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        generated = sum(len(sample.token_ids) for sample in samples)
        counts = self._usage([result.prefix for result in results], generated)
        body = {**self.head(), "choices": choices, "usage": counts}
        if self.is_chat and self.fields.return_token_ids:
            body["prompt_token_ids"] = samples[0].prompt_tokens
        if self.is_chat and self.fields.prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs(samples[0])
        return body

    def _usage(self, prefixes: Sequence[PrefixReport], num_generated: int) -> Json:
        return usage(prefixes, num_generated, self.num_reasoning if self.is_chat else None)

    def _choice(self, index: int, result: GenerationResult) -> Json:
        text = result.text or ""
        choice: Json = {
            "index": index,
            "finish_reason": FINISH_REASONS[result.finish_reason],
            "stop_reason": result.stop_reason,
        }
        logprobs = self.logprobs(result.token_ids, result.log_probs, result.top_n_logprobs, 0)
        if self.is_chat:
            parser = self.parser()
            parts = [*parser.add(text), *parser.end()]
            choice["message"] = _message(parts)
            self.num_reasoning += self.count(choice["message"].get("reasoning", ""))
            if echoed := self.echoed(0):
                choice["message"]["content"] = echoed + (choice["message"]["content"] or "")
            choice["finish_reason"] = parser.finish_reason(choice["finish_reason"])
        else:
            if self.fields.echo:
                text, logprobs = self._echoed(result, text)
            choice["text"] = text
            if self.fields.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self.prompt_logprobs(result)
        choice["logprobs"] = logprobs
        if self.fields.return_token_ids:
            choice["token_ids"] = result.token_ids
            choice["weight_epochs"] = result.epochs
            if not self.is_chat:
                choice["prompt_token_ids"] = result.prompt_tokens
        return choice

    def _echoed(self, result: GenerationResult, text: str) -> tuple[str, Json | None]:
        """Return prompt and answer as one text, and the log-probabilities of both."""
        prompt = self._text(result.prompt_tokens)
        if self.fields.num_top is None:
            return prompt + text, None
        tops = None
        if result.top_n_logprobs is not None:
            tops = [None, *result.prompt_top_n_logprobs, *result.top_n_logprobs]
        values = [None, *result.prompt_log_probs, *result.log_probs]
        tokens = [*result.prompt_tokens, *result.token_ids]
        return prompt + text, self.logprobs(tokens, values, tops, 0)

    def echoed(self, number: int) -> str:
        """Return what an answer repeats of its prompt: all of a completion's; of a chat's the last
        message, if that is the assistant's."""
        if not self.fields.echo:
            return ""
        if self.is_chat:
            last = self.fields.messages[-1]
            said = last.get("content") if last.get("role") == "assistant" else None
            return said if isinstance(said, str) else ""
        return self._text(self.prompts[number])

    def count(self, text: str) -> int:
        """Count the tokens of a part of the answer, as the tokenizer writes its text."""
        return len(self.tokenizer.tokenize(text, add_special_tokens=False)) if text else 0

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.detokenize(tokens, self.fields.skip_special_tokens)

    def parser(self) -> AnswerParser:
        """Return the parser of one answer to a chat."""
        return self.style.parser(is_thinking=self.is_thinking, **self.fields.parsed_by)

    def counts(self) -> Json:
        """Return the usage so far, or null, for chunks of a stream that shall have the usage."""
        options = self.fields.stream_options
        if options is None or not options.counts:
            return {}
        if not options.continuous_usage_stats:
            return {"usage": None}
        return {"usage": self._usage([*self.reports.values()], self.num_generated)}

    def growing(self, number: int) -> list[GrowingChoice]:
        """Return the takers of the outputs of one prompt's stream, by sample."""
        n = self.fields.n
        return [GrowingChoice(self, number, number * n + index) for index in range(n)]

    def last(self, prefixes: Sequence[PrefixReport], num_generated: int) -> list[Json]:
        """Return the chunks at the end: the usage, if asked for."""
        if not self.counts():
            return []
        counts = self._usage(prefixes, num_generated)
        return [{**self.head(of_chunk=True), "choices": [], "usage": counts}]

    def error(self, error: ApiError) -> Json:
        """Return the chunk of a failure."""
        return error.body

    def encode(self, chunk: Json) -> bytes:
        """Return a chunk as a server-sent event."""
        return b"data: %b\n\n" % encode_json(chunk)

    # Log-probabilities -------------------------------------------------------------------------

    def logprobs(
        self,
        tokens: Sequence[int],
        values: Sequence[float | None] | None,
        tops: Sequence[dict[int, float] | None] | None,
        offset: int,
    ) -> Json | None:
        """Return log-probabilities as the API has them, or None if they were not asked for.

        Args:
            values: those of the tokens.
            tops: those of the most likely tokens in place of each.
            offset: characters before the first token.
        """
        if self.fields.num_top is None or values is None:
            return None
        tops = [self.first(top, self.fields.num_top) for top in tops or [{}] * len(tokens)]
        values = [value if value is None else max(value, LEAST_LOG_PROB) for value in values]
        if self.is_chat:
            entries = [
                {**self.entry(token, value), "top_logprobs": [*starmap(self.entry, top.items())]}
                for token, value, top in zip(tokens, values, tops)
            ]
            return {"content": entries, "refusal": None}
        offsets, decoder = [], getincrementaldecoder("utf-8")("replace")
        tokenizer = self.tokenizer
        skips = self.fields.skip_special_tokens
        written = tokenizer.text_bytes if skips else tokenizer.shown_bytes
        for token in tokens:
            offsets.append(offset)
            offset += len(decoder.decode(written(token)))
        return {
            "tokens": list(map(self._name, tokens)),
            "token_logprobs": values,
            "top_logprobs": [
                None if top is None else self._named({token: value} | top)
                for token, value, top in zip(tokens, values, tops)
            ],
            "text_offset": offsets,
        }

    def first(self, top: dict[int, float] | None, count: int) -> dict[int, float] | None:
        """Return at most `count` of the most likely tokens, without infinities."""
        if top is None:
            return None
        few = islice(top.items(), count)
        return {token: max(value, LEAST_LOG_PROB) for token, value in few}

    def prompt_logprobs(self, result: GenerationResult) -> list[Json | None]:
        """Return log-probabilities by id, as vLLM does, of each token of the prompt but the first
        and of the most likely ones in its place. `rank` is that among the most likely ones."""
        tokens, values = result.prompt_tokens[1:], result.prompt_log_probs
        found: list[Json | None] = [None]
        tops = result.prompt_top_n_logprobs or [{}] * len(tokens)
        for token, value, top in zip(tokens, values or (), tops, strict=True):
            top = self.first(top, self.fields.prompt_logprobs or 0)
            ranks = {each: rank for rank, each in enumerate(top, 1)}
            found.append(
                {
                    str(each): {
                        "logprob": log_prob,
                        "rank": ranks.get(each),
                        "decoded_token": self.tokenizer.shown_bytes(each).decode(errors="replace"),
                    }
                    for each, log_prob in ({token: max(value, LEAST_LOG_PROB)} | top).items()
                }
            )
        return found

    def _named(self, top: dict[int, float]) -> dict[str, float]:
        """Return values by name. Of tokens with the same name all but the first have their ids."""
        found: dict[str, float] = {}
        for token, value in top.items():
            name = self._name(token)
            found[_id_name(token) if name in found else name] = value
        return found

    def entry(self, token: int, value: float) -> Json:
        """Return a token and its log-probability in the form of chats."""
        written, as_ids = self.tokenizer.shown_bytes(token), self.fields.return_tokens_as_token_ids
        return {
            "token": written.decode(errors="replace") if not as_ids else _id_name(token),
            "logprob": value,
            "bytes": list(written),
        }

    def _name(self, token: int) -> str:
        """Return a token's text; a part of a character by its bytes, as OpenAI writes it."""
        if self.fields.return_tokens_as_token_ids:
            return _id_name(token)
        written = self.tokenizer.shown_bytes(token)
        try:
            return written.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


class EventAnswer:
    """The answer to one request in another form: items, whole or as events that name their types.
    It takes the outputs of its stream itself.

    Args:
        answer: the answer to the request's chat.
    """

    end_mark = b""

    def __init__(self, answer: Answer):
        self._answer, self._parser = answer, answer.parser()
        self._items: list[Json] = []
        self._open: type[AnswerPart] | None = None  # the kind of the last item, while it grows
        self._reasoning, self._has_begun = "", False

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """Return the body of the only result."""
        (result,) = results
        self._grow(result, result)
        return self._body(result.prefix, len(result.token_ids))

    def growing(self, number: int) -> list[Self]:
        """Return the taker of the stream's outputs, as `Answer.growing` does: this answer."""
        return [self]

    def add(self, output: RequestOutput) -> bytes:
        """Return the events of what a step added."""
        events = [] if self._has_begun else self._begin(output.prefix)
        self._has_begun = True
        return b"".join(map(self.encode, [*events, *self._grow(output, output.result)]))

    def encode(self, event: Json) -> bytes:
        """Return an event as a server-sent one."""
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))

    def _grow(
        self, said: GenerationResult | RequestOutput, result: GenerationResult | None
    ) -> list[Json]:
        """Return the events of more text. `result` is that of an answer which it completes."""
        parts = self._parser.add(said.text or "")
        if result is not None:
            parts += self._parser.end()
            self._end(result)
        events: list[Json] = []
        for part in parts:
            if self._open is not type(part):
                events += self._close()
            if isinstance(part, ToolCall):
                events += self._call(part)
                continue
            if self._open is None:
                self._open = type(part)
                events += self._begin_item(self._open is Reasoning)
            if isinstance(part, Reasoning):
                self._reasoning += part.text
            events += self._more(part.text)
        return events + (self._close() if result is not None else [])

    def _close(self) -> list[Json]:
        kind, self._open = self._open, None
        return [] if kind is None else self._end_item(kind is Reasoning)


class GrowingChoice:
    """One answer of a stream, as events.

    Args:
        answer: that of the request.
        number: that of its prompt.
        index: place among the request's answers.
    """

    def __init__(self, answer: Answer, number: int, index: int):
        self._answer = answer
        self._number = number
        self._index = index
        self._parser = answer.parser() if answer.is_chat else None
        self._has_begun = False
        self._num_chars = 0
        self._shows_prompt = answer.fields.return_token_ids
        self._reasoning = ""

    def _begin(self) -> list[Json]:
        """Return the events before those of the first output: a chat's role, an echoed prompt."""
        self._has_begun = True
        echoed = self._answer.echoed(self._number)
        self._num_chars = len(echoed)
        if self._parser is None:
            return [self._chunk({"text": echoed})] if echoed else []
        return [self._chunk({"delta": {"role": "assistant", "content": echoed}})]

    def add(self, output: RequestOutput) -> bytes:
        """Return the events of what a step added."""
        self._answer.reports[self._number] = output.prefix
        chunks = [] if self._has_begun else self._begin()
        self._answer.num_generated += len(output.token_ids)
        given = output.token_ids, output.log_probs, output.top_n_logprobs
        logprobs = self._answer.logprobs(*given, self._num_chars)
        self._num_chars += len(output.text)
        reason = output.finish_reason and FINISH_REASONS[output.finish_reason]
        if self._parser is None:
            said = [{"text": output.text}]
        else:
            parts = self._parser.add(output.text)
            if reason is not None:
                parts += self._parser.end()
                reason = self._parser.finish_reason(reason)
            self._reasoning += "".join(part.text for part in parts if isinstance(part, Reasoning))
            if reason is not None:
                self._answer.num_reasoning += self._answer.count(self._reasoning)
            said = [{"delta": delta} for part in parts for delta in _deltas(part)]
            said = said or [{"delta": {}}]
        if self._answer.fields.return_token_ids:
            said[0] |= {"token_ids": output.token_ids, "weight_epoch": output.epoch}
        elif not (output.text or reason or logprobs):
            return b"".join(map(self._answer.encode, chunks))
        *others, last = said
        chunks += [self._chunk(each) for each in others]
        chunks.append(self._chunk(last, logprobs, reason))
        if reason is not None and output.result is not None:
            chunks[-1]["choices"][0]["stop_reason"] = output.result.stop_reason
        return b"".join(map(self._answer.encode, chunks))

    def _chunk(self, said: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        choice = {"index": self._index, **said, "logprobs": logprobs, "finish_reason": reason}
        head, counts = self._answer.head(of_chunk=True), self._answer.counts()
        chunk = {**head, "choices": [choice], **counts}
        if self._shows_prompt:  # in the first one
            self._shows_prompt = False
            place = chunk if self._answer.is_chat else chunk["choices"][0]
            prompt = self._answer.prompts[self._number]
            place["prompt_token_ids"] = list(getattr(prompt, "tokens", prompt))
        return chunk


def _id_name(token: int) -> str:
    return f"token_id:{token}"


_DELTA_CHARS = 4096
"""Most characters of a call's arguments in one event."""


def _deltas(part: AnswerPart) -> Iterator[Json]:
    """Yield what a part adds to a message: for a call first its name, then its arguments."""
    if not isinstance(part, ToolCall):
        yield {"reasoning" if isinstance(part, Reasoning) else "content": part.text}
        return
    call, place = part.to_json(), {"index": part.index}
    call["function"]["arguments"] = ""
    yield {"tool_calls": [place | call]}
    for piece in argument_pieces(part):
        yield {"tool_calls": [place | {"function": {"arguments": piece}}]}


def argument_pieces(call: ToolCall) -> Iterator[str]:
    """Cut a call's arguments into pieces for events."""
    for start in range(0, len(call.arguments), _DELTA_CHARS):
        yield call.arguments[start : start + _DELTA_CHARS]


def _message(parts: Sequence[AnswerPart]) -> Json:
    calls = [part.to_json() for part in parts if isinstance(part, ToolCall)]
    said = {
        kind: "".join(part.text for part in parts if isinstance(part, kind))
        for kind in (Reasoning, Content)
    }
    message: Json = {"role": "assistant", "content": said[Content], "refusal": None}
    if said[Reasoning]:
        message["reasoning"] = said[Reasoning]
    if calls:
        message |= {"content": said[Content] or None, "tool_calls": calls}
    return message
