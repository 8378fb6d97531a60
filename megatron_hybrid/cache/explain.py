"""`explain`: the match of a prompt in words, the states on its path, and the miss reason."""

from dataclasses import dataclass
from textwrap import wrap

from megatron_hybrid.cache.index.tree import Kind, Path
from megatron_hybrid.cache.report import MissReason, PrefixReport

_KINDS = {
    Kind.PROMPT_END: "end of a prompt",
    Kind.ANSWER_END: "end of an answer",
    Kind.JUNCTION: "junction or declared",
    Kind.MESSAGE: "start of a message",
    Kind.TAIL: "before the end of a prompt",
    Kind.INTERVAL: "interval",
    Kind.OPPORTUNISTIC: "in free memory",
}
_REASONS = {
    MissReason.NO_SHARED_PREFIX: "nothing that starts like this prompt is known",
    MissReason.MODE: "this prefix-caching mode computes every token",
    MissReason.PROMPT_LOG_PROBS: "log-probs of the prompt need every token",
    MissReason.STATE_NEVER_SAVED: "more tokens are known, but no state was saved there",
    MissReason.STATE_EVICTED: "a state after it was evicted",
    MissReason.KV_EVICTED: "the KV of the known tokens after it was evicted",
    MissReason.BUDGET: "a state after it was wanted, and found no room",
    MissReason.SALT: "its tokens are known, but under another salt",
    MissReason.NO_ROOM: "the pool has no room for the state that serves and the request together",
    MissReason.IN_FLIGHT: "a running request is about to save a state that would serve",
}


TIERS = {"host": "host memory", "disk": "the disk"}
"""Printed names of the tiers below the pool."""


@dataclass(frozen=True)
class KnownPosition:
    """A watched position of the prompt."""

    position: int
    kind: Kind
    is_stored: bool
    was_stored: bool
    """Whether its state was stored, then evicted."""
    refused: bool
    """Whether its state was wanted, but found no room."""
    uses: int
    """Requests that it served, or would have served."""

    def __str__(self) -> str:
        fate = "refused" if self.refused else "not stored"
        fate = "stored" if self.is_stored else "evicted" if self.was_stored else fate
        used = f"used {self.uses} x" if self.uses else "not used yet"
        return f"{self.position:>9,}  {fate:<10}  {_KINDS[self.kind]}, {used}"


@dataclass(frozen=True)
class Explanation:
    """The result of `match` with reasons. `str` prints it in 80 columns."""

    match: PrefixReport
    held_tokens: int
    """Leading tokens whose KV is in the cache."""
    known_tokens: int
    """Leading tokens that are known, with or without KV in the cache."""
    positions: tuple[KnownPosition, ...]
    """All watched positions among the known tokens, ascending."""
    elsewhere_tokens: int = 0
    """Leading tokens known under another salt, if less than a block is known under the prompt's own
    salt. The request's own report does not say so: see `MissReason.SALT`."""
    edge: int = 0
    """Number of the edge that spans the last known token (see `EdgeView`); 0 if none is known."""
    below: tuple[str, int] | None = None
    """A tier that has more of the prompt, and the tokens skipped after a fetch."""
    lacks_room: bool = False
    """Whether the pool has no room for the request now, in addition to running requests and what it
    would resume from. It waits, or is computed, and may then skip less than this says."""

    @property
    def reason(self) -> MissReason | None:
        """Why no more tokens are skipped; None if the following tokens are new."""
        reason = self.match.miss_reason
        if self.elsewhere_tokens and reason is not MissReason.IN_FLIGHT:
            return MissReason.SALT
        return reason

    def __str__(self) -> str:
        length, skipped = self.match.prompt_tokens, self.match.skipped_tokens
        lines = [
            f"{skipped:,} of {length:,} prompt tokens are skipped ({skipped / length:.1%}), KV of "
            f"{self.match.shared_tokens:,} is shared",
            f"{self.held_tokens:,} tokens are in the cache, {self.known_tokens:,} are known",
        ]
        if self.below is not None:
            tier, position = self.below
            lines.append(f"{position:,} can be fetched: {TIERS[tier]} has them")
        if self.positions:
            lines.append("states on the way:")
            lines += [str(position) for position in self.positions]
        if self.elsewhere_tokens:
            lines.append(f"{self.elsewhere_tokens:,} are known under another salt")
        reason = self.reason
        if reason is MissReason.NO_SHARED_PREFIX and self.below is not None:
            lines.append(f"stops at {skipped:,}: nothing of it is in the pool")
        elif reason is not None:
            lines.append(f"stops at {skipped:,} ({reason.value}): {_REASONS[reason]}")
        elif skipped < length:
            lines.append(f"stops at {skipped:,}: what follows is new")
        if self.below is not None:
            lines.append(f"a request waits for what can be fetched, and starts at {position:,}")
        if self.lacks_room:
            lines.append("the pool has no room for that now: a request may skip less")
        return "\n".join(part for line in lines for part in wrap(line, 80, subsequent_indent="  "))


def explain(
    path: Path, match: PrefixReport, elsewhere_tokens: int, lacks_room: bool
) -> Explanation:
    """Return the explanation of a match along `path`. elsewhere_tokens: leading tokens known under
    another salt."""
    known = sorted(
        (
            KnownPosition(c.position, c.kind, c.pages is not None, c.was_stored, c.refused, c.uses)
            for c in path.checkpoints()
        ),
        key=lambda position: position.position,
    )
    edge = path.edges[-1].number if path.edges else 0
    known = tuple(known)
    return Explanation(
        match, path.depth, path.known, known, elsewhere_tokens, edge, lacks_room=lacks_room
    )
