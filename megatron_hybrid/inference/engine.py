"""DynamicInferenceEngine: requests in, tokens out.

The engine checks requests at the door, runs the scheduler's plans through the model and samples.
What is shared and kept is the cache's business, what runs next the scheduler's.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.cache.report import PrefixReport
from megatron_hybrid.config import InferenceConfig
from megatron_hybrid.inference.context import DynamicInferenceContext, StepPlan
from megatron_hybrid.inference.memory import CacheMemory, cache_spec_of
from megatron_hybrid.inference.ranks import agree_on_minimum, check_equal_on_ranks
from megatron_hybrid.inference.request import GenerationResult, Request, RequestStatus
from megatron_hybrid.inference.sampling import SamplingParams, log_probs_of, sample, top_log_probs
from megatron_hybrid.inference.scheduler import Scheduler

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class StreamEvent:
    """What one engine step added to a streamed request."""

    tokens: list[int]
    text: str
    result: GenerationResult | None = None  # set on the last event


class DynamicInferenceEngine:
    """Serves a hybrid model with continuous batching and prefix sharing.

    Args:
        model: from `build_hybrid_model` or `load_pretrained`; put into eval mode.
        tokenizer: with `tokenize`, `detokenize` and `eod` (megatron-core's names). Needed for text
            prompts and for stop strings only.
        config: sizes and the prefix-caching mode.

    Raises:
        ValueError: the model cannot be served with this configuration; the message says why.
    """

    def __init__(self, model, tokenizer=None, config: InferenceConfig | None = None):
        self.config = config = config or InferenceConfig()
        self.model = model.eval()
        self.tokenizer = tokenizer
        parameter = next(model.parameters())
        dtype = config.kv_cache_dtype or parameter.dtype
        layers = model.cache_requirements()
        hidden_size = model.config.hidden_size
        spec = cache_spec_of(layers, hidden_size, dtype, config.block_size_tokens)
        num_pages = agree_on_minimum(config.cache_bytes // spec.page_bytes)
        if num_pages < 2:
            raise ValueError(
                f"cache_bytes={config.cache_bytes} holds {num_pages} pages of {spec.page_bytes} "
                f"bytes; at least 2 are needed. Raise cache_bytes or lower block_size_tokens "
                f"(now {config.block_size_tokens})."
            )
        self.cache = PrefixCache(spec, num_pages, config.prefix_caching)
        self.memory = CacheMemory(
            spec, layers, hidden_size, dtype, num_pages, config.max_requests, parameter.device
        )
        self.context = DynamicInferenceContext(
            self.memory, config.max_requests, config.max_sequence_length
        )
        self.scheduler = Scheduler(
            self.cache, self.context, config.max_requests, config.max_tokens
        )
        self._ids = itertools.count()
        self.num_steps = 0
        self.peak_pages_in_use = 0

    # The door ----------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        cache_breakpoints: Sequence[int] = (),
        n: int = 1,
    ) -> Request:
        """Queues a request and returns its handle (`done`, `result()`).

        Args:
            prompt: text, or token ids.
            params: how to sample; default `SamplingParams()`.
            salt: prefixes are shared among requests of equal salt only (tenants, adapters).
            cache_breakpoints: positions in the prompt whose state should be kept for later prompts,
                such as the end of a system prompt.
            n: samples of this prompt; they share one prefill. Results in `result().samples`.

        Raises:
            TypeError, ValueError: the request cannot be served; nothing has changed.
        """
        requests = self._build_samples(prompt, params, salt, cache_breakpoints, n)
        self.scheduler.add(requests[0])
        return requests[0]

    def _build_samples(self, prompt, params, salt, cache_breakpoints, n) -> list[Request]:
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        params.__post_init__()  # the caller may have changed fields since
        tokens = self._check_prompt(prompt, params)
        length = len(tokens)
        total = length + params.num_tokens_to_generate
        limit = self.config.max_sequence_length
        if length > limit:
            raise ValueError(
                f"the prompt has {length} tokens, max_sequence_length is {limit}: shorten the "
                "prompt or raise max_sequence_length"
            )
        if total > limit:
            raise ValueError(
                f"{length} prompt tokens + num_tokens_to_generate={params.num_tokens_to_generate} "
                f"exceed max_sequence_length={limit}: ask for at most {limit - length}"
            )
        if not self.cache.fits(total, self.config.max_tokens):
            raise ValueError(
                f"a request of {total} tokens does not fit in cache_bytes="
                f"{self.config.cache_bytes} ({self.memory.pool.shape[0] - 1} pages of "
                f"{self.cache.spec.page_bytes} bytes): raise cache_bytes or shorten the request"
            )
        if not isinstance(salt, str):
            raise TypeError(f"salt must be a str, got {type(salt).__name__}")
        if not _is_int(n) or not 1 <= n <= self.config.max_requests:
            raise ValueError(f"n must be an int in [1, max_requests={self.config.max_requests}], "
                             f"got {n!r}")
        breakpoints = tuple(cache_breakpoints)
        for position in breakpoints:
            if not _is_int(position) or not 0 < position <= length:
                raise ValueError(
                    f"cache_breakpoints must be ints in (0, {length}], the prompt's length; "
                    f"got {position!r}"
                )
        termination = params.termination_id
        if termination is None:
            termination = getattr(self.tokenizer, "eod", None)
        stop_ids = set(params.stop_token_ids) | ({termination} - {None})
        if params.stop_words and self.tokenizer is None:
            raise ValueError("stop_words need a tokenizer; this engine has none")

        first_id = next(self._ids)
        buffer = np.zeros(total, dtype=np.int32)
        buffer[:length] = tokens
        requests = [
            Request(
                request_id=first_id if index == 0 else next(self._ids),
                tokens=buffer.copy() if index else buffer,
                num_prompt_tokens=length,
                params=params,
                seed=_mix_seed(self.config.random_seed, first_id)
                if params.seed is None
                else params.seed,
                salt=salt,
                cache_breakpoints=breakpoints,
                stop_ids=frozenset() if params.ignore_termination else frozenset(stop_ids),
                sample_index=index,
            )
            for index in range(n)
        ]
        requests[0].siblings = requests[1:]
        requests[0].samples = requests
        return requests

    def _check_prompt(self, prompt: Prompt, params: SamplingParams) -> np.ndarray:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("a text prompt needs a tokenizer; this engine has none: pass ids")
            if not prompt:
                raise ValueError("the prompt is empty; give at least one token")
            prompt = self.tokenizer.tokenize(prompt)
            if params.add_BOS:
                bos = getattr(self.tokenizer, "bos", None)
                if bos is None:
                    raise ValueError("add_BOS=True, but the tokenizer has no bos token")
                prompt = [bos, *prompt]
        if isinstance(prompt, Tensor):
            prompt = prompt.cpu().numpy()
        try:
            tokens = np.asarray(prompt)
        except (ValueError, TypeError, OverflowError):
            tokens = np.empty(0, dtype=object)
            if len(prompt) == 0:
                raise
        if tokens.size == 0 and tokens.dtype != object:
            raise ValueError("the prompt is empty; give at least one token")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TypeError(
                "a prompt is a str or a flat sequence of int token ids, got "
                f"{type(prompt).__name__} of shape {tokens.shape} and type {tokens.dtype}"
            )
        vocab_size = self.model.config.vocab_size
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            bad = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
            raise ValueError(
                f"token {int(tokens[bad])} at position {bad} is outside the vocabulary "
                f"[0, {vocab_size})"
            )
        return tokens

    # Steps -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[GenerationResult]:
        """Runs one forward pass; returns the results of the requests that it finished.

        If the model raises, the step's requests go back to the queue and nothing cached is lost.
        """
        plan = self.scheduler.schedule()
        if not plan:
            if self.scheduler.waiting:
                raise RuntimeError(
                    f"{len(self.scheduler.waiting)} requests wait and none can run: this is a bug "
                    "in the scheduler, please report it"
                )
            return []
        self.num_steps += 1
        pages = self.cache.allocator
        in_use = pages.num_pages - 1 - pages.num_free - pages.num_evictable
        self.peak_pages_in_use = max(self.peak_pages_in_use, in_use)
        if self.config.verify_ranks:
            check_equal_on_ranks(self.cache.digest(), f"step {self.num_steps}")
        try:
            logits_nV = self._forward(plan)
        except BaseException:
            self.scheduler.abort(plan)
            raise
        self.scheduler.complete(plan)
        return self._sample(plan, logits_nV)

    def _forward(self, plan: StepPlan) -> Tensor:
        """Logits [n, V] of the wanted rows: those of `plan.work`, then those of `plan.ready`."""
        self.context.begin_step(plan)
        if not plan.work:
            return self.model.compute_logits(self.context.ready_hidden())
        return self.model(self.context.input_ids, inference_context=self.context)[0]

    def _sample(self, plan: StepPlan, logits_nV: Tensor) -> list[GenerationResult]:
        """Gives each row that ends a request's known tokens its next token."""
        owners: list[Request] = []
        rows: list[int] = []
        end = 0
        for work in plan.work:
            end += work.num_logits
            request = work.request
            if request.params.needs_prompt_logits and work.start < request.num_prompt_tokens:
                self._score_prompt(request, work.start, logits_nV[end - work.num_logits : end])
            if work.num_logits and request.num_computed == request.num_tokens:
                for owner in (request, *self.scheduler.fork(request)):
                    owners.append(owner)
                    rows.append(end - 1)
        for row, request in enumerate(plan.ready, start=end):
            for owner in (request, *self.scheduler.fork(request)):
                owners.append(owner)
                rows.append(row)
        if not owners:
            return []
        drawn_nV = logits_nV[rows]
        tokens = sample(drawn_nV, [owner.draw() for owner in owners])
        scored = any(owner.params.return_log_probs for owner in owners)
        log_probs = log_probs_of(drawn_nV, tokens) if scored else [None] * len(tokens)
        finished = []
        for owner, token, log_prob, logits_V in zip(owners, tokens, log_probs, drawn_nV):
            if self._append(owner, token, log_prob, logits_V):
                self._finish(owner)
                finished.append(owner.result())
        return finished

    def _score_prompt(self, request: Request, start: int, logits_TV: Tensor) -> None:
        """Row i holds the prediction of prompt token start + i + 1."""
        # A request that was computed again after losing its place has some of them already.
        first = len(request.prompt_log_probs) + 1
        last = min(start + len(logits_TV), request.num_prompt_tokens - 1)
        if first <= last:
            targets = request.tokens[first : last + 1].tolist()
            logits_TV = logits_TV[first - start - 1 : last - start]
            request.prompt_log_probs += log_probs_of(logits_TV, targets)

    def _append(self, request: Request, token: int, log_prob, logits_V: Tensor) -> bool:
        """Adds a drawn token; whether the request is answered with it."""
        params = request.params
        request.mark_first_token()
        if params.num_tokens_to_generate == 0:
            request.finish_reason = "length"
            return True
        stops = token in request.stop_ids
        if not stops or params.detokenize_stop_sequence:
            request.tokens[request.num_tokens] = token
            request.num_tokens += 1
            if params.return_log_probs:
                request.log_probs.append(log_prob)
            if params.top_n_logprobs:
                request.top_n_logprobs.append(top_log_probs(logits_V, params.top_n_logprobs))
        if stops or self._ends_with_stop_word(request):
            request.finish_reason = "stop"
        elif request.num_generated == params.num_tokens_to_generate:
            request.finish_reason = "length"
        return request.done

    def _ends_with_stop_word(self, request: Request) -> bool:
        words = request.params.stop_words
        if not words:
            return False
        # A token adds at least one byte, so the newest tokens are enough to find a new occurrence.
        longest = max(len(word.encode()) for word in words)
        tail = self.tokenizer.detokenize(request.generated_tokens[-longest - 1 :])
        return any(word in tail for word in words)

    def _text(self, request: Request) -> str:
        """The generated text, cut before its first stop string."""
        text = self.tokenizer.detokenize(request.generated_tokens)
        starts = [
            (text.find(word), word) for word in request.params.stop_words if word in text
        ]
        if not starts:
            return text
        start, word = min(starts)
        keep = request.params.detokenize_stop_sequence
        return text[: start + len(word)] if keep else text[:start]

    def _finish(self, request: Request) -> None:
        request.mark_finished()
        if self.tokenizer is not None:
            request.generated_text = self._text(request)
        self.scheduler.finish(request)

    # Whole jobs --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str | Sequence[str] = "",
        cache_breakpoints: Sequence[int] | Sequence[Sequence[int]] = (),
        n: int | Sequence[int] = 1,
    ) -> list[GenerationResult]:
        """Answers prompts; returns one result for each, in order.

        `params`, `salt`, `cache_breakpoints` and `n` hold for all prompts, or are sequences with
        one entry for each. A result's `samples` hold all n. Every request is checked
        before any is queued. Other queued requests run along.

        Raises:
            TypeError, ValueError: as `add_request`; the message says which prompt.
        """
        if isinstance(prompts, str) or (len(prompts) and _is_int(prompts[0])):
            prompts = [prompts]
        count = len(prompts)
        per_prompt = zip(
            prompts,
            _spread(params, count, "params", lambda p: p is None or isinstance(p, SamplingParams)),
            _spread(salt, count, "salt", lambda s: isinstance(s, str)),
            _spread(
                cache_breakpoints,
                count,
                "cache_breakpoints",
                lambda b: len(b) == 0 or _is_int(b[0]),
            ),
            _spread(n, count, "n", _is_int),
        )
        groups = []
        for index, arguments in enumerate(per_prompt):
            try:
                groups.append(self._build_samples(*arguments))
            except (TypeError, ValueError) as error:
                raise type(error)(f"prompt {index}: {error}") from None
        for group in groups:
            self.scheduler.add(group[0])
        requests = [request for group in groups for request in group]
        try:
            while any(not request.closed for request in requests):
                self.step()
        except BaseException:
            for group in groups:
                self.cancel(group[0])
            raise
        return [group[0].result() for group in groups]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request_arguments
    ) -> Iterator[StreamEvent]:
        """Answers one prompt step by step; further arguments as for `add_request` (n must be 1).

        Closing the iterator early cancels the request. Text is held back while it may be the
        beginning of a stop string or ends inside a character.
        """
        if request_arguments.get("n", 1) != 1:
            raise ValueError("stream answers one sample; use add_request and step for n > 1")
        request = self.add_request(prompt, params, **request_arguments)
        return self._events(request)

    def _events(self, request: Request) -> Iterator[StreamEvent]:
        num_tokens = num_chars = 0
        hold = max((len(word) - 1 for word in request.params.stop_words), default=0)
        try:
            while not request.done:
                self.step()
                tokens = request.generated_tokens[num_tokens:]
                if not tokens and not request.done:
                    continue
                num_tokens += len(tokens)
                text = ""
                if request.done:
                    text = (request.generated_text or "")[num_chars:]
                elif self.tokenizer is not None:
                    text = self.tokenizer.detokenize(request.generated_tokens)
                    text = text.rstrip("\ufffd")[num_chars : max(num_chars, len(text) - hold)]
                num_chars += len(text)
                yield StreamEvent(tokens, text, request.result() if request.done else None)
            while not request.closed:
                self.step()
        finally:
            if not request.closed:
                self.cancel(request)

    def cancel(self, request: Request) -> None:
        """Ends a request with all its samples; those that are answered keep their answer. What was
        computed stays cached. A request that has ended already is left as it is."""
        for sample_ in request.samples or [request]:
            if sample_.closed:
                continue
            if not sample_.done:
                sample_.finish_reason = "cancelled"
                sample_.mark_finished()
                if self.tokenizer is not None:
                    sample_.generated_text = self._text(sample_)
                if sample_.report is None:
                    sample_.report = PrefixReport(sample_.num_prompt_tokens, 0, 0, None)
            self.scheduler.cancel(sample_)
        request.siblings = []

    # Inspection --------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters since the start, and sizes now."""
        return {
            **self.cache.stats(),
            "steps": self.num_steps,
            "forward_tokens": self.scheduler.num_forward_tokens,
            "preemptions": self.scheduler.num_preemptions,
            "requests_running": len(self.scheduler.running),
            "requests_waiting": len(self.scheduler.waiting),
            "peak_pages_in_use": self.peak_pages_in_use,
            "pool_bytes": self.memory.pool.numel(),
            "kv_blocks_in_use": self._kv_blocks_in_use(),
            "live_slot_bytes": self.memory.slots.numel(),
            "parked_bytes": sum(
                request.parked.num_bytes for request in self.scheduler.waiting if request.parked
            ),
        }

    def _kv_blocks_in_use(self) -> int:
        """Distinct KV blocks of the running requests; a shared one counts once."""
        tables = [request.lease.block_table for request in self.scheduler.running]
        if not tables or not self.cache.spec.kv_pages_per_block:
            return 0
        return len(np.unique(np.concatenate([table[:, 0] for table in tables])))

    def check_integrity(self) -> None:
        """Raises RuntimeError if an invariant of cache or scheduler is broken."""
        self.cache.check_integrity()
        running = [request.slot for request in self.scheduler.running]
        if sorted(running + self.scheduler.free_slots) != list(range(self.config.max_requests)):
            raise RuntimeError(
                f"live slots do not add up: {running} running, {self.scheduler.free_slots} free"
            )
        for request in self.scheduler.waiting:
            if request.lease is not None or request.slot != -1:
                raise RuntimeError(f"waiting request {request.request_id} holds a lease or a slot")


def _is_int(value) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _mix_seed(engine_seed: int, request_id: int) -> int:
    return (engine_seed << 32) ^ request_id


def _spread(value, count: int, name: str, is_single) -> list:
    """One value for each of `count` prompts, from a single one or a sequence."""
    if is_single(value):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries for {count} prompts")
    return list(value)
