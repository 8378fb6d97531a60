"""Plain data of sampling: SamplingParams of a request, Draw and its result, Sampled."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megatron_hybrid.utils.other_names import names_fields
from megatron_hybrid.utils.validation import check_text, is_int, is_number

logger = logging.getLogger(__name__)

_OURS = {
    **{"temperature": 1.0, "top_k": 0, "top_p": 0.0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "num_tokens_to_generate": 30, "min_tokens": 0},
}
"""Defaults where the model has none."""
_ROW_FIELDS = ("temperature", "top_k", "top_p", "min_p")
"""Fields for drawing a token from a row of logits."""
_IN_GENERATION_CONFIG = {
    **{name: name for name in (*_ROW_FIELDS, "repetition_penalty")},
    "max_new_tokens": "num_tokens_to_generate",
    "min_new_tokens": "min_tokens",
}
"""Names in generation_config.json, and ours."""
_NEUTRAL = {"num_beams": 1}
"""Unsupported fields of generation_config.json, with the value that has no effect."""
_FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_LEAST, _MOST = 1e-30, 1e30
"""Limits of what logits are divided by: in float32 the quotients of usual logits stay finite."""
_INTS = (
    *("top_k", "num_tokens_to_generate", "min_tokens", "seed", "top_n_logprobs"),
    *("termination_id", "num_speculative_tokens"),
)


@dataclass(frozen=True)
class ThinkingBudget:
    """Limit of the tokens of an answer's reasoning."""

    max_tokens: int
    end: int
    """Token that ends the reasoning. It is drawn after `max_tokens` tokens of reasoning, whatever
    its probability."""
    start: int
    """Token that begins the reasoning."""
    begins_inside: bool = False
    """Whether the prompt ends inside of reasoning."""

    def __post_init__(self) -> None:
        if not is_int(self.max_tokens) or self.max_tokens < 0:
            raise ValueError(f"max_tokens of a ThinkingBudget must be >= 0: {self.max_tokens!r}")


