"""Answers as OpenAI's clients read them: whole ones, and chunks of streams."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.inference.request import GenerationResult, RequestOutput
from megatron_hybrid.serving.fields import CompletionFields, GenerationFields
from megatron_hybrid.text.tokenizer import Tokenizer

Json = dict[str, Any]


def prefix_block(report: PrefixReport) -> Json:
    """What was reused of a prompt, and why not more: of the request's own tenant alone."""
    return {
        "shared_tokens": report.shared_tokens,
        "skipped_tokens": report.skipped_tokens,
        "fetched_tokens": report.fetched_tokens,
        "miss_reason": report.miss_reason and report.miss_reason.value,
    }


def usage(prefixes: Sequence[PrefixReport], num_generated: int) -> Json:
    """Token counts of an answer to some prompts."""
    prompt = sum(report.prompt_tokens for report in prefixes)
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": num_generated,
        "total_tokens": prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": sum(r.skipped_tokens for r in prefixes)},
    }
    blocks = [prefix_block(report) for report in prefixes]
    return found | {"prefix": blocks[0] if len(blocks) == 1 else blocks}


@dataclass
class Answer:
    """One answer of a request, as far as it is there.

    Args:
        tokenizer: for the names of tokens.
        fields: of the request.
        id: of all answers and chunks of the request.
        model: the served name.
    """

    tokenizer: Tokenizer
    fields: GenerationFields
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Of a chat; else of a text completion."""
        return not isinstance(self.fields, CompletionFields)

    def head(self, of_chunk: bool = False) -> Json:
        """What all bodies begin with."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if of_chunk else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self, results: Sequence[GenerationResult]) -> Json:
        """The body of all answers. results: one for each prompt, with its samples."""
        samples = [sample for result in results for sample in result.samples]
        choices = [self._choice(index, sample) for index, sample in enumerate(samples)]
        generated = sum(len(sample.generated_tokens) for sample in samples)
        counts = usage([result.prefix for result in results], generated)
        return {**self.head(), "choices": choices, "usage": counts}

    def _choice(self, index: int, result: GenerationResult) -> Json:
        text = result.generated_text or ""
        choice: Json = {"index": index, "finish_reason": result.finish_reason, "stop_reason": None}
        logprobs = self._logprobs(
            result.generated_tokens, result.log_probs, result.top_n_logprobs, 0
        )
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            if self.fields.echo:
                text, logprobs = self._echoed(result, text)
            choice["text"] = text
        choice["logprobs"] = logprobs
        if self.fields.return_token_ids:
            choice["token_ids"] = result.generated_tokens
            choice["prompt_token_ids"] = result.prompt_tokens
        return choice

    def _echoed(self, result: GenerationResult, text: str) -> tuple[str, Json | None]:
        """Prompt and answer as one text."""
        prompt = self.tokenizer.detokenize(result.prompt_tokens)
        if result.log_probs is None:
            return prompt + text, None
        tops = None
        if self.fields.logprobs:
            tops = [None, *result.prompt_top_n_logprobs, *result.top_n_logprobs]
        values = [None, *result.prompt_log_probs, *result.log_probs]
        tokens = [*result.prompt_tokens, *result.generated_tokens]
        return prompt + text, self._logprobs(tokens, values, tops, 0)

    def first_chunk(self, index: int) -> Json | None:
        """A chat's role; None: there is none."""
        if not self.is_chat:
            return None
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def chunk(self, index: int, output: RequestOutput, num_chars: int) -> Json:
        """What a step added. num_chars: of the answer so far."""
        said = {"delta": {"content": output.text}} if self.is_chat else {"text": output.text}
        if self.is_chat and not output.text and output.finish_reason:
            said = {"delta": {}}
        if self.fields.return_token_ids:
            said["token_ids"] = output.tokens
        logprobs = self._logprobs(output.tokens, output.log_probs, output.top_n_logprobs, num_chars)
        return self._chunk(index, said, logprobs, output.finish_reason)

    def _chunk(self, index: int, said: Json, logprobs: Json | None, reason: str | None) -> Json:
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head(of_chunk=True), "choices": [choice]}

    def usage_chunk(self, prefixes: Sequence[PrefixReport], num_generated: int) -> Json:
        """The last chunk before [DONE], if asked for."""
        counts = usage(prefixes, num_generated)
        return {**self.head(of_chunk=True), "choices": [], "usage": counts}

    # Log-probabilities -------------------------------------------------------------------------

    def _logprobs(
        self,
        tokens: Sequence[int],
        values: Sequence[float | None] | None,
        tops: Sequence[dict[int, float] | None] | None,
        offset: int,
    ) -> Json | None:
        """offset: characters before the first token."""
        if values is None:
            return None
        tops = tops or [{}] * len(tokens)
        if self.is_chat:
            entries = [
                {**self._entry(token, value), "top_logprobs": [*self._entries(top)]}
                for token, value, top in zip(tokens, values, tops)
            ]
            return {"content": entries, "refusal": None}
        names, offsets = [], []
        for token in tokens:
            names.append(self._name(token))
            offsets.append(offset)
            offset += len(names[-1])
        return {
            "tokens": names,
            "token_logprobs": list(values),
            "top_logprobs": [
                None if top is None else {self._name(token): value for token, value in top.items()}
                for top in tops
            ],
            "text_offset": offsets,
        }

    def _entries(self, top: dict[int, float]) -> Iterable[Json]:
        return (self._entry(token, value) for token, value in top.items())

    def _entry(self, token: int, value: float) -> Json:
        written = self.tokenizer.token_bytes(token)
        return {
            "token": written.decode(errors="replace"),
            "logprob": max(value, -9999.0),  # JSON has no infinity
            "bytes": list(written),
        }

    def _name(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode(errors="replace")
