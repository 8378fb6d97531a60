"""Request, the engine's record of a request, and its outputs: RequestOutput, GenerationResult."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megatron_hybrid.cache.lease import Lease
from megatron_hybrid.cache.report import MissReason, PrefixReport
from megatron_hybrid.inference.requests.draft_length import DraftLength
from megatron_hybrid.inference.requests.options import LoadedAdapter, RequestOptions
from megatron_hybrid.inference.sampling_params import Draw, SamplingParams, ThinkingBudget
from megatron_hybrid.text.guide import GuideMatcher, UnsatisfiableError
from megatron_hybrid.utils.other_names import names_attributes

if TYPE_CHECKING:  # it imports torch, and the scheduler does not
    from megatron_hybrid.offload.fetch import Fetch

_WIDTH = 80
MAX_FAILURES = 3
"""Failed steps in a row after which a request that made no progress gets the last error."""


class RequestStatus(StrEnum):
    WAITING = "waiting"  # in the queue: new, or preempted
    PREFILL = "prefill"  # holds a slot; some known tokens are not computed yet
    DECODE = "decode"  # all tokens are computed, or all but the newest
    CLOSING = "closing"  # answered or cancelled; its last state is not yet saved
    FINISHED = "finished"  # not in the engine any more


@names_attributes
@dataclass
class GenerationResult:
    """Result of a request, or of one sample of it.

    `print` shows it in two lines. `token_ids` has the stop token only with
    `detokenize_stop_sequence`. `log_probs` and `top_n_logprobs` have one entry for each generated
    token, `prompt_log_probs` and `prompt_top_n_logprobs` one for each prompt token but the first.
    Times are seconds since the request was added.
    """

    request_id: int
    prompt_tokens: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str  # "length" | "stop" | "cancelled" | "error"; before that a `RequestStatus`
    prefix: PrefixReport
    log_probs: list[float] | None = None
    prompt_log_probs: list[float] | None = None
    top_n_logprobs: list[dict[int, float]] | None = None
    prompt_top_n_logprobs: list[dict[int, float]] | None = None
    epochs: list[tuple[int, int]] = field(default_factory=list)
    """Generation epochs: (epoch, index in `token_ids` of the first token drawn in it)."""
    time_to_first_token: float | None = None
    total_time: float | None = None
    stop_reason: int | str | None = None
    """The stop token of `stop_token_ids`, or the text of `stop_words`, that ended the answer. It is
    None if the answer ended otherwise."""
    error: str | None = None
    """Why this answer failed; the text is then None."""
    is_unsatisfiable: bool = False
    """Whether it failed since the request's own constraints left no token to draw."""
    draft_tokens: int = field(default=0, compare=False)
    """Drafts of the answer's tokens that were computed (`InferenceConfig.speculation`)."""
    accepted_draft_tokens: int = field(default=0, compare=False)
    """Computed drafts that were accepted, and are in the answer."""
    other_samples: list["GenerationResult"] = field(default_factory=list, repr=False, compare=False)
    """Results of the n - 1 other samples, in the result of the first."""

    def __str__(self) -> str:
        """Write two lines of at most 80 columns: the answer, cut to fit, and its token counts."""
        answer = self.token_ids if self.text is None else self.text
        head = f"request {self.request_id}: "
        if self.other_samples:
            head = f"request {self.request_id}, 1 of {len(self.samples)} samples: "
        line = head + (repr(answer) if self.error is None else " ".join(self.error.split()))
        line = line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."
        reason, skipped = self.prefix.miss_reason, self.prefix.skipped_tokens
        drafts = self.accepted_draft_tokens, self.draft_tokens
        return (
            f"{line}\ntokens: prompt {len(self.prompt_tokens)}, skipped {skipped}"
            f"{f' ({reason.value})' if reason else ''}, new {len(self.token_ids)} "
            f"({self.finish_reason})"
            f"{f', drafts {drafts[0]} of {drafts[1]}' if drafts[1] else ''}"
        )

    @property
    def samples(self) -> list["GenerationResult"]:
        """Results of all n samples, in the result of the first; this result alone in others."""
        return [self, *self.other_samples]


