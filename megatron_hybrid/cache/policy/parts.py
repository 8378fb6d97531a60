"""The parts of the policy. Each can be left out, to measure its contribution."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Parts:
    """Parts of `HybridPolicy`; benchmarks/replay/ablations.py leaves them out one by one."""

    # eviction
    work: bool = True
    """Candidates that take more work to recompute are worth more."""
    exclusive_kv: bool = True
    """A state is charged for KV that no other state needs."""
    held_kv: bool = True
    """A state is not charged for KV that a running request holds."""
    refresh: bool = True
    """Values are recomputed in rotation."""
    price: bool = True
    """A new state evicts only candidates of a lesser value, or is not saved."""
    replacing: bool = True
    """A new state that finds no room may replace the previous one on its path."""
    own_uses: bool = True
    """For that, only the own uses of the previous state count."""
    same_forward: bool = True
    """States that the same forward saves before a position count as stored."""
    # placement
    junctions: bool = True
    """States at junctions."""
    lost_forks: bool = True
    """States saved again at forks that lost theirs."""
    tails: bool = True
    """States at the usual distance before the end of a prompt at which successors leave it."""
    prompt_ends: bool = True
    """States at the ends of prompts."""
    rungs: bool = True
    """States at equal distances in long prompts and answers."""
    # likelihood of reuse
    known_tokens: bool = True
    """Tokens stay known after their KV is evicted."""
    fork_uses: bool = True
    """A fork that could have served counts as used."""
    own_gap: bool = True
    """States that were used repeatedly are judged by their own mean gap."""
    passed: bool = True
    """States are told apart by whether requests went past them."""
    covered: bool = True
    """States are told apart by whether a deeper one is stored."""
    turns: bool = True
    """Sessions are told apart by turns, and by the kind of end that they resume."""
    resumed_from: bool = True
    """Sessions are told apart by the kind of end that they resume."""
    mostly_known: bool = True
    """Requests are told apart by whether more of their tokens were known than new."""
    own_waits: bool = True
    """A turn has its own distribution of waits beside that of all turns."""
    gittins: bool = True
    """The rate up to the best moment to give up (Gittins index), not the present hazard."""
    fading: bool = True
    """Old observations count less."""


ALL_PARTS = Parts()
