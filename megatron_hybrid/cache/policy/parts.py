"""The parts of the policy, each of which can be left out: what it brings is measured so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """What `HybridPolicy` reckons with. benchmarks/replay/ablations.py leaves out one by one."""

    # eviction
    work: bool = True
    """What takes longer to compute again is worth more."""
    exclusive_kv: bool = True
    """A state is charged for the KV that leads to it alone."""
    held_kv: bool = True
    """A state is not charged for KV that a running request holds."""
    refresh: bool = True
    """Values are computed anew in rotation."""
    price: bool = True
    """A new state takes the place of what is worth less, or is not saved."""
    replacing: bool = True
    """Or it takes the place of the state below it."""
    own_uses: bool = True
    """Uses in which that one only stood in for it do not count."""
    same_forward: bool = True
    """What a forward saves further up counts as there."""
    # placement
    junctions: bool = True
    """States where a prompt leaves a known one."""
    lost_forks: bool = True
    """States saved again at forks that lost theirs."""
    tails: bool = True
    """States as far before the end of a prompt as successors leave it."""
    prompt_ends: bool = True
    """States at the ends of prompts."""
    rungs: bool = True
    """States at a distance in long prompts and answers."""
    # likelihood of reuse
    known_tokens: bool = True
    """Tokens stay known when their KV goes."""
    fork_uses: bool = True
    """A fork that could have served counts as used."""
    own_gap: bool = True
    """What was used repeatedly is judged by its own mean gap."""
    passed: bool = True
    """States are told apart by whether requests went past them."""
    covered: bool = True
    """States are told apart by whether a deeper one is stored."""
    turns: bool = True
    """Sessions are told apart by turns, and by what they went on from."""
    resumed_from: bool = True
    """Sessions are told apart by what they went on from."""
    mostly_known: bool = True
    """Requests are told apart by whether they found more than they brought."""
    own_waits: bool = True
    """A turn has its own waits beside those of all turns."""
    gittins: bool = True
    """The best moment to give up (Gittins) counts, not the hazard now."""
    fading: bool = True
    """What was seen long ago counts less."""


ALL_PARTS = Parts()