@names_attributes
@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Tokens and text that one step added to a request, or to one sample of it."""

    request_id: int
    sample_index: int
    """Number of the sample of the prompt, in [0, n). Each sample has its own `request_id`."""
    token_ids: list[int]
    text: str
    """New text. A possible beginning of a stop string or of a character is held back for a later
    output. Text of an output is never changed later: with a tokenizer that falls back to single
    bytes, `text` may differ in the character before an incomplete one at its end. A request of
    `generate` has all its text in its last output."""
    finish_reason: str | None
    """Reason as in `GenerationResult`, or None while the sample is not finished."""
    prefix: PrefixReport
    """Reused tokens of the prompt."""
    epoch: int
    """`engine.epoch` of the step, and so of its tokens."""
    result: GenerationResult | None
    """The result, in the last output of the sample; None in earlier outputs. The result of the
    first sample has the other samples as far as they are generated."""
    log_probs: list[float] | None = None
    """Log-probabilities of the tokens, if the request asks for them."""
    top_n_logprobs: list[dict[int, float]] | None = None
    """The most likely tokens at each position, if the request asks for them."""


def bits_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return the bits of some tokens, as in `Draw.allowed`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class ThoughtMeter:
    """Counts the tokens of one answer's reasoning.

    Args:
        budget: of it.
        vocab_size: of the model.
    """

    def __init__(self, budget: ThinkingBudget, vocab_size: int):
        self.end_bits = bits_of([budget.end], vocab_size)
        """The end of the reasoning, as `Draw.allowed`."""
        self._budget = budget
        self._is_open = budget.begins_inside
        self._num_tokens = self._num_seen = 0

    def is_over(self, request: "Request") -> bool:
        """Return whether the next token of the answer has to end the reasoning."""
        for token in request.generated_from(self._num_seen):
            if token in (self._budget.start, self._budget.end):
                self._is_open = token == self._budget.start
            else:
                self._num_tokens += self._is_open
        self._num_seen = request.num_generated
        return self._is_open and self._num_tokens >= self._budget.max_tokens


@dataclass(frozen=True)
class RequestSpec:
    """A checked prompt as plain data, from which each rank makes the same requests."""

    first_id: int
    """Id of the first of n samples; the others follow."""
    tokens: np.ndarray
    """int [prompt]."""
    max_tokens: int
    """Most tokens of prompt and answer together."""
    params: SamplingParams
    options: RequestOptions
    seed: int
    message_starts: tuple[int, ...]
    stop_ids: frozenset[int]

    def values(self) -> dict[str, object]:
        """Return the values that all ranks must have in common, by name."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("params", "options"):
            part = given.pop(name)
            given |= {f"{name}.{f.name}": getattr(part, f.name) for f in fields(part)}
        return given | {"stop_ids": sorted(self.stop_ids)}


