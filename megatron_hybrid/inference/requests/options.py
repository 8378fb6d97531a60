"""RequestOptions: what callers of every engine, and of HTTP, ask of a request beside sampling."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from megatron_hybrid.text.guide import Guide
from megatron_hybrid.utils.other_names import names_fields
from megatron_hybrid.utils.validation import is_int

MAX_BREAKPOINTS = 4096
"""Most positions that one request may declare: each costs several lookups."""


@names_fields
@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Options of one request, beside its prompt and its `SamplingParams`."""

    guide: Guide | None = None
    """What the answer may look like (JSON, a regex, one of some texts). Stop tokens may come only
    where it may end; where nothing else can follow, the answer ends with "stop"."""

    salt: str = ""
    """Prefixes are shared only between requests of equal salt (tenants, adapters)."""

    cache_breakpoints: Sequence[int] = ()
    """Positions in the prompt whose state should be kept for later prompts, such as the end of a
    system prompt; at most 4,096."""

    n: int = 1
    """Number of samples of the prompt, in `samples` of the result; they share one prefill."""

    priority: int = 0
    """Of those that wait, requests of lower numbers start first, and equal ones in order of
    arrival. It takes nothing from a request that runs, or has run."""

    tenant: str = ""
    """Whose request it is. Those that wait with equal priority start by turns, one sample of each
    tenant."""

    def __post_init__(self) -> None:
        if isinstance(self.cache_breakpoints, Iterator):  # the first request would exhaust it
            positions = tuple(islice(self.cache_breakpoints, MAX_BREAKPOINTS + 1))
            object.__setattr__(self, "cache_breakpoints", positions)

    def checked(self, num_prompt_tokens: int, max_requests: int) -> "RequestOptions":
        """Return a copy with plain ints and a tuple of positions, which the caller cannot change.

        Raises:
            TypeError, ValueError: naming the value, the limit and the remedy. The guide is not
                checked here.
        """
        check_salt(self.salt)
        if not is_int(self.n) or not 1 <= self.n <= max_requests:
            raise ValueError(
                f"n must be an int in [1, max_requests={max_requests}], got {self.n!r}"
            )
        if not is_int(self.priority):
            raise TypeError(
                f"priority must be an int (lower ones start first), got {self.priority!r}"
            )
        if not isinstance(self.tenant, str):
            raise TypeError(f"tenant must be a str, got {type(self.tenant).__name__}")
        breakpoints = _checked_breakpoints(self.cache_breakpoints, num_prompt_tokens)
        return replace(
            self, cache_breakpoints=breakpoints, n=int(self.n), priority=int(self.priority)
        )


def check_salt(salt: str) -> None:
    """Raise TypeError unless it is a str."""
    if not isinstance(salt, str):
        raise TypeError(f"salt must be a str, got {type(salt).__name__}")


def _checked_breakpoints(breakpoints: Sequence[int], length: int) -> tuple[int, ...]:
    if isinstance(breakpoints, np.ma.MaskedArray):
        raise TypeError("cache_breakpoints has no masked positions: pass its compressed()")
    if hasattr(breakpoints, "tolist"):  # an array, or a tensor
        breakpoints = breakpoints.tolist()
    if not isinstance(breakpoints, Iterable):
        raise TypeError(
            f"cache_breakpoints must be a sequence of ints, got {type(breakpoints).__name__}: "
            "leave it out for none"
        )
    breakpoints = tuple(islice(breakpoints, MAX_BREAKPOINTS + 1))
    if len(breakpoints) > MAX_BREAKPOINTS:
        raise ValueError(
            f"cache_breakpoints has more than {MAX_BREAKPOINTS} positions: declare those where "
            f"other prompts part from this one"
        )
    for position in breakpoints:
        if not is_int(position) or not 0 < position <= length:
            raise ValueError(
                f"cache_breakpoints must be ints in [1, {length}], the prompt's tokens; got "
                f"{position!r}"
            )
    return tuple(int(position) for position in breakpoints)
