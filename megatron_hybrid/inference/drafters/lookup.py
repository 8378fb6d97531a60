"""Drafters that look the answer up, without a model."""

from __future__ import annotations

from megatron_hybrid.cache.prefix_cache import PrefixCache
from megatron_hybrid.inference.drafters import last_occurrence
from megatron_hybrid.inference.requests.request import Request

LEAST_MATCH = 3
"""Tokens before a place of the request that are the same as its last ones."""
LONGEST_MATCH = 16
"""Longer matches are not preferred to shorter ones."""


class OwnTokens:
    """What followed the same last tokens before, in the prompt or in the answer. It drafts where an
    answer quotes its prompt, edits it or repeats itself."""

    def propose(self, request: Request, most: int) -> list[int]:
        tokens = request.tokens[: request.num_tokens]
        place = last_occurrence(tokens, tokens, LEAST_MATCH, LONGEST_MATCH)
        return tokens[place : place + most].tolist() if place else []


class KnownAnswers:
    """What followed all of the same tokens in another request of the same salt: the rest of its
    answer, of which the cache knows the tokens, held or not.

    Args:
        cache: of the engine.
    """

    def __init__(self, cache: PrefixCache):
        self._cache = cache

    def propose(self, request: Request, most: int) -> list[int]:
        tokens = request.tokens[: request.num_tokens]
        return self._cache.known_after(request.lease, tokens, most).tolist()