@dataclass(eq=False)
class Request:
    """The engine's record of one request, and the handle that `add_request` returns.

    `tokens[:num_tokens]` are the known tokens (prompt and generated); the first `num_computed` of
    them are computed, and the live slot holds the state after exactly these.
    """

    request_id: int
    tokens: np.ndarray  # int32, with room for the longest possible answer
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    options: RequestOptions = field(default_factory=RequestOptions)  # of all n samples
    message_starts: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    matcher: GuideMatcher | None = None  # of `options.guide`
    allowed: np.ndarray | None = None  # as `Draw.allowed`: by `params.allowed_token_ids`
    thought: "ThoughtMeter | None" = None  # of `params.thinking_budget`
    adapter: LoadedAdapter | None = None
    sample_index: int = 0
    longest_forward: int = 1 << 62  # most of its tokens in one step
    origin: object = None  # the `RequestBuilder` of its engine
    spec: RequestSpec | None = None  # of all n samples, on the first one only

    status: RequestStatus = RequestStatus.WAITING
    num_tokens: int = 0
    num_computed: int = 0
    slot: int = -1
    lease: Lease | None = None
    waits_for: "tuple[Request, int] | None" = None
    common_with: dict[int, int] = field(default_factory=dict)  # request id -> tokens in common
    looked_up_at: int | None = None  # evictions from the pool at the last search of the tiers
    fetch: "Fetch | None" = None  # found by that search
    lacks_memory: bool = False  # to restore a state: all of the prompt is computed
    parked_tokens: int = 0  # computed before the preemption, with bytes in host memory
    num_preemptions: int = 0
    num_failures: int = 0  # failed steps that it was blamed for, in a row
    failed_at: tuple[int, int] = (0, 0)  # furthest (num_tokens, num_computed) at one of them
    lease_before: Lease | None = None  # released; its wanted positions pass to the next lease
    draft_length: DraftLength = field(default_factory=DraftLength)
    siblings: "list[Request]" = field(default_factory=list)  # samples to fork after the prefill
    other_samples: "list[Request]" = field(default_factory=list)  # on the first one only

    lease_report: PrefixReport | None = None  # of its first lease, or once it is cancelled
    log_probs: list[float] = field(default_factory=list)
    prompt_log_probs: list[float] = field(default_factory=list)
    top_n_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_top_n_logprobs: list[dict[int, float]] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)  # as in the result
    finish_reason: str | None = None
    done: bool = False  # answered: its result is complete; its last state may not be saved yet
    stop_reason: int | str | None = None
    error: str | None = None
    is_unsatisfiable: bool = False
    text: str | None = None
    num_tokens_out: int = 0  # generated tokens in its outputs so far
    num_chars_out: int = 0
    unread: "deque[RequestOutput] | None" = None  # outputs for its stream
    added_at: float = field(default_factory=time.perf_counter)
    restore_at: float | None = None  # began a fetch from the tiers
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens

    @property
    def salt(self) -> str:
        """The salt of its prefixes: that of its adapter, then its own."""
        return self.options.salt if self.adapter is None else self.adapter.salt + self.options.salt

    @property
    def samples(self) -> "list[Request]":
        """All n samples of the prompt, of the first sample; of another one, this sample alone."""
        return [self, *self.other_samples]

    @property
    def closed(self) -> bool:
        """Whether the request is done, and no longer in the engine."""
        return self.status is RequestStatus.FINISHED

    def mark_answered(self, reason: str) -> None:
        self.finish_reason, self.done = reason, True
        self.finished_at = time.perf_counter()

    @property
    def got_on(self) -> bool:
        """Whether it is further than at any failed step that it was blamed for."""
        return (self.num_tokens, self.num_computed) > self.failed_at

    @property
    def is_suspect(self) -> bool:
        """Whether it may make steps fail: two in a row failed, and it has made no progress."""
        return self.num_failures >= MAX_FAILURES - 1 and not (self.done or self.got_on)

    def note_failure(self) -> None:
        if self.got_on:
            self.num_failures, self.failed_at = 0, (self.num_tokens, self.num_computed)
        self.num_failures += 1

    def mark_failed(self, error: BaseException) -> None:
        """End the request with its own error: one of its tokenizer, or an `UnsatisfiableError`."""
        self.is_unsatisfiable = isinstance(error, UnsatisfiableError)
        self.error = str(error) if self.is_unsatisfiable else f"{type(error).__name__}: {error}"
        if self.finish_reason != "cancelled":
            self.mark_answered("error")

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prefix(self) -> PrefixReport:
        """Reused tokens of the prompt; none before it is admitted."""
        return self.lease_report or PrefixReport(
            self.num_prompt_tokens, 0, 0, MissReason.NOT_ADMITTED
        )

    @property
    def token_ids(self) -> list[int]:
        return self.generated_from(0)

    def generated_from(self, start: int) -> list[int]:
        """Return the generated tokens without the first `start`."""
        return self.tokens[self.num_prompt_tokens + start : self.num_tokens].tolist()

    @property
    def starts_from_cache(self) -> bool:
        """Whether its prefill starts where the match ends: it is not parked, and no prompt token
        has to be computed."""
        return not (self.parked_tokens or self.params.needs_prompt_logits)

    @property
    def prompt_needs_logits(self) -> bool:
        """Whether prompt log-probs are missing, so that every prompt token must be computed."""
        return self.num_computed < self.num_prompt_tokens and self.params.needs_prompt_logits

    @property
    def recompute_reason(self) -> MissReason | None:
        """Why the whole prompt is computed: for its log-probs, or for lack of memory."""
        return MissReason.NO_ROOM if self.lacks_memory else recompute_reason(self.params)

    @cached_property
    def _distinct_prompt_tokens(self) -> np.ndarray:
        return np.unique(self.tokens[: self.num_prompt_tokens])

    def draw(self) -> Draw:
        params, matcher = self.params, self.matcher
        if self._draws_alike and self.num_generated >= params.min_tokens:
            point = self.seed, self.sample_index, self.num_tokens
            return Draw(params, *point, allowed=self.allowed)
        must_end_thought = self.thought is not None and self.thought.is_over(self)
        # When a guide is over, only a stop token can be drawn.
        is_over = self.follow_guide()
        is_too_short = self.num_generated < params.min_tokens and not is_over
        bans_stops = is_too_short and not self._stops_are_text
        repeats = params.penalises_repetition
        penalises = repeats or params.penalises_answer
        return Draw(
            params,
            self.seed,
            self.sample_index,
            self.num_tokens,
            self._distinct_prompt_tokens if repeats else None,
            self.tokens[self.num_prompt_tokens : self.num_tokens] if penalises else None,
            () if must_end_thought else (*self._bad_ends(), *(self.stop_ids if bans_stops else ())),
            self.thought.end_bits
            if must_end_thought
            else (self.allowed if matcher is None else matcher.allowed),
        )

    @cached_property
    def _draws_alike(self) -> bool:
        """Whether its draws do not depend on the tokens before, once there are `min_tokens`."""
        params = self.params
        depends = params.penalises_repetition or params.penalises_answer or params.bad_words_ids
        return not depends and self.matcher is None and self.thought is None

    def draft_draws(self, drafts: Sequence[int]) -> list[Draw]:
        """Return the draw after each draft, as if it and those before it had been drawn. The draws
        end before a draft that cannot be drawn, or that ends the answer. The drafts lie in `tokens`
        after the known ones, as long as none is appended."""
        num_tokens, thought, draws = self.num_tokens, self.thought, []
        self.thought = copy(thought)
        try:
            for token in drafts:
                if self.is_stop(token) or not (self.matcher is None or self.matcher.allows(token)):
                    break
                self.tokens[self.num_tokens] = token
                self.num_tokens += 1
                try:
                    if self.follow_guide():
                        break
                except UnsatisfiableError:  # nothing can follow; if it is drawn, the answer fails
                    break
                draws.append(self.draw())
        finally:
            self.num_tokens, self.thought = num_tokens, thought
            if self.matcher is not None:
                self.matcher.go_back_to(self.num_generated)
        return draws

    def _bad_ends(self) -> Iterator[int]:
        """Yield the tokens that would complete one of `bad_words_ids`."""
        runs = self.params.bad_words_ids
        longest = max(map(len, runs), default=0)
        tail = self.generated_from(max(0, self.num_generated - longest)) if longest > 1 else []
        for *before, last in runs:
            if tail[max(0, len(tail) - len(before)) :] == before:
                yield last

    def is_stop(self, token: int) -> bool:
        """Return whether a token ends the answer, if it is drawn next."""
        return token in self.stop_ids and not self._stops_are_text

    @cached_property
    def dropped_stops(self) -> tuple[int, ...]:
        """Tokens that end the answer and are no part of it."""
        is_kept = self.params.detokenize_stop_sequence or self._stops_are_text
        return () if is_kept else tuple(self.stop_ids)

    @property
    def _stops_are_text(self) -> bool:
        return self.matcher is not None and self.matcher.stops_are_text

    def follow_guide(self) -> bool:
        """Add all generated tokens to the guide's matcher, if there is one. Return whether the
        answer is complete.

        Raises:
            UnsatisfiableError: no token of the tokenizer can follow.
        """
        if self.matcher is None:
            return False
        self.matcher.add(self.generated_from(self.matcher.num_tokens))
        return self.matcher.is_over

    def result(self) -> GenerationResult:
        """Return the answer so far; it is final once `done`."""
        scored, scores_prompt = self.params.return_log_probs, self.params.needs_prompt_logits
        lists_top = self.params.top_n_logprobs > 0
        first, added, ended = self.first_token_at, self.added_at, self.finished_at
        return GenerationResult(
            request_id=self.request_id,
            prompt_tokens=self.tokens[: self.num_prompt_tokens].tolist(),
            token_ids=self.token_ids,
            text=self.text,
            finish_reason=self.finish_reason or self.status.value,
            prefix=self.prefix,
            log_probs=list(self.log_probs) if scored else None,
            prompt_log_probs=list(self.prompt_log_probs) if scores_prompt else None,
            top_n_logprobs=list(self.top_n_logprobs) if lists_top else None,
            prompt_top_n_logprobs=(
                list(self.prompt_top_n_logprobs) if lists_top and scores_prompt else None
            ),
            epochs=list(self.epochs),
            time_to_first_token=None if first is None else first - added,
            total_time=None if ended is None else ended - added,
            stop_reason=self.stop_reason,
            error=self.error,
            is_unsatisfiable=self.is_unsatisfiable,
            draft_tokens=self.draft_length.num_drafts,
            accepted_draft_tokens=self.draft_length.num_accepted,
            other_samples=[request.result() for request in self.other_samples],
        )


def recompute_reason(params: SamplingParams) -> MissReason | None:
    """Return the reason to compute all of a prompt, however much of it is cached, or None."""
    return MissReason.PROMPT_LOG_PROBS if params.needs_prompt_logits else None
