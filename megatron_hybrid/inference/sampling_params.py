"""Plain data of sampling: SamplingParams of a request, Draw and its result, Sampled."""

import functools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_hybrid.validation import check_text, is_int, is_number

logger = logging.getLogger(__name__)

_OURS = {"temperature": 1.0, "top_k": 0, "top_p": 0.0, "num_tokens_to_generate": 30}
"""Defaults where the model has none."""
_ROW_FIELDS = ("temperature", "top_k", "top_p")
"""Fields for drawing a token from a row of logits."""
_IN_GENERATION_CONFIG = {
    **{name: name for name in _ROW_FIELDS},
    "max_new_tokens": "num_tokens_to_generate",
}
"""Names in generation_config.json, and ours."""
_NEUTRAL = {"repetition_penalty": 1.0, "min_p": 0.0, "num_beams": 1}
"""Unsupported fields of generation_config.json, with the value that has no effect."""
_ELSEWHERE = {
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_completion_tokens", "max_length"),
        "use num_tokens_to_generate",
    ),
    **dict.fromkeys(("stop", "stop_strings"), "use stop_words"),
    "eos_token_id": "use termination_id, or stop_token_ids for several",
    "ignore_eos": "use ignore_termination",
    "include_stop_str_in_output": "use detokenize_stop_sequence",
    "logprobs": "use return_log_probs, and top_n_logprobs for the most likely tokens",
    "prompt_logprobs": "use return_log_probs, which includes those of the prompt",
    "do_sample": "use top_k=1 for greedy decoding",
    "random_seed": "use seed",
    "n": "it is an argument of generate() and add_request()",
    "cache_salt": "use the argument salt of generate() and add_request()",
}
"""Names in other libraries, and the remedy here."""


def _names_fields(init):
    """Make an `__init__` whose error for an unknown name gives the right one."""

    @functools.wraps(init)
    def checked(self, *args, **kwargs):
        known = [field.name for field in fields(self)]
        for name in kwargs.keys() - set(known):
            remedy = _ELSEWHERE.get(name, f"its fields are {', '.join(known)}")
            raise TypeError(f"SamplingParams has no field {name!r}: {remedy}")
        init(self, *args, **kwargs)

    return checked


@dataclass
class SamplingParams:
    """Sampling parameters of one request. Field names follow megatron-core's `SamplingParams`.

    If `temperature`, `top_k`, `top_p` or `num_tokens_to_generate` is None, the model's value counts
    (`temperature`, `top_k`, `top_p` and `max_new_tokens` of its generation_config.json, which
    `load_pretrained` reads with the tokenizer), or else ours: 1.0, 0, 0.0, 30. A model with
    `do_sample: false` is greedy for requests that give none of the first three; for the others its
    values of these have no effect.

    Raises:
        ValueError: a field has an illegal value; the message names it and the limit.
        TypeError: there is no such field; the message gives the right one.
    """

    temperature: float | None = None
    """Divides the logits. 0 means greedy."""

    top_k: int | None = None
    """Keep the k most likely tokens; 0 keeps all, 1 is greedy."""

    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches top_p; 0 keeps all."""

    num_tokens_to_generate: int | None = None
    """Upper bound on new tokens; a default is lowered to fit in `max_sequence_length`. 0 runs the
    prompt alone (to warm the cache, or to score it)."""

    seed: int | None = None
    """Seed of this request's draws. None: derived from the engine's seed and the request's id."""

    termination_id: int | None = None
    """Token that ends the generation; None: the tokenizer's end tokens, -1: none."""

    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the generation."""

    stop_words: tuple[str, ...] | None = None
    """Strings that end the generation once the generated text contains one of them."""

    detokenize_stop_sequence: bool = False
    """Keep the stop token or stop string in the result."""

    ignore_termination: bool = False
    """Continue after stop tokens (for benchmarks)."""

    return_log_probs: bool = False
    """Return log-probabilities of prompt and generated tokens; see
    `InferenceConfig.logprobs_mode`."""

    skip_prompt_log_probs: bool = False
    """With `return_log_probs`: only those of generated tokens. Else every prompt token must be
    computed, and the request cannot skip any."""

    top_n_logprobs: int = 0
    """With `return_log_probs`: also the n most likely tokens at each position that has one."""

    add_BOS: bool = False
    """Prepend the tokenizer's `bos` token to a text prompt."""

    def __post_init__(self):
        def check(ok: bool, message: str) -> None:
            if not ok:
                raise ValueError(f"SamplingParams: {message}")

        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if is_number(value):
                try:
                    setattr(self, name, float(value))
                except OverflowError:  # an int
                    setattr(self, name, math.inf)
        for name in ("top_k", "num_tokens_to_generate", "seed", "top_n_logprobs", "termination_id"):
            value = getattr(self, name)
            if is_int(value):
                setattr(self, name, int(value))
        check(
            self.temperature is None
            or (
                isinstance(self.temperature, float)
                and math.isfinite(self.temperature)
                and self.temperature >= 0
            ),
            f"temperature must be a finite number >= 0 (0 is greedy), got {self.temperature!r}",
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
            self.num_tokens_to_generate is None
            or (is_int(self.num_tokens_to_generate) and self.num_tokens_to_generate >= 0),
            f"num_tokens_to_generate must be an int >= 0, got {self.num_tokens_to_generate!r}",
        )
        check(
            self.seed is None or (is_int(self.seed) and self.seed >= 0),
            f"seed must be an int >= 0 or None, got {self.seed!r}",
        )
        check(
            is_int(self.top_n_logprobs) and self.top_n_logprobs >= 0,
            f"top_n_logprobs must be an int >= 0, got {self.top_n_logprobs!r}",
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
        return replace(self, **values)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_prompt_logits(self) -> bool:
        return self.return_log_probs and not self.skip_prompt_log_probs


SamplingParams.__init__ = _names_fields(SamplingParams.__init__)


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


@dataclass(frozen=True, slots=True)
class Sampled:
    """The drawn token of a request."""

    token: int
    log_prob: float | None = None
    top_log_probs: dict[int, float] | None = None
    """Of the `top_n_logprobs` most likely tokens, most likely first."""
