"""The parts of the policy. Each can be left out, to measure its contribution."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyFlags:
    """Parts of `HybridPolicy`; benchmarks/replay/ablations.py leaves them out one by one."""

    # eviction
    work: bool = True
    """Candidates that take more work to recompute are worth more."""
    exclusive_kv: bool = True
    """A state is charged for KV that no other state needs."""
    refresh: bool = True
    """Values are recomputed in rotation."""
    price: bool = True
    """A new state evicts only candidates of a lesser value, or is not saved."""
    # placement
    junctions: bool = True
    """States at junctions."""
    lost_forks: bool = True
    """States saved again at forks that lost theirs."""
    tails: bool = True
    """States at the usual distance before the end of a prompt at which successors leave it."""
    prompt_ends: bool = True
    """States at the ends of prompts."""
    intervals: bool = True
    """States at equal distances in long prompts and answers."""
    opportunistic: bool = True
    """States every 256 tokens while pages are free."""
    # expected uses
    fork_uses: bool = True
    """A fork that could have served counts as used."""
    resumed_from: bool = True
    """Sessions are told apart by the kind of end that they resume."""
    mostly_known: bool = True
    """Requests are told apart by whether more of their tokens were known than new."""


ALL_FLAGS = PolicyFlags()
