"""OutputProcessor: turns drawn tokens into answers (log-probabilities, stops, text)."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from megatron_hybrid.inference.requests.request import Request, RequestOutput
from megatron_hybrid.inference.sampling_params import FAILURES, NOT_FINITE, RULED_OUT, Sampled
from megatron_hybrid.text.guide import UnsatisfiableError


class OutputProcessor:
    """Appends drawn tokens to requests, and decides when these are answered. If the tokenizer
    fails on a request's text, also with a panic of native code, only this request ends.

    Args:
        tokenizer: for text and stop strings; without one, answers are ids only.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.epoch = 0
        """Generation epoch of the tokens to come."""
        self._growing: dict[Request, GrowingText] = {}

    def append(self, request: Request, sampled: Sampled) -> bool:
        """Append a drawn token with its log-prob, or fail the request if none could be drawn.
        Return whether the request is answered."""
        params, token = request.params, sampled.token
        if not request.num_generated and any(map(math.isnan, request.prompt_log_probs)):
            token = NOT_FINITE
        if token in FAILURES:
            kind = UnsatisfiableError if token == RULED_OUT else FloatingPointError
            request.mark_failed(kind(FAILURES[token]))
            return True
        if request.first_token_at is None:
            request.first_token_at = time.perf_counter()
        if params.num_tokens_to_generate == 0:
            request.mark_answered("length")
            return True
        stops = request.is_stop(token)
        if stops and token in params.stop_token_ids:
            request.stop_reason = token
        if not stops or params.detokenize_stop_sequence:
            if not request.epochs or request.epochs[-1][0] != self.epoch:
                request.epochs.append((self.epoch, request.num_generated))
            request.tokens[request.num_tokens] = token
            request.num_tokens += 1
            if params.return_log_probs:
                request.log_probs.append(sampled.log_prob)
            if params.top_n_logprobs:
                request.top_n_logprobs.append(sampled.top_log_probs)
        try:
            stops = stops or (bool(params.stop_words) and self._ends_with_stop_word(request))
            stops = stops or request.follow_guide()
        except BaseException as error:
            _raise_interrupt(error)
            request.mark_failed(error)
            return True
        if stops:
            request.mark_answered("stop")
        elif request.num_generated == params.num_tokens_to_generate:
            request.mark_answered("length")
        return request.done

    def finish(self, request: Request) -> None:
        """Set the text of an answered request."""
        self._growing.pop(request, None)
        if self.tokenizer is None or request.error is not None:
            return
        try:
            request.text = self._text(request)
        except BaseException as error:
            _raise_interrupt(error)
            request.mark_failed(error)

    def write_text_of(self, request: Request) -> None:
        """Let the request's outputs have text, at a small cost per token."""
        if self.tokenizer is not None:
            detokenize = self._detokenize_of(request)
            self._growing[request] = GrowingText(detokenize, request.params.stop_words)

    def take(self, request: Request) -> RequestOutput:
        """Return the tokens and text since the last output, and append them to its stream."""
        params, start = request.params, request.num_tokens_out
        tokens = request.generated_from(start)
        if request.done:
            text = request.text or ""
        else:
            text = self._text_so_far(request, tokens)
        output = RequestOutput(
            request.request_id,
            request.sample_index,
            tokens,
            text[request.num_chars_out :],
            request.finish_reason,
            request.prefix,
            self.epoch,
            request.result() if request.done else None,
            request.log_probs[start:] if params.return_log_probs else None,
            request.top_n_logprobs[start:] if params.top_n_logprobs else None,
        )
        request.num_tokens_out += len(tokens)
        request.num_chars_out = max(request.num_chars_out, len(text))
        if request.unread is not None:
            request.unread.append(output)
        return output

    def _text_so_far(self, request: Request, tokens: list[int]) -> str:
        if request not in self._growing:
            return ""
        try:
            return self._growing[request].add(tokens)
        except BaseException as error:  # of the tokenizer; the result has its message
            _raise_interrupt(error)
            return ""

    def _detokenize_of(self, request: Request) -> Callable[[list[int]], str]:
        detokenize = self.tokenizer.detokenize
        if request.params.skip_special_tokens:
            return detokenize  # it need not know special tokens
        return partial(detokenize, skip_special_tokens=False)

    def _ends_with_stop_word(self, request: Request) -> bool:
        words = request.params.stop_words
        detokenize = self._detokenize_of(request)
        longest = max(len(word.encode()) for word in words)
        # Most tokens add a byte or more, so the newest few show any new occurrence. If some have no
        # text (special tokens), a few more are needed.
        end = request.num_generated
        start = max(0, end - longest - 1)
        while start and len(detokenize(request.generated_from(start)[:-1])) < longest:
            start = max(0, 2 * start - end)
        tail = detokenize(request.generated_from(start))
        # If bytes are tokens, a cut inside a character also spoils the characters after it.
        for earlier in range(start - 1, max(-1, start - 4), -1):
            if not tail.startswith("\ufffd"):
                break
            tail = detokenize(request.generated_from(earlier))
        if not any(word in tail for word in words):
            return False
        # Bytes before the tail that form no character may spoil the word.
        text = detokenize(request.token_ids)
        return any(word in text for word in words)

    def _text(self, request: Request) -> str:
        """Decode the generated text, cut at its first stop string."""
        text = self._detokenize_of(request)(request.token_ids)
        found = [(text.find(word), word) for word in request.params.stop_words if word in text]
        if not found:
            return text
        start, word = min(found)
        if request.finish_reason == "stop":
            request.stop_reason = word
        keep = request.params.detokenize_stop_sequence
        return text[: start + len(word)] if keep else text[:start]


def _raise_interrupt(error: BaseException) -> None:
    """Raise an error that does not come from a tokenizer."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error


class GrowingText:
    """The text of an unfinished answer; only its newest tokens are detokenized repeatedly.

    Args:
        detokenize: the text of tokens.
        stop_words: a possible beginning of one is held back.
    """

    def __init__(self, detokenize: Callable[[list[int]], str], stop_words: Sequence[str]):
        self._detokenize = detokenize
        self._held = max((len(word) - 1 for word in stop_words), default=0)
        self._tokens: list[int] = []
        self._text = ""  # of the tokens before _read
        self._start = self._read = 0

    def add(self, new_tokens: Sequence[int]) -> str:
        """Add tokens, and return the text so far, without a possible beginning of a stop string or
        of a character at its end."""
        tokens = self._tokens
        tokens += new_tokens
        # A tokenizer may write its first token differently, without the space before it: so the
        # last tokens with text are decoded again, and the new text is what follows theirs.
        known = self._detokenize(tokens[self._start : self._read])
        new = self._detokenize(tokens[self._start :])
        if new.startswith(known):
            new = new[len(known) :]
        else:  # new tokens changed the text: in some tokenizers a bad byte spoils those before it
            self._text, self._start, self._read = "", 0, 0
            new = self._detokenize(tokens)
        sure = new.rstrip("\ufffd")
        text = self._text + sure
        if sure and sure == new:
            self._text, self._start, self._read = text, self._read, len(tokens)
        return text[: max(0, len(text) - self._held)]
