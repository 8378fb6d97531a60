"""Placement: positions of a prompt that are worth a state, and when to wait for another request.

Pure functions. p: skipped tokens, L: tokens of the prompt.
"""

from collections.abc import Iterable, Mapping

from megatron_hybrid.cache.index.tree import Kind

NO_INTERVAL = 1 << 62
"""Length of intervals where there are none: the first one ends beyond all tokens."""


def tail_position(
    prompt_tokens: int, skipped_tokens: int, weights: Iterable[tuple[int, float]]
) -> int:
    """Find the position near the end of a prompt where a state saves its successors most tokens.

    weights: `TailDistances.weights`. A state d tokens before the end serves the successors that
    part at most d tokens before the end, and saves each of them the tokens from p to the state.
    """
    best, position = 0.0, prompt_tokens
    for distance, share in weights:
        gain = share * (prompt_tokens - distance - skipped_tokens)
        if gain > best:
            best, position = gain, prompt_tokens - distance
    return position


def prefill_positions(
    prompt_tokens: int,
    skipped_tokens: int,
    known_tokens: int,
    declared: Iterable[int],
    messages: Iterable[int],
    tail: int,
    interval_tokens: int,
    least_gain: int,
    opportunistic_tokens: int,
) -> dict[int, Kind]:
    """Choose the positions in (p, L] whose state a prefill from p to L should save, with kinds.

    These are the prompt's end, the junction (known_tokens), positions declared by the caller,
    starts of messages, the tail (`tail_position`), positions at equal intervals (`next_interval`),
    for prompts that part earlier, and in between opportunistic states every opportunistic_tokens
    tokens. least_gain: least tokens between the start of a message and the resumed state, or the
    last such start, as each turn of a chat starts right after the last answer.
    """
    wanted = {prompt_tokens: Kind.PROMPT_END}
    for position in (known_tokens, *declared):
        wanted.setdefault(position, Kind.JUNCTION)
    last = skipped_tokens
    for position in sorted(messages):
        if position >= last + least_gain:
            wanted.setdefault(position, Kind.MESSAGE)
            last = position
    wanted.setdefault(tail, Kind.TAIL)
    for kind, distance in (
        (Kind.INTERVAL, interval_tokens),
        (Kind.OPPORTUNISTIC, opportunistic_tokens),
    ):
        for position in range(next_interval(skipped_tokens, distance), prompt_tokens, distance):
            wanted.setdefault(position, kind)
    return {p: kind for p, kind in wanted.items() if skipped_tokens < p <= prompt_tokens}


def most_wanted(positions: Iterable[int], wanted: Mapping[int, Kind], limit: int) -> list[int]:
    """Return at most `limit` of these positions, ascending. Ends and junctions are chosen before
    other kinds, and deep positions before shallow ones. wanted: kinds by position; a missing one is
    that of an interval."""
    kept = sorted(positions, key=lambda p: (wanted.get(p, Kind.INTERVAL) > Kind.JUNCTION, -p))
    return sorted(kept[:limit])


def next_interval(position: int, interval_tokens: int) -> int:
    """Return the first multiple of interval_tokens after a position, in a prompt or its answer."""
    return (position // interval_tokens + 1) * interval_tokens


def choose_interval(
    checkpoint_bytes: int, kv_bytes_per_token: int, local_reach: int, block_size_tokens: int
) -> int:
    """Choose the tokens of an interval, whole blocks, or `NO_INTERVAL` without full attention.

    Interval states take no more memory than the full-attention KV between them, and hold each block
    of local KV at most once: they are no closer than local_reach, the most tokens that a token sees
    in a local group, or 0.
    """
    if not kv_bytes_per_token:
        return NO_INTERVAL
    tokens = max(1, -(-checkpoint_bytes // kv_bytes_per_token), local_reach)
    return -(-tokens // block_size_tokens) * block_size_tokens


def saves_work(position: int, prompt_tokens: int, needs_state: bool) -> bool:
    """Return whether a checkpoint at this position of a request can ever spare a forward."""
    return needs_state or position == prompt_tokens


def worth_waiting(own_resume: int, other_done: int, other_position: int) -> bool:
    """Return whether to wait for a running request with the same prefix (single flight).

    own_resume: position at which this prompt could start now. other_done: tokens that the other
    request has computed. other_position: the deepest shared position that it will make restorable.
    Waiting pays if the other request has already reached own_resume and will get further.
    """
    return other_done >= own_resume and other_position > own_resume
