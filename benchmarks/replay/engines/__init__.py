"""The cache managers that can be replayed, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.replay.engines.clairvoyant import Clairvoyant
from benchmarks.replay.engines.marconi import ALPHAS, Marconi
from benchmarks.replay.engines.windows import WindowedLRU, WindowedOneState, windows_of
from benchmarks.replay.geometry import Geometry
from megatron_hybrid.tools.replay.lru import Ceiling, LeastRecentlyUsed
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.protocol import Engine
from megatron_hybrid.tools.replay.rules import GRID
from megatron_hybrid.tools.replay.token_tree import Node

Candidates = Mapping[float | None, Callable[[], Engine]]
"""Engines by the value of their parameter (None: they have none). The one that skips most is
reported, so a parameter is tuned with hindsight."""


@dataclass(frozen=True)
class Entry:
    """A way to get an engine."""

    what: str
    build: Callable[[Geometry, float, int], Candidates]
    """From a geometry, a budget in bytes, and the number of requests in flight."""
    bounded: bool = True
    """Whether the budget matters to it."""
    module: str | None = None
    """What has to be installed."""

    @property
    def installed(self) -> bool:
        """True where it can run here."""
        try:
            return self.module is None or find_spec(self.module) is not None
        except ImportError:  # a parent of the module does not import
            return False


def _ours(encoding: str) -> Entry:
    def build(geometry: Geometry, budget: float, in_flight: int) -> Candidates:
        return {None: lambda: Ours(geometry.spec(encoding), budget)}

    return Entry(f"this project, cached states {encoding}", build)


def _clairvoyant(encoding: str) -> Entry:
    def build(geometry: Geometry, budget: float, in_flight: int) -> Candidates:
        sizes = geometry.kv_bytes_per_token, geometry.state_bytes(encoding)
        return {None: lambda: Clairvoyant(*sizes, budget)}

    return Entry(f"a policy that knows the trace, states {encoding}", build)


def _lru_block_end(block: int) -> Entry:
    def build(geometry: Geometry, budget: float, in_flight: int) -> Candidates:
        sizes = geometry.kv_bytes_per_token, geometry.recurrent_bytes(), budget
        return {None: lambda: WindowedLRU(block, *sizes, **windows_of(geometry))}

    return Entry(f"plain LRU, blocks of {block} tokens, states at their ends", build)


def _sglang(geometry: Geometry, budget: float, in_flight: int) -> Candidates:
    grid = GRID if geometry.state_bytes() else 1
    sizes = geometry.kv_bytes_per_token, geometry.recurrent_bytes(), budget
    return {None: lambda: WindowedOneState(grid, *sizes, **windows_of(geometry))}


class WholeLeaves(LeastRecentlyUsed):
    """Evicts whole leaves of the tree, not only as many blocks as needed."""

    def drop_tail(self, leaf: Node, over: float) -> None:
        self.tree.cut(leaf, leaf.start)


def _lru_free(geometry: Geometry, budget: float, in_flight: int) -> Candidates:
    kv_bytes = geometry.kv_bytes_per_token
    return {None: lambda: WholeLeaves(1, kv_bytes, 0, budget)}


def _marconi(geometry: Geometry, budget: float, in_flight: int) -> Candidates:
    state_bytes = geometry.recurrent_bytes()
    return {a: lambda a=a: Marconi(geometry, state_bytes, budget, a) for a in ALPHAS}


def _megatron_core(geometry: Geometry, budget: float, in_flight: int) -> Candidates:
    from benchmarks.replay.engines.megatron_core import STATE_SHARES, MegatronCore

    shares = STATE_SHARES if geometry.state_layers else (0.0,)
    return {share: lambda share=share: MegatronCore(geometry, budget, share) for share in shares}


def _vllm(what: str, **options: bool) -> Entry:
    def build(geometry: Geometry, budget: float, in_flight: int) -> Candidates:
        from benchmarks.replay.engines.vllm import CHECKPOINT_ALIGNMENTS, Vllm

        return {
            alignment: lambda alignment=alignment: Vllm(
                geometry, budget, in_flight, alignment, **options
            )
            for alignment in CHECKPOINT_ALIGNMENTS[geometry.state_kind]
        }

    return Entry(f"vLLM's KVCacheManager{what}", build, module="vllm.v1.core.kv_cache_manager")


ENGINES = {
    "ours": _ours("exact"),
    "ours-int8": _ours("int8"),
    "vllm": _vllm(""),
    "vllm-fine": _vllm(", matching in units of 16 tokens", fine=True),
    "vllm-junctions": _vllm(", the same with states where prompts part", junctions=True),
    "sglang": Entry(
        f"SGLang's rule: a radix tree, a state each {GRID} tokens at most, with its extra buffer",
        _sglang,
    ),
    "mcore": Entry(
        "megatron-core's context; the best of its splits of memory, with hindsight",
        _megatron_core,
        module="megatron.core.inference.contexts.mamba_slot_allocator",
    ),
    "marconi": Entry("Marconi, corrected; the best alpha of a grid, with hindsight", _marconi),
    "lru-16": _lru_block_end(16),
    "lru-528": _lru_block_end(528),
    "lru-free": Entry("plain LRU over leaves of KV, states cost nothing", _lru_free),
    "clairvoyant": _clairvoyant("exact"),
    "clairvoyant-int8": _clairvoyant("int8"),
    "ceiling": Entry(
        "an infinite cache that resumes at any token",
        lambda geometry, budget, in_flight: {None: Ceiling},
        bounded=False,
    ),
}
