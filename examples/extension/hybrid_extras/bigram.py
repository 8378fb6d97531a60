"""A drafter: the token that most often came after the last one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from megatron_hybrid.inference.drafters import Drafter, DraftSources
from megatron_hybrid.inference.requests.request import Request


class BigramDrafter(Drafter):
    """Follows the pairs of tokens of the request itself.

    Args:
        sources: what the engine offers; none of it is needed here.
    """

    def __init__(self, sources: DraftSources):
        pass

    def propose(self, request: Request, most: int) -> list[int]:
        tokens = request.tokens[: request.num_tokens].tolist()
        next_of: dict[int, Counter[int]] = {}
        for before, after in pairwise(tokens):
            next_of.setdefault(before, Counter())[after] += 1
        drafts, last = [], tokens[-1]
        while last in next_of and len(drafts) < most:
            last = next_of[last].most_common(1)[0][0]
            drafts.append(last)
        return drafts
