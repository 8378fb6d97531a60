"""Megatron's SamplingParams, and their translation for our engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from megatron_hybrid.inference.sampling_params import SamplingParams as EngineParams
from megatron_hybrid.inference.sampling_params import Share, Temperature
from megatron_hybrid.megatron.errors import reads_data, require
from megatron_hybrid.utils.validation import LARGEST_INT, Range, check_field

AnyWhole = Annotated[int, Range(ge=-LARGEST_INT)]


@dataclass
class SamplingParams:
    """Megatron's sampling parameters of a request; `docs/reference/megatron_fields.md` has a
    table of them."""

    temperature: Temperature = 1.0
    top_k: int = 0
    top_p: Share = 0.0
    return_log_probs: bool = False
    skip_prompt_log_probs: bool = False
    return_segments: bool = False
    num_tokens_to_generate: AnyWhole | None = None
    num_tokens_total: AnyWhole | None = None
    termination_id: AnyWhole | None = None
    top_n_logprobs: int = 0
    return_prompt_top_n_logprobs: bool = False
    add_BOS: bool = False
    stop_words: Sequence[str] | None = None
    detokenize_stop_sequence: bool = False
    return_prompt_tokens: bool = False
    streaming: bool = False
    streaming_interval: int = 1
    do_kv_handoff: bool = False

    def __post_init__(self):
        if self.return_prompt_top_n_logprobs:
            warnings.warn(
                "return_prompt_top_n_logprobs is deprecated: skip_prompt_log_probs decides",
                DeprecationWarning,
                stacklevel=3,
            )
        self._check()

    def _check(self) -> None:
        """Check the fields, and set those that follow from others.

        Raises:
            AssertionError, ValueError: a field has an illegal value.
        """
        if self.return_prompt_top_n_logprobs and self.skip_prompt_log_probs:
            raise AssertionError(
                "return_prompt_top_n_logprobs and skip_prompt_log_probs exclude each other: "
                "set one of them"
            )
        self.return_prompt_top_n_logprobs = bool(
            self.top_n_logprobs and not self.skip_prompt_log_probs
        )
        check_field("streaming_interval", self.streaming_interval, Annotated[int, Range(ge=1)])

    @classmethod
    def of(cls, params: Any) -> SamplingParams:
        """Return a copy of parameters, ours or megatron-core's own, or for None the defaults.

        Raises:
            TypeError: they are of neither class.
            ValueError: see the constructor.
        """
        params = cls() if params is None else params
        require(params, cls, "sampling_params", "top_k", "num_tokens_to_generate")
        return cls.deserialize(vars(params))

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Set attributes, including unknown ones."""
        self.return_prompt_top_n_logprobs = False
        for name, value in attribute_value_pair.items():
            setattr(self, name, value)
        self.__post_init__()

    def serialize(self) -> dict[str, Any]:
        """Return all attributes as plain data."""
        return dict(self.__dict__)

    @classmethod
    @reads_data
    def deserialize(cls, data: dict[str, Any]) -> SamplingParams:
        """Make parameters from the data of `serialize`, but `return_prompt_top_n_logprobs` anew.

        Raises:
            ValueError: see the constructor; or the data is no mapping.
        """
        params = cls()
        params.__dict__.update(data, return_prompt_top_n_logprobs=False)
        params._check()
        return params


WITHOUT_EFFECT = {
    "return_segments": "segments are those of Megatron's static engine",
    "streaming": "step_modern() shows the tokens of each step; see also AsyncEngine.stream",
}
"""Fields without effect, and why. Setting one gives a warning."""


def engine_params(params: SamplingParams, num_tokens: int) -> EngineParams:
    """Translate a request's parameters; `num_tokens` is its number of tokens to generate.

    The stop token stays in the tokens, as in Megatron, with its log-probability;
    `DynamicInferenceEngine` cuts the text.

    Raises:
        ValueError: a parameter has a value that is not supported.
    """
    if params.do_kv_handoff:
        raise ValueError(
            "SamplingParams.do_kv_handoff is not supported: prefill and decode run in one engine"
        )
    for name, reason in WITHOUT_EFFECT.items():
        if getattr(params, name, False):
            warnings.warn(f"SamplingParams.{name} has no effect: {reason}", stacklevel=5)
    return EngineParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        num_tokens_to_generate=num_tokens,
        termination_id=params.termination_id,
        stop_words=tuple(params.stop_words or ()),
        detokenize_stop_sequence=True,
        return_log_probs=params.return_log_probs,
        skip_prompt_log_probs=params.skip_prompt_log_probs,
        top_n_logprobs=params.top_n_logprobs,
    )
