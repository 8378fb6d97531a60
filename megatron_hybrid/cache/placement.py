"""Which positions of a prompt deserve a checkpoint, and when to wait for another's. Pure functions.

p: tokens skipped, q: tokens whose KV is shared, L: tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable


def prefill_positions(
    prompt_tokens: int,
    skipped_tokens: int,
    shared_tokens: int,
    declared: Iterable[int],
    needs_state: bool,
) -> tuple[int, ...]:
    """Ascending positions in (p, L] whose state a prefill from p to L should save.

    The prompt's end L (where it ends the same prompt resumes with no forward at all), the junction
    q where this prompt leaves a cached one deeper than any state, and what the caller declared.
    Where KV alone resumes (needs_state False), only the prompt's end is worth anything.
    """
    wanted = {prompt_tokens}
    if needs_state:
        wanted.add(shared_tokens)
        wanted.update(declared)
    return tuple(sorted(p for p in wanted if skipped_tokens < p <= prompt_tokens))


def saves_work(position: int, prompt_tokens: int, needs_state: bool) -> bool:
    """Whether a checkpoint at this position of a request can ever spare a forward."""
    return needs_state or position == prompt_tokens


def worth_waiting(own_resume: int, other_done: int, other_position: int) -> bool:
    """Single flight: whether to wait for a running request that shares this prompt.

    own_resume: the position at which this prompt could start now. other_done: how far the other
    has computed. other_position: the deepest position of the shared part that it will make
    restorable. Waiting pays when the other is at least as far as this prompt could start, so that
    it needs no more forwards to get there, and will get further than that.
    """
    return other_done >= own_resume and other_position > own_resume
