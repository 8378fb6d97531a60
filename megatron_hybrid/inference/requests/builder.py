"""RequestBuilder: checks all arguments of a caller before anything changes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.inference.requests.options import LoadedAdapter, RequestOptions
from megatron_hybrid.inference.requests.request import Request, RequestSpec, ThoughtMeter, bits_of
from megatron_hybrid.inference.sampling_params import SamplingParams, model_defaults
from megatron_hybrid.text.chat_template import check_messages
from megatron_hybrid.text.guide import Guide, GuideCompiler
from megatron_hybrid.utils.validation import check_field, check_text, is_int, takes_argument

T = TypeVar("T")


@dataclass(frozen=True)
class RenderedChat:
    """A chat as tokens: what `Tokenizer.chat_prompt` gives."""

    tokens: Sequence[int]
    message_starts: Sequence[int] = ()
    """Its likely junctions with other chats: ascending positions in it."""


class TextTokenizer(Protocol):
    """What an engine needs of a tokenizer. It uses more methods of `Tokenizer` if they exist."""

    def tokenize(self, text: str, /) -> Sequence[int]: ...

    def detokenize(self, ids: list[int], /) -> str: ...


Prompt = str | Sequence[int] | Tensor | np.ndarray | Sequence[Mapping[str, Any]] | RenderedChat
"""Text, token ids, or the messages of a chat, rendered or not."""

NO_TOKEN = -1
"""Stands for no token in `termination_id` and in a tokenizer's end tokens, as in megatron-core. No
other id below zero means anything."""


class RequestBuilder:
    """Turns a caller's arguments into requests, or into one clear error.

    Args:
        config: limits of the engine.
        cache: for the check that a request can fit.
        tokenizer: for text, chats, end tokens and stop strings; without one, prompts are ids. Its
            optional `generation_config` holds the defaults of sampling.
        vocab_size: token ids lie in [0, vocab_size).
        find_adapter: gives the adapter of a name, or raises ValueError. None if there are none.

    Raises:
        ValueError: a field of the `generation_config` has an illegal value.
    """

    def __init__(
        self,
        config: InferenceConfig,
        cache: PrefixCache,
        tokenizer: TextTokenizer | None,
        vocab_size: int,
        find_adapter: Callable[[str], LoadedAdapter] | None = None,
    ) -> None:
        self.config, self._find_adapter = config, find_adapter
        self.cache = cache
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._model_defaults = model_defaults(getattr(tokenizer, "generation_config", {}))
        self.next_id = 0

    def build_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions | Sequence[RequestOptions | None] | None,
    ) -> list[list[Request]]:
        """Build the requests of several prompts, all or none. Arguments are those of
        `DynamicInferenceEngine.generate`.

        Raises:
            TypeError, ValueError: as `build`; the message names the prompt.
        """
        if isinstance(prompts, Tensor):
            prompts = prompts.tolist()
        is_array = isinstance(prompts, np.ndarray) and prompts.ndim > 0
        if not (is_array or isinstance(prompts, Sequence)):
            raise TypeError(
                f"prompts is one prompt or a sequence of prompts, got {type(prompts).__name__}"
            )
        if isinstance(prompts, str) or is_chat(prompts) or (len(prompts) and is_int(prompts[0])):
            prompts = [prompts]
        count = len(prompts)
        per_prompt = zip(
            prompts,
            _spread(params, count, SamplingParams, "params"),
            _spread(options, count, RequestOptions, "options"),
        )
        first_id, groups = self.next_id, []
        for index, arguments in enumerate(per_prompt):
            try:
                groups.append(self.build(*arguments))
            except (TypeError, ValueError) as error:
                self.next_id = first_id  # ids are seeds: a refusal must not change later draws
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"prompt {index}: {error}") from None
        return groups

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions | None,
    ) -> list[Request]:
        """Build the n samples of one prompt; the first one has the others as siblings.

        Raises:
            TypeError, ValueError: the message names the value, the limit and the remedy.
        """
        given, params = params, self.check_params(params)
        options = RequestOptions() if options is None else options
        if not isinstance(options, RequestOptions):
            raise TypeError(f"options must be RequestOptions, got {type(options).__name__}")
        prompt, message_starts = self._rendered(prompt)
        tokens = self.tokens_of(prompt, params)
        if given is None or given.num_tokens_to_generate is None:  # a default may be lowered
            room = max(1, self.config.max_sequence_length - len(tokens))
            params.num_tokens_to_generate = min(params.num_tokens_to_generate, room)
        total = self._check_length(len(tokens), params)
        options.check(len(tokens), self.config.max_requests)
        self.adapter_of(options)
        stop_ids = self._stop_ids(params)
        self._check_choice(params, options.guide, stop_ids)
        if options.guide is not None:
            self.check_guide(options.guide)
            self._guides.matcher(options.guide, stop_ids)  # raises if there is no such answer

        first_id, self.next_id = self.next_id, self.next_id + options.n
        seed = params.seed
        if seed is None:
            seed = (self.config.random_seed << 32) ^ first_id
        return self.make(
            RequestSpec(
                first_id, tokens, total, params, options, seed, tuple(message_starts), stop_ids
            )
        )

    def adapter_of(self, options: RequestOptions) -> LoadedAdapter | None:
        """Return the adapter that a request asks for. Raise ValueError if there is none."""
        return None if options.adapter is None else self._find_adapter(options.adapter)

    def make(self, spec: RequestSpec) -> list[Request]:
        """Make the samples of a prompt that this or the first rank's builder has checked."""
        options, samples = spec.options, []
        self.next_id = max(self.next_id, spec.first_id + options.n)  # ids are seeds
        longest_forward = self.cache.longest_forward(spec.max_tokens, self.config.max_tokens)
        allowed, budget = None, spec.params.thinking_budget
        adapter = self.adapter_of(options)
        if spec.params.allowed_token_ids is not None:
            allowed = bits_of(spec.params.allowed_token_ids, self.vocab_size)
        for index in range(options.n):
            buffer = np.zeros(spec.max_tokens, dtype=np.int32)
            buffer[: len(spec.tokens)] = spec.tokens
            matcher = None
            if options.guide is not None:
                matcher = self._guides.matcher(options.guide, spec.stop_ids)
            samples.append(
                Request(
                    request_id=spec.first_id + index,
                    tokens=buffer,
                    num_prompt_tokens=len(spec.tokens),
                    params=spec.params,
                    options=options,
                    matcher=matcher,
                    allowed=allowed,
                    thought=None if budget is None else ThoughtMeter(budget, self.vocab_size),
                    seed=spec.seed,
                    message_starts=spec.message_starts,
                    stop_ids=spec.stop_ids,
                    adapter=adapter,
                    sample_index=index,
                    longest_forward=longest_forward,
                    origin=self,
                )
            )
        first, *others = samples
        first.siblings, first.other_samples = list(others), others
        first.spec = replace(spec, tokens=first.tokens[: len(spec.tokens)])  # without a copy
        return samples

    def check_params(self, params: SamplingParams | None) -> SamplingParams:
        """Return a checked copy, with the model's defaults or ours for fields that are None."""
        if params is None:
            params = SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        if params.stop_words and self.tokenizer is None:
            raise ValueError(
                "stop_words need a tokenizer, and this engine has none: use stop_token_ids"
            )
        skipping = "skip_special_tokens"
        if not params.skip_special_tokens and not (
            self.tokenizer and takes_argument(self.tokenizer.detokenize, skipping)
        ):
            raise ValueError(
                f"{skipping}=False needs a tokenizer whose detokenize() has an argument of this "
                "name: use the one of load_pretrained"
            )
        # A checked copy: the caller may have changed fields, and may change them later.
        return params.resolved(self._model_defaults)

    def check_guide(self, guide: Guide) -> None:
        """Compile a guide, which makes its first request fast. Any thread may do so.

        Raises:
            TypeError, ValueError: the guide cannot be enforced.
            ImportError: llguidance is missing.
        """
        check_field("guide", guide, Guide)
        self._guides.compile(guide)

    @cached_property
    def _guides(self) -> GuideCompiler:
        if not hasattr(self.tokenizer, "token_bytes"):
            raise TypeError(
                f"a guide needs a tokenizer with token_bytes, and {type(self.tokenizer).__name__} "
                "has none: use the one of load_pretrained"
            )
        return GuideCompiler(self.tokenizer.token_bytes, self.vocab_size)

    def tokens_of(self, prompt: Prompt, params: SamplingParams) -> np.ndarray:
        """Return the token ids of a prompt, int [L]."""
        prompt, _ = self._rendered(prompt)
        if isinstance(prompt, str):
            prompt = self._tokenize(prompt, params)
        if isinstance(prompt, Tensor):
            prompt = prompt.tolist()  # of any device and dtype
        if isinstance(prompt, np.ma.MaskedArray):
            raise TypeError("a prompt has no masked tokens: pass prompt.compressed(), or ids")
        is_array = isinstance(prompt, np.ndarray) and prompt.ndim > 0
        if isinstance(prompt, (bytes, bytearray, memoryview)) or not (
            is_array or isinstance(prompt, Sequence)
        ):
            raise TypeError(
                "a prompt is a str or a sequence of token ids or of messages, got "
                f"{type(prompt).__name__}"
            )
        if len(prompt) == 0:
            raise ValueError("the prompt is empty: give at least one token")
        if is_array:
            kinds = {prompt.dtype.type if prompt.ndim == 1 else np.ndarray}
        else:
            kinds = set(map(type, prompt))  # numpy would turn a bool among ints into an int
        if not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise TypeError(
                "a prompt is a str or a flat sequence of int token ids, got "
                f"{type(prompt).__name__} with elements of type {names}"
            )
        tokens = np.asarray(prompt)
        outside = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))
        if len(outside):
            raise ValueError(
                f"token {int(prompt[outside[0]])} at position {outside[0]} is outside of the "
                f"vocabulary [0, {self.vocab_size}): was it made by another model's tokenizer?"
            )
        return tokens

    def _tokenize(self, text: str, params: SamplingParams) -> list[int]:
        if self.tokenizer is None:
            raise TypeError("a text prompt needs a tokenizer, and this engine has none: pass ids")
        check_text("the prompt", text)
        tokens = self.tokenizer.tokenize(text)
        if not params.add_BOS:
            return tokens
        bos = getattr(self.tokenizer, "bos", None)
        if bos is None:
            raise ValueError("add_BOS is set, but the tokenizer has no bos token: leave it False")
        return tokens if tokens[:1] == [bos] else [bos, *tokens]

    def _rendered(self, prompt: Prompt) -> tuple[str | Sequence[int], Sequence[int]]:
        """Return the text or token ids of a prompt, and the likely junctions of a chat."""
        if is_chat(prompt):
            return self._render(prompt)
        if isinstance(prompt, RenderedChat):
            return prompt.tokens, prompt.message_starts
        return prompt, ()

    def _render(self, messages: Sequence[Mapping]) -> tuple[list[int], list[int]]:
        """Return the token ids of a chat with the answer's header, and its likely junctions."""
        if self.tokenizer is None:
            raise TypeError("a chat needs a tokenizer, and this engine has none: pass token ids")
        if not hasattr(self.tokenizer, "chat_prompt"):
            raise TypeError(
                f"a chat needs a tokenizer with chat_prompt(), and {type(self.tokenizer).__name__} "
                "has none: use the one of load_pretrained, or pass text or token ids"
            )
        check_messages(messages)
        return self.tokenizer.chat_prompt(messages)

    def _check_length(self, length: int, params: SamplingParams) -> int:
        """Check and return the tokens of a request, prompt and answer together."""
        limit = self.config.max_sequence_length
        total = length + params.num_tokens_to_generate
        if length > limit or length == limit < total:
            raise ValueError(
                f"the prompt has {length} tokens, max_sequence_length is {limit}: shorten the "
                "prompt or raise max_sequence_length (an answer needs at least one token more)"
            )
        if total > limit:
            raise ValueError(
                f"{length} prompt tokens and num_tokens_to_generate="
                f"{params.num_tokens_to_generate} exceed max_sequence_length={limit}: ask for at "
                f"most {limit - length}, or raise max_sequence_length"
            )
        if not self.cache.longest_forward(total, self.config.max_tokens):
            raise ValueError(
                f"a request of {total} tokens does not fit in cache_bytes="
                f"{self.config.cache_bytes} ({self.cache.allocator.num_pages - 1} pages of "
                f"{self.cache.spec.page_bytes} bytes): raise cache_bytes, or shorten the "
                f"prompt or the answer (num_tokens_to_generate={params.num_tokens_to_generate})"
            )
        return total

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the tokens of the vocabulary that end an answer. Those that a request names are
        checked even if they have no effect."""
        foreign = "was it made by another model's tokenizer?"
        named = {*params.stop_token_ids}
        if params.termination_id not in (None, NO_TOKEN):
            named.add(params.termination_id)
        for token in sorted(named):
            remedy = f"{foreign} (termination_id={NO_TOKEN} is none)"
            self._check_id(f"stop token {token}", token, remedy)
        for token in params.logit_bias:
            self._check_id(f"token {token} of logit_bias", token, foreign)
        if params.ignore_termination:
            return frozenset()
        if params.termination_id is None:
            ends = getattr(self.tokenizer, "end_tokens", (getattr(self.tokenizer, "eod", None),))
            for token in {*ends} - {None, NO_TOKEN}:
                remedy = (
                    f"use the model's own tokenizer, or set termination_id ({NO_TOKEN} is none)"
                )
                self._check_id(f"the tokenizer's end token {token!r}", token, remedy)
                named.add(int(token))
        return frozenset(named)

    def _check_choice(
        self, params: SamplingParams, guide: Guide | None, stop_ids: frozenset[int]
    ) -> None:
        """Check that there is always a token to draw."""
        if (budget := params.thinking_budget) is not None:
            if params.allowed_token_ids is not None:
                raise ValueError(
                    "a thinking_budget and allowed_token_ids both say which tokens may come: give "
                    "one of them"
                )
            for token in (budget.start, budget.end):
                self._check_id(f"token {token} of thinking_budget", token, "use the model's own")
        ends = {run[-1] for run in params.bad_words_ids}
        forbidden = ends | (stop_ids if params.min_tokens else set())
        chosen = {
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_ids": {token for run in params.bad_words_ids for token in run},
        }
        for name, tokens in chosen.items():
            if not tokens:
                continue
            for token in tokens:
                foreign = "was it made by another model's tokenizer?"
                self._check_id(f"token {token} of {name}", token, foreign)
            if guide is not None:
                raise ValueError(
                    f"{name} and a guide both say which tokens may come: give one of them"
                )
            if forbidden.issuperset(params.allowed_token_ids or range(self.vocab_size)):
                raise ValueError(
                    f"{name} may leave no token to draw, with {len(ends)} that bad_words_ids and "
                    f"{len(stop_ids)} that min_tokens={params.min_tokens} forbid: forbid fewer"
                )

    def _check_id(self, what: str, token: int, remedy: str) -> None:
        """Raise ValueError for an id that would index another token, or another request's row."""
        if not is_int(token) or not 0 <= token < self.vocab_size:
            raise ValueError(
                f"{what} is outside of the vocabulary [0, {self.vocab_size}): {remedy}"
            )


def is_chat(prompt) -> bool:
    """Return whether a prompt is a sequence of messages. An empty one is not."""
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _spread(value: T | Sequence[T] | None, count: int, kind: type[T], name: str) -> list[T | None]:
    """Return `count` values, one for each prompt, from a single value or a sequence."""
    if value is None or isinstance(value, kind):
        return [value] * count
    if not hasattr(value, "__len__") or isinstance(value, Mapping):
        raise TypeError(
            f"{name} is {value!r}, of type {type(value).__name__}: give {kind.__name__}, or a "
            f"sequence with one for each prompt"
        )
    if len(value) != count:
        raise ValueError(
            f"{name} has {len(value)} entries for {count} prompts: give one, or one for each"
        )
    return list(value)
