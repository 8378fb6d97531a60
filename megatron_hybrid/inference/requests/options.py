"""RequestOptions: options of a request besides sampling, for all engines and for HTTP."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import numpy as np

from megatron_hybrid.text.guide import Guide
from megatron_hybrid.utils.other_names import names_arguments
from megatron_hybrid.utils.validation import Range, check_fields

Positive = Annotated[int, Range(ge=1)]
Priority = Annotated[int, Range(ge=-(1 << 63), le=(1 << 63) - 1)]
MAX_BREAKPOINTS = 4096
"""Most positions that one request may declare: each costs several lookups."""
MAX_SALT = 4096
Salt = Annotated[str, Range(le=MAX_SALT)]
"""A salt is kept as long as a prefix with it."""


@dataclass(frozen=True)
class LoadedAdapter:
    """A low-rank adapter that an engine holds."""

    name: str
    folder: str
    rank: int
    """The largest rank of its projections."""
    slot: int
    salt: str
    """Prefix of the salts of its requests."""


@names_arguments()
@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request, in addition to its prompt and its `SamplingParams`.

    Raises:
        ValueError: a field has an illegal value; the message names it and the limit.
    """

    guide: Guide | None = None
    """Form that the answer must have (JSON, a regex, one of some texts). Stop tokens may come only
    where it may end; where nothing else can follow, the answer ends with "stop"."""

    salt: Salt = ""
    """Prefixes are shared only between requests of equal salt, such as those of one tenant."""

    adapter: str | None = None
    """Name of the engine's adapter that the request is computed with; by default the model alone.
    Requests with other adapters share no prefixes."""

    cache_breakpoints: Annotated[Sequence[Positive], Range(le=MAX_BREAKPOINTS)] = ()
    """Positions in the prompt, in tokens, where a state is worth keeping for later prompts, such as
    the end of a system prompt; at most 4,096."""

    n: Positive = 1
    """Number of samples of the prompt, in `samples` of the result; they share one prefill."""

    priority: Priority = 0
    """Waiting requests of lower numbers start first, and equal ones in order of arrival. Requests
    that run, or have run, keep what they have."""

    tenant: str = ""
    """Owner of the request. Requests that wait with equal priority start by turns, one sample of
    each tenant."""

    traceparent: str = ""
    """The caller's span, as W3C's Trace Context writes it, for `otlp_traces_endpoint`."""

    tracestate: str = ""
    """W3C's header of this name; the spans keep it."""

    def __post_init__(self) -> None:
        positions = self.cache_breakpoints
        if isinstance(positions, np.ma.MaskedArray):
            raise ValueError("cache_breakpoints has no masked positions: pass its compressed()")
        if hasattr(positions, "tolist"):  # an array, or a tensor
            positions = positions.tolist()
        if isinstance(positions, Iterable) and not isinstance(positions, str):
            positions = tuple(islice(positions, MAX_BREAKPOINTS + 1))
        object.__setattr__(self, "cache_breakpoints", positions)
        check_fields(self)
        if "\0" in self.salt:
            raise ValueError(f"salt is {self.salt!r}; NUL is for the engine: leave it out.")
        object.__setattr__(self, "cache_breakpoints", tuple(map(int, positions)))

    def check(self, num_prompt_tokens: int, max_requests: int) -> None:
        """Check what depends on the prompt and the engine.

        Raises:
            ValueError: the message names the value and the limit. The guide is not checked here.
        """
        if self.n > max_requests:
            raise ValueError(f"n is {self.n}; it must be at most max_requests={max_requests}.")
        for position in self.cache_breakpoints:
            if position > num_prompt_tokens:
                raise ValueError(
                    f"cache_breakpoints has {position}; it must be at most {num_prompt_tokens}, "
                    "the prompt's number of tokens."
                )
