"""The drafter that looks the answer up, without a model."""

from megatron_hybrid.inference.drafters import Drafter, DraftSources, last_occurrence
from megatron_hybrid.inference.requests.request import Request

LEAST_MATCH = 3
"""Tokens before a place of the request that are the same as its last ones."""
LONGEST_MATCH = 16
"""Longer matches are not preferred to shorter ones."""


class Lookup(Drafter):
    """The rest of an answer that the cache knows (`known_answer`); else what followed the same
    tokens in the request itself (`own_tokens`)."""

    def __init__(self, sources: DraftSources):
        self._cache = sources.cache

    def propose(self, request: Request, most: int) -> list[int]:
        return self.known_answer(request, most) or self.own_tokens(request, most)

    def known_answer(self, request: Request, most: int) -> list[int]:
        """Return what followed all of the same tokens in another request of the same salt: the rest
        of its answer, of which the cache knows the tokens, held or not."""
        tokens = request.tokens[: request.num_tokens]
        return self._cache.known_after(request.lease, tokens, most).tolist()

    def own_tokens(self, request: Request, most: int) -> list[int]:
        """Return what followed the same last tokens before, in the prompt or in the answer. There
        is such a place where an answer quotes its prompt, edits it or repeats itself."""
        tokens = request.tokens[: request.num_tokens]
        place = last_occurrence(tokens, tokens, LEAST_MATCH, LONGEST_MATCH)
        return tokens[place : place + most].tolist() if place else []