@names_fields
@dataclass
class SamplingParams:
    """Sampling parameters of one request. Field names follow megatron-core's `SamplingParams`.

    If `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `num_tokens_to_generate` or
    `min_tokens` is None, the value of the model's generation_config.json is taken, which
    `load_pretrained` reads with the tokenizer; the last two are `max_new_tokens` and
    `min_new_tokens` there. If the model has no value either, these are taken: 1.0, 0, 0.0, 0.0,
    1.0, 30, 0. A model with `do_sample: false` is greedy for requests that give none of the first
    four; for other requests its own values of these four have no effect.

    A row of logits is changed in this order, for greedy requests too: `logit_bias`,
    `repetition_penalty`, `frequency_penalty` and `presence_penalty`; then come `temperature`,
    `min_p`, `top_k`, `top_p`.

    Raises:
        ValueError: a field has an illegal value; the message names it and the limit.
        TypeError: there is no such field; the message gives the right one.
    """

    temperature: float | None = None
    """The logits are divided by this temperature, in [1e-30, 1e30]; 0 is greedy."""

    top_k: int | None = None
    """Keep the k most likely tokens; 0 keeps all, 1 is greedy."""

    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches top_p; 0 keeps all."""

    min_p: float | None = None
    """Keep tokens at least min_p times as likely as the most likely one; 0 keeps all."""

    repetition_penalty: float | None = None
    """Of tokens in the prompt or the answer, positive logits are divided by this penalty, and
    negative ones multiplied; in [1e-30, 1e30], and 1 changes nothing. What float32 cannot hold
    becomes its largest number. Keskar et al. (2019), "CTRL"."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer, as OpenAI defines it; in [-2, 2]."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit as often as the answer has the token; in [-2, 2]."""

    logit_bias: Mapping[int, float] | None = None
    """Token ids, each with a number in [-100, 100] that is added to the token's logit."""

    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens are drawn, so they have to include stop tokens; None: all tokens."""

    bad_words_ids: Sequence[Sequence[int]] = ()
    """Runs of tokens that the answer must not have: the last token of a run is not drawn after its
    other tokens, as in `transformers`."""

    thinking_budget: ThinkingBudget | None = None
    """Limit of the tokens of reasoning; None: there is no limit."""

    num_tokens_to_generate: int | None = None
    """Upper bound on new tokens; a default is lowered to fit in `max_sequence_length`. 0 runs the
    prompt alone (to warm the cache, or to score it)."""

    min_tokens: int | None = None
    """No stop token ends an answer with fewer tokens than this; a stop word still does."""

    seed: int | None = None
    """Seed of this request's draws. None: derived from the engine's seed and the request's id."""

    termination_id: int | None = None
    """Token that ends the generation; None: the tokenizer's end tokens, -1: none."""

    stop_token_ids: Sequence[int] = ()
    """Further tokens that end the generation."""

    stop_words: Sequence[str] | None = None
    """Strings that end the generation once the generated text contains one of them."""

    detokenize_stop_sequence: bool = False
    """Keep the stop token or stop string in the result."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text. False needs a tokenizer whose `detokenize` has an
    argument `skip_special_tokens`."""

    ignore_termination: bool = False
    """Continue after stop tokens (for benchmarks)."""

    return_log_probs: bool = False
    """Return log-probabilities of prompt and generated tokens; see
    `InferenceConfig.logprobs_mode`."""

    skip_prompt_log_probs: bool = False
    """With `return_log_probs`: return those of generated tokens alone. With those of the prompt,
    every prompt token must be computed, and the request skips none."""

    top_n_logprobs: int = 0
    """With `return_log_probs`: also return the n most likely tokens at each position that has a
    log-probability."""

    add_BOS: bool = False
    """Prepend the tokenizer's `bos` token to a text prompt."""

    num_speculative_tokens: int | None = None
    """Most drafts of this request in a step, up to `InferenceConfig.num_speculative_tokens`; 0: no
    drafts, None: as many as the engine's. Answers are the same (docs/guides/speculation.md)."""

    def __post_init__(self) -> None:
        def check(ok: bool, message: str) -> None:
            if not ok:
                raise ValueError(f"SamplingParams: {message}")

        for name in _FLOATS:
            value = getattr(self, name)
            if is_number(value):
                try:
                    setattr(self, name, float(value))
                except OverflowError:  # an int
                    setattr(self, name, math.inf)
        for name in _INTS:
            value = getattr(self, name)
            if is_int(value):
                setattr(self, name, int(value))
        heat, penalty = self.temperature, self.repetition_penalty
        check(
            heat is None or (isinstance(heat, float) and (heat == 0 or _LEAST <= heat <= _MOST)),
            f"temperature must be 0 (greedy) or lie in [{_LEAST}, {_MOST}], beyond which float32 "
            f"overflows, got {heat!r}",
        )
        check(
            self.top_k is None or (is_int(self.top_k) and self.top_k >= 0),
            f"top_k must be an int >= 0 (0 keeps all tokens), got {self.top_k!r}",
        )
        check(
            self.top_p is None or (isinstance(self.top_p, float) and 0 <= self.top_p <= 1),
            f"top_p must lie in [0, 1] (0 keeps all tokens), got {self.top_p!r}",
        )
        check(
            self.min_p is None or (isinstance(self.min_p, float) and 0 <= self.min_p <= 1),
            f"min_p must lie in [0, 1] (0 keeps all tokens), got {self.min_p!r}",
        )
        check(
            penalty is None or (isinstance(penalty, float) and _LEAST <= penalty <= _MOST),
            f"repetition_penalty must lie in [{_LEAST}, {_MOST}], beyond which float32 overflows "
            f"(1 is none), got {penalty!r}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check(
                isinstance(value, float) and -2 <= value <= 2,
                f"{name} must lie in [-2, 2] (0 is none), got {value!r}",
            )
        self._check_logit_bias(check)
        runs = self.bad_words_ids
        check(
            isinstance(runs, Iterable)
            and not isinstance(runs, (str, bytes))
            and all(isinstance(run, Sequence) and run and all(map(is_int, run)) for run in runs),
            f"bad_words_ids must be sequences of one int or more, got {runs!r}",
        )
        self.bad_words_ids = tuple(tuple(map(int, run)) for run in runs)
        if self.allowed_token_ids is not None:
            allowed = self.allowed_token_ids
            check(
                isinstance(allowed, Iterable) and not isinstance(allowed, (str, bytes)),
                f"allowed_token_ids must be a sequence of ints, or None, got {allowed!r}",
            )
            allowed = self.allowed_token_ids = tuple(allowed)
            check(
                len(allowed) > 0 and all(is_int(token) for token in allowed),
                f"allowed_token_ids must be one int or more, or None for all, got {allowed!r}",
            )
        check(
            self.num_tokens_to_generate is None
            or (is_int(self.num_tokens_to_generate) and self.num_tokens_to_generate >= 0),
            f"num_tokens_to_generate must be an int >= 0, got {self.num_tokens_to_generate!r}",
        )
        check(
            self.min_tokens is None or (is_int(self.min_tokens) and self.min_tokens >= 0),
            f"min_tokens must be an int >= 0, got {self.min_tokens!r}",
        )
        limit = self.num_tokens_to_generate
        check(
            None in (limit, self.min_tokens) or self.min_tokens <= limit,
            f"min_tokens={self.min_tokens} exceeds num_tokens_to_generate={limit}: raise the "
            "latter, or lower the former",
        )
        check(
            self.seed is None or (is_int(self.seed) and -(1 << 63) <= self.seed < 1 << 64),
            f"seed must be an int in [-2**63, 2**64), or None, got {self.seed!r}",
        )
        check(
            is_int(self.top_n_logprobs) and self.top_n_logprobs >= 0,
            f"top_n_logprobs must be an int >= 0, got {self.top_n_logprobs!r}",
        )
        drafts = self.num_speculative_tokens
        check(
            drafts is None or (is_int(drafts) and drafts >= 0),
            f"num_speculative_tokens must be an int >= 0, or None, got {drafts!r}",
        )
        for field in fields(self):
            value = getattr(self, field.name)
            check(
                field.type is not bool or isinstance(value, bool),
                f"{field.name} must be True or False, got {value!r}",
            )
        check(
            self.top_n_logprobs == 0 or self.return_log_probs,
            "top_n_logprobs needs return_log_probs=True",
        )
        if isinstance(self.stop_words, str):
            self.stop_words = (self.stop_words,)
        for name in ("stop_words", "stop_token_ids"):
            value = () if getattr(self, name) is None else getattr(self, name)
            check(isinstance(value, Iterable), f"{name} must be a sequence, got {value!r}")
            setattr(self, name, tuple(value))
        check(
            all(isinstance(word, str) and word for word in self.stop_words),
            f"stop_words must be non-empty strings, got {self.stop_words!r}",
        )
        for word in self.stop_words:
            check_text("SamplingParams: a stop word", word)
        check(
            all(is_int(token) for token in self.stop_token_ids),
            f"stop_token_ids must be ints, got {self.stop_token_ids!r}",
        )
        self.stop_token_ids = tuple(map(int, self.stop_token_ids))
        check(
            self.termination_id is None or is_int(self.termination_id),
            f"termination_id must be an int or None, got {self.termination_id!r}",
        )

    def _check_logit_bias(self, check: Callable[[bool, str], None]) -> None:
        biases = {} if self.logit_bias is None else self.logit_bias
        check(
            isinstance(biases, Mapping),
            f"logit_bias must be a mapping of token ids to numbers, got {biases!r}",
        )
        for token, bias in biases.items():
            check(is_int(token), f"logit_bias must have ints as token ids, got {token!r}")
            check(
                is_number(bias) and -100 <= bias <= 100,
                f"logit_bias must lie in [-100, 100], got {bias!r} for token {token}",
            )
        self.logit_bias = {int(token): float(bias) for token, bias in biases.items()}

    def resolved(self, model: "SamplingParams | None" = None) -> "SamplingParams":
        """Return a checked copy without None in the fields that have defaults.

        model: from `model_defaults`; None: only our defaults.

        Raises:
            ValueError: a field was changed to an illegal value.
        """
        asked = any(getattr(self, name) is not None for name in _ROW_FIELDS)
        values = {}
        for name, ours in _OURS.items():
            value = getattr(self, name)
            # Not from a greedy model's three fields: its top_k=1 would override the request's.
            if value is None and model and not (asked and model.is_greedy and name in _ROW_FIELDS):
                value = getattr(model, name)
            values[name] = ours if value is None else value
        if self.min_tokens is None:  # the model's must not fail a request for fewer
            values["min_tokens"] = min(values["min_tokens"], values["num_tokens_to_generate"])
        return replace(self, **values)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalises_answer(self) -> bool:
        """Whether the logits depend on the number of times that the answer has a token."""
        return bool(self.presence_penalty or self.frequency_penalty)

    @property
    def penalises_repetition(self) -> bool:
        return self.repetition_penalty != 1

    @property
    def needs_prompt_logits(self) -> bool:
        return self.return_log_probs and not self.skip_prompt_log_probs


