"""Drafters: what the next tokens of an answer may be.

A step computes a draft's row next to that of the last known token, and draws from both. Where the
first draw is the draft, the second one counts, too. So drafts change the number of steps, and
nothing else: a drafter may propose any tokens. It must propose the same ones on all ranks.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.inference.scheduling.step_plan import Work
from megatron_hybrid.utils.out_of_memory import is_lack_of_memory, note_decided_by_memory
from megatron_hybrid.utils.registry import Registry, check_class

if TYPE_CHECKING:  # it imports torch, and the scheduler does not
    from megatron_hybrid.models.hybrid_model import HybridModel

logger = logging.getLogger(__name__)

LEAST_MATCH = 3
"""Tokens before a place of the request that are the same as its last ones."""
LONGEST_MATCH = 16
"""Longer matches are not preferred to shorter ones."""


@dataclass(frozen=True)
class DraftSources:
    """What an engine gives the drafter that it makes."""

    cache: PrefixCache
    """Its cache, which knows the tokens of other answers (`PrefixCache.known_after`)."""
    model: HybridModel
    predict: Callable[[list[Work], list[int]], list[list[int]]]
    """`ModelRunner.predict`, which runs the model's MTP head."""


class Drafter(Protocol):
    """Guesses tokens, without changing anything that others see. Its class is called with the
    `DraftSources` of the engine."""

    @abstractmethod
    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the likely next tokens after `request.tokens[:request.num_tokens]`, at most
        `most` (at least 1), the nearest first, or none."""


class BatchDrafter(Drafter):
    """A drafter that works for all decodes at a time, on the device."""

    @abstractmethod
    def prepare(self, most: Mapping[Request, int]) -> None:
        """Compute drafts for the decodes that may get them, at most so many each, before a step is
        planned. Nothing of the step has been moved yet. Each lease has room for so many tokens
        after the known ones, and the drafter may write there."""


DRAFTERS: Registry[type[Drafter]] = Registry(
    "drafter",
    "megatron_hybrid.drafters",
    lambda name, drafter: check_class(f"the drafter {name!r}", drafter, Drafter, "sources"),
    {
        "lookup": "megatron_hybrid.inference.drafters:Lookup",
        "mtp": "megatron_hybrid.inference.worker.mtp_drafter:MTPDrafter",
    },
)
"""Every drafter, by its value of `InferenceConfig.speculation`."""


class Drafts:
    """Drafts of a drafter.

    Args:
        drafter: proposes them. If it fails, the request has no drafts in this step, and the log
            gets a line for the first failure of a kind, for the 10th, the 100th, and so on.
        most: drafts of a request in a step, at least 1.
        vocab_size: of the model.
        on_ranks: whether the model has several ranks. Then an error of `prepare` is raised, as
            other ranks may wait for this one inside.
    """

    def __init__(self, drafter: Drafter, most: int, vocab_size: int, on_ranks: bool = False):
        self.drafter = drafter
        self.most = most
        self._vocab_size, self._on_ranks = vocab_size, on_ranks
        self._num_failures: Counter[str] = Counter()  # by kind of error

    @property
    def are_prepared(self) -> bool:
        """Whether drafts are computed before a step is planned."""
        return isinstance(self.drafter, BatchDrafter)

    def prepare(self, most: Mapping[Request, int]) -> None:
        try:
            self.drafter.prepare(most)
        except Exception as error:
            if self._on_ranks:
                raise
            self._note_failure(error)

    def propose(self, request: Request, most: int) -> list[int]:
        """Propose drafts, as `Drafter.propose`; all of them are tokens of the model."""
        try:
            tokens = [int(token) for token in self.drafter.propose(request, most)[:most]]
            if outside := [token for token in tokens if not 0 <= token < self._vocab_size]:
                raise ValueError(
                    f"token {outside[0]} is outside of the vocabulary [0, {self._vocab_size})"
                )
            return tokens
        except Exception as error:
            self._note_failure(error)
            return []

    def _note_failure(self, error: Exception) -> None:
        if is_lack_of_memory(error):
            note_decided_by_memory()  # other ranks may have drafts
        kind = type(error).__name__
        self._num_failures[kind] += 1
        if str(count := self._num_failures[kind]).strip("0") == "1":
            times = "" if count == 1 else f" {count:,} times"
            failure = ": ".join((type(self.drafter).__name__, kind, str(error)))
            logger.warning(
                "a drafter has failed%s, and its drafts are left out: %s", times, failure
            )


class Lookup(Drafter):
    """Proposes what followed all of the same tokens in another request of the same salt: the rest
    of its answer, of which the cache knows the tokens, held or not. Else it proposes what followed
    the same last tokens earlier in the prompt or the answer, as where an answer quotes its prompt,
    edits it or repeats itself."""

    def __init__(self, sources: DraftSources):
        self._cache = sources.cache

    def propose(self, request: Request, most: int) -> list[int]:
        tokens = request.tokens[: request.num_tokens]
        if known := self._cache.known_after(request.lease, tokens, most).tolist():
            return known
        place = last_occurrence(tokens, tokens, LEAST_MATCH, LONGEST_MATCH)
        return tokens[place : place + most].tolist() if place else []


def last_occurrence(tokens: np.ndarray, tail: np.ndarray, least: int, longest: int) -> int:
    """Find the longest matches of the end of `tail` in `tokens` (int32 `[n]` each) that some token
    follows, and return the index after the last of them, or 0 if none has `least` tokens. Matches
    are compared up to `longest` tokens."""
    places = np.flatnonzero(tokens[:-1] == tail[-1]) + 1
    length = 1
    while len(places) and length < min(longest, len(tail)):
        longer = places[places > length]
        longer = longer[tokens[longer - length - 1] == tail[-length - 1]]
        if not len(longer):
            break
        places, length = longer, length + 1
    return int(places[-1]) if len(places) and length >= least else 0
