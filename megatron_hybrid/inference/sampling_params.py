"""Plain data of sampling: SamplingParams of a request, Draw and its result, Sampled."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from megatron_hybrid.utils.other_names import names_arguments
from megatron_hybrid.utils.validation import Range, check_field, check_fields, check_text

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
Temperature = Annotated[float, Range(ge=0, le=1e30)]
Seed = Annotated[int, Range(ge=-(1 << 63), le=(1 << 64) - 1)]
Share = Annotated[float, Range(ge=0, le=1)]
Penalty = Annotated[float, Range(ge=-2, le=2)]
Bias = Annotated[float, Range(ge=-100, le=100)]
RepetitionPenalty = Annotated[float, Range(ge=1e-30, le=1e30)]
_LEAST_TEMPERATURE = 1e-30
"""Logits divided by it stay finite in float32, if they are usual ones; by 1e30, too."""


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
        check_fields(self, "ThinkingBudget: ")


@names_arguments()
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

    temperature: Temperature | None = None
    """The logits are divided by this temperature; values below 1e-30, such as 0, are greedy."""

    top_k: int | None = None
    """Keep the k most likely tokens; 0 keeps all, 1 is greedy."""

    top_p: Share | None = None
    """Tokens are drawn from the most likely ones whose probabilities add up to this; 0 and 1 keep
    all tokens."""

    min_p: Share | None = None
    """Tokens are drawn from those whose probability is at least this part of the highest one; 0
    keeps all tokens."""

    repetition_penalty: RepetitionPenalty | None = None
    """Divides the positive logits of tokens in the prompt or the answer, and multiplies the
    negative ones; 1 changes nothing. Values that float32 cannot hold become its largest number.
    Keskar et al. (2019), "CTRL"."""

    presence_penalty: Penalty = 0.0
    """This penalty is subtracted from the logits of tokens that the answer has."""

    frequency_penalty: Penalty = 0.0
    """This penalty is subtracted from the logit of a token as often as the answer has the token."""

    logit_bias: Mapping[int, Bias] | None = None
    """Token ids, each with a number that is added to the token's logit."""

    allowed_token_ids: Annotated[Sequence[int], Range(ge=1)] | None = None
    """Only these tokens are drawn, so they have to include stop tokens."""

    bad_words_ids: Sequence[Annotated[Sequence[int], Range(ge=1)]] = ()
    """Runs of tokens that the answer must not have: the last token of a run is not drawn after its
    other tokens, as in `transformers`."""

    thinking_budget: ThinkingBudget | None = None
    """Limit of the tokens of reasoning; by default there is none."""

    num_tokens_to_generate: int | None = None
    """Upper bound on new tokens; a default is lowered to fit in `max_sequence_length`. 0 runs the
    prompt alone (to warm the cache, or to score it)."""

    min_tokens: int | None = None
    """No stop token ends an answer with fewer tokens than this; a stop string still does."""

    seed: Seed | None = None
    """The seed of the random draws: equal requests with equal seeds draw equal tokens. -1 is a seed
    like any other. By default each request has a seed of its own, which follows from the engine's
    seed and the request's id."""

    termination_id: Annotated[int, Range(ge=-1)] | None = None
    """Token that ends the generation; by default the tokenizer's end tokens. -1 means none."""

    stop_token_ids: Sequence[int] = ()
    """Tokens that end the answer, in addition to the model's own stop tokens."""

    stop_words: Sequence[Annotated[str, Range(ge=1)]] | None = None
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
    """With `return_log_probs`, return those of generated tokens alone. For those of the prompt
    every prompt token must be computed, and the request skips none."""

    top_n_logprobs: int = 0
    """With `return_log_probs`, also return the n most likely tokens at each position that has a
    log-probability."""

    add_BOS: bool = False
    """Prepend the tokenizer's `bos` token to a text prompt."""

    num_speculative_tokens: int | None = None
    """Most drafts of this request in a step, if the engine speculates; 0 turns drafts off. By
    default it is the engine's number. Answers are the same."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_words, str):
            self.stop_words = (self.stop_words,)
        self.stop_words = () if self.stop_words is None else self.stop_words
        self.stop_token_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self.logit_bias = {} if self.logit_bias is None else self.logit_bias
        for name in ("stop_words", "stop_token_ids", "allowed_token_ids", "bad_words_ids"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
                setattr(self, name, tuple(value))
        prefix = "SamplingParams: "
        check_fields(self, prefix)
        if self.temperature is not None and self.temperature < _LEAST_TEMPERATURE:
            self.temperature = 0.0
        self.logit_bias = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        self.stop_token_ids = tuple(map(int, self.stop_token_ids))
        self.bad_words_ids = tuple(tuple(map(int, run)) for run in self.bad_words_ids)
        limit = self.num_tokens_to_generate
        if None not in (limit, self.min_tokens) and self.min_tokens > limit:
            raise ValueError(
                f"{prefix}min_tokens={self.min_tokens} exceeds num_tokens_to_generate={limit}: "
                "raise the latter, or lower the former"
            )
        if self.top_n_logprobs and not self.return_log_probs:
            raise ValueError(f"{prefix}top_n_logprobs needs return_log_probs=True")
        for word in self.stop_words:
            check_text(f"{prefix}a stop word", word)

    def resolved(self, model: "SamplingParams | None" = None) -> "SamplingParams":
        """Return a checked copy without None in the fields that have defaults.

        model: from `model_defaults`; without it, only our defaults are used.

        Raises:
            ValueError: a field was changed to an illegal value.
        """
        asked = any(getattr(self, name) is not None for name in _ROW_FIELDS)
        values = {}
        for name, ours in _OURS.items():
            value = getattr(self, name)
            # Not from a greedy model's `_ROW_FIELDS`: its top_k=1 would override the request's.
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
                f"{file} of the model has {name}={value!r}: {error} Correct the file."
            ) from None
        found[field] = value
    do_sample = generation_config.get("do_sample")
    check_field(f"{file} of the model: do_sample", do_sample, bool | None)
    if do_sample is False:  # then the values for sampling have no effect
        found |= {**dict.fromkeys(_ROW_FIELDS), "top_k": 1}
    if (beams := generation_config.get("num_beams")) not in (None, 1):
        said = "%s of the model asks for num_beams=%r, which is not supported: it has no effect"
        logger.warning(said, file, beams)
    return SamplingParams(**found)


class Draw(NamedTuple):
    """Parameters of one row to sample, and its point in a random stream."""

    params: SamplingParams
    """Parameters from `SamplingParams.resolved`."""
    seed: int
    sample_index: int
    position: int  # absolute position of the token to be drawn
    prompt_tokens: np.ndarray | None = None
    """int32, the distinct ones, if `params.penalises_repetition`."""
    answer_tokens: np.ndarray | None = None
    """int32 [generated tokens], if `params` have a penalty."""
    banned: tuple[int, ...] = ()
    """Tokens that may not be drawn: stop tokens before `min_tokens`, ends of `bad_words_ids`."""
    allowed: np.ndarray | None = None
    """Bits as in `GuideMatcher.allowed`; None allows all tokens."""

    @property
    def changes_logits(self) -> bool:
        needs_data = self.answer_tokens is not None or self.allowed is not None
        return bool(needs_data or self.params.logit_bias or self.banned)

    @property
    def may_draw_again(self) -> bool:
        """Whether `top_p` may keep more tokens than the first candidates."""
        return 0 < self.params.top_p < 1 and not self.params.top_k


DRAW_AGAIN, NOT_FINITE, RULED_OUT, NOT_DRAWN = -1, -2, -3, -4
"""Values in place of a token: `top_p` keeps more than the candidates; the model's logits have a NaN
or an infinity, or are all -inf; guides, bans and allowed tokens leave none; no row was drawn."""
FAILURES = {
    NOT_FINITE: "the model's logits have NaN or infinite values, so no token can be drawn: its "
    "weights are damaged, or its activations overflow their dtype (bf16 and fp32 hold more than "
    "fp16)",
    RULED_OUT: "no token can be drawn: what the request allows (guide, allowed_token_ids) and what "
    "it bans (bad_words_ids, min_tokens, a budget of thoughts) leave none",
}
"""Errors of requests that draw one of these."""


class Sampled(NamedTuple):
    """The drawn token of a request."""

    token: int
    """An id, or `NOT_FINITE` or `RULED_OUT`."""
    log_prob: float | None = None
    top_log_probs: dict[int, float] | None = None
    """Log-probabilities of the `top_n_logprobs` most likely tokens, most likely first."""