def model_defaults(generation_config: Mapping[str, Any]) -> SamplingParams:
    """Read the sampling defaults from a model's generation_config.json; missing ones are None.
    Unsupported fields are logged.

    Raises:
        ValueError: a field has an illegal value.
    """
    file, found = "generation_config.json", {}
    for name, field in _IN_GENERATION_CONFIG.items():
        value = generation_config.get(name)
        try:
            SamplingParams(**{field: value})
        except ValueError as error:
            raise ValueError(
                f"{file} of the model has {name}={value!r}: {error}. Correct the file"
            ) from None
        found[field] = value
    do_sample = generation_config.get("do_sample")
    if do_sample is False:  # then the values for sampling have no effect
        found |= {**dict.fromkeys(_ROW_FIELDS), "top_k": 1}
    elif do_sample not in (True, None):
        raise ValueError(
            f"{file} of the model has do_sample={do_sample!r}: it must be true or false. Correct "
            "the file"
        )
    for name, neutral in _NEUTRAL.items():
        value = generation_config.get(name)
        if value not in (None, neutral):
            logger.warning(
                "%s of the model asks for %s=%r, which is not supported: it has no effect",
                file,
                name,
                value,
            )
    return SamplingParams(**found)


@dataclass(frozen=True)
class Draw:
    """Parameters of one row to sample, and its point in a random stream."""

    params: SamplingParams
    """From `SamplingParams.resolved`."""
    seed: int
    sample_index: int
    position: int  # absolute position of the token to be drawn
    prompt_tokens: np.ndarray | None = None
    """int32: the distinct ones, if `params.penalises_repetition`."""
    answer_tokens: np.ndarray | None = None
    """int32 [generated tokens], if the params penalise any."""
    banned: tuple[int, ...] = ()
    """Tokens that may not be drawn: stop tokens before `min_tokens`, ends of `bad_words_ids`."""
    allowed: np.ndarray | None = None
    """As `GuideMatcher.allowed`; None: all."""

    @property
    def changes_logits(self) -> bool:
        needs_data = self.answer_tokens is not None or self.allowed is not None
        return bool(needs_data or self.params.logit_bias or self.banned)


DRAW_AGAIN, NOT_FINITE, RULED_OUT, NOT_DRAWN = -1, -2, -3, -4
"""In the place of a token: `top_p` keeps more than the candidates; the model's logits have a NaN
or an infinity, or are all -inf; guides, bans and allowed tokens leave none; no row was drawn."""
FAILURES = {
    NOT_FINITE: "the model's logits have NaN or infinite values, so no token can be drawn: its "
    "weights are damaged, or its activations overflow their dtype (bf16 and fp32 hold more than "
    "fp16)",
    RULED_OUT: "no token can be drawn: what the request allows (guide, allowed_token_ids) and what "
    "it bans (bad_words_ids, min_tokens, a budget of thoughts) leave none",
}
"""Why a request ends that draws one of these."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The drawn token of a request."""

    token: int
    """An id, or `NOT_FINITE` or `RULED_OUT`."""
    log_prob: float | None = None
    top_log_probs: dict[int, float] | None = None
    """Of the `top_n_logprobs` most likely tokens, most likely first."""
