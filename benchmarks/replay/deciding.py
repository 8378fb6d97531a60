"""`python -m benchmarks.replay.deciding`: whether a simpler policy may take another one's place.

Each policy replays each case. Results go into a JSON file after every replay; what is in the file
is not replayed again. Of the former policy (ages, sessions, a Gittins index; 24 parts) only these
results are left.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.replay.engines import ENGINES
from benchmarks.replay.geometry import GEOMETRIES
from benchmarks.replay.policies import LRUPolicy
from benchmarks.replay.sweep import GB, Cell, best_replays
from benchmarks.replay.table import header, is_rival
from benchmarks.replay.traces import load
from benchmarks.replay.workloads import WORKLOADS
from megatron_hybrid.cache.pages.spec import CacheSpec
from megatron_hybrid.cache.policy.hybrid import HybridPolicy
from megatron_hybrid.cache.policy.protocol import Policy
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.request import Request
from megatron_hybrid.tools.replay.runner import Replay, replay

RESULTS = Path(__file__).parents[1] / "results"
FILE = RESULTS / "deciding.json"
PUBLISHED = ("replay_models.json", "replay_mooncake.json")
"""Results of peers that are taken from there."""
FORMER = "former"
"""A policy without code: only its results are known."""
POLICIES: dict[str, Callable[[CacheSpec], Policy]] = {"today": HybridPolicy, "lru": LRUPolicy}
PEERS = ("marconi", "lru-16", "lru-528")
"""Those that run everywhere; of vllm, vllm-fine and mcore only published results count."""
MEAN, EACH = 1.5, 3.0
"""Points that a policy may lose on the mean, and on each workload."""
TIE = 0.1
"""Points within which two results are equal."""

MAIN = "nemotron-h-8b"
CHANGING = ("chat after short-classify", "rag-fork after rag-fork")
MOONCAKE = "mooncake_conversation"


@dataclass(frozen=True)
class Case:
    """What is replayed."""

    workload: str
    seed: int | None
    """None: the workload's own."""
    geometry: str
    in_flight: int
    budget_gb: float
    encoding: str = ""
    """Of states; empty for peers, whose states are exact."""

    def __str__(self) -> str:
        seed = "" if self.seed is None else f"seed {self.seed}, "
        encoding = self.encoding and f", {self.encoding}"
        return (
            f"{self.workload}, {seed}{self.geometry}, {self.in_flight} in flight, "
            f"{self.budget_gb:g} GB{encoding}"
        )

    @property
    def of_peers(self) -> Case:
        """The same for peers."""
        return Case(self.workload, self.seed, self.geometry, self.in_flight, self.budget_gb)


Results = dict[str, dict[str, list[float]]]
"""By case and policy: % of the prompt tokens skipped, and microseconds per request (median)."""


def cases(trace: bool) -> list[Case]:
    """The table, the most telling cases first. trace: whether the Mooncake trace is there."""
    found = []
    for encoding, in_flight, seed in product(("exact", "int8"), (1, 8), (1, 2, None)):
        for name, workload in WORKLOADS.items():
            for budget in workload.budgets_gb:
                found.append(Case(name, seed, MAIN, in_flight, budget, encoding))
    for encoding, in_flight, seed in product(("exact", "int8"), (64, 128), (1, 2)):
        for budget in WORKLOADS["rag-fork"].budgets_gb:
            found.append(Case("rag-fork", seed, MAIN, in_flight, budget, encoding))
    for geometry, in_flight, encoding in product(GEOMETRIES, (1, 8), ("exact", "int8")):
        if geometry == MAIN or (encoding == "int8" and not GEOMETRIES[geometry].state_layers):
            continue
        for name, workload in WORKLOADS.items():
            budget = workload.budgets_gb[1]
            found.append(Case(name, None, geometry, in_flight, budget, encoding))
    for name, geometry, budget in (
        (CHANGING[0], MAIN, 4),
        (CHANGING[0], "llama-3-8b", 16),
        (CHANGING[1], MAIN, 8),
        (CHANGING[1], "llama-3-8b", 32),
        (CHANGING[1], "llama-3-8b", 64),
    ):
        found.append(Case(name, None, geometry, 1, budget, "exact"))
    for encoding, budget in product(("exact", "int8"), (16, 64, 256)) if trace else ():
        found.append(Case(MOONCAKE, None, MAIN, 1, budget, encoding))
    return sorted(found, key=_rank)


def _rank(case: Case) -> tuple:
    """Order of the replays."""
    ample = case.workload in WORKLOADS and case.budget_gb == WORKLOADS[case.workload].budgets_gb[2]
    plain = case.geometry == MAIN and case.workload in WORKLOADS
    tells_little = ample or case.workload == "rl-group" or (plain and case.seed is None)
    return tells_little, not plain, case.seed or 0, case.in_flight, case.encoding


@lru_cache(maxsize=4)
def requests_of(workload: str, seed: int | None, trace: Path | None) -> tuple[list[Request], int]:
    """The requests, and the first of them that counts."""
    if workload == MOONCAKE:
        return list(load(trace, 3000)), 0
    generate = {name: each.generate for name, each in WORKLOADS.items()}
    if workload == CHANGING[0]:
        parts = [generate["short-classify"](limit=30_000, seed=11), generate["chat"](seed=1)]
    elif workload == CHANGING[1]:
        parts = [generate["rag-fork"](limit=600, seed=1)]
        parts += [generate["rag-fork"](limit=400, seed=seed) for seed in (2, 3, 4)]
    else:
        parts = [generate[workload](**({} if seed is None else {"seed": seed}))]
    parts = [list(part) for part in parts]
    # Each part has sessions of its own.
    requests = [
        Request(r.prompt, r.output, f"{number} {r.session}", r.turn, r.arrival)
        for number, part in enumerate(parts)
        for r in part
    ]
    return requests, len(parts[0]) if len(parts) > 1 else 0


def measured(result: Replay, first: int) -> list[float]:
    """Of the requests from `first` on: % skipped, and the median of microseconds."""
    skipped, total = sum(result.skipped_tokens[first:]), sum(result.prompt_tokens[first:])
    micros = 1e6 * float(np.median(result.seconds[first:]))
    return [round(100 * skipped / total, 2), round(micros)]


def run_policy(case: Case, policy: str, trace: Path | None) -> list[float]:
    requests, first = requests_of(case.workload, case.seed, trace)
    spec = GEOMETRIES[case.geometry].spec(case.encoding)
    engine = Ours(spec, case.budget_gb * GB, POLICIES[policy](spec))
    return measured(replay(requests, engine, case.in_flight), first)


def run_peer(case: Case, peer: str, trace: Path | None) -> list[float]:
    requests, first = requests_of(case.workload, case.seed, trace)
    run = best_replays([peer], case.geometry, case.budget_gb, requests, case.in_flight)
    return measured(run[0][0], first)


def published(folder: Path = RESULTS) -> Results:
    """Results of peers in other files, of the workloads' own seeds."""
    found: Results = {}
    for name in PUBLISHED:
        for cell in json.loads((folder / name).read_text(encoding="utf-8"))["cells"]:
            cell = Cell(**cell)
            if is_rival(cell):
                case = Case(cell.workload, None, cell.geometry, cell.in_flight, cell.budget_gb)
                result = [cell.skipped_percent, cell.micros_median]
                found.setdefault(str(case), {})[cell.engine] = result
    return found


def replays(
    chosen: Iterable[Case], policies: Iterable[str], peers: Iterable[str], known: Results
) -> Iterator[tuple[str, str, Case, bool]]:
    """Name of a case, policy or peer, case, and whether it is a peer: all that is not known."""
    for case in chosen:
        for names, each, is_peer in ((policies, case, False), (peers, case.of_peers, True)):
            for name in names:
                if name not in known.get(str(each), {}):
                    yield str(each), name, each, is_peer


def read(path: Path) -> Results:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(results: Results, path: Path) -> None:
    """A line a case; the old file stays until the new one is whole."""
    lines = (f"{json.dumps(case)}: {json.dumps(each)}" for case, each in results.items())
    new = path.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(new, path)


def summary(
    chosen: Iterable[Case], policies: Iterable[str], against: str, results: Results, peers: Results
) -> Iterator[str]:
    """Markdown: means, the worst cases and the verdict of each policy beside another one. Cases
    that any of these lacks do not count. peers: of `published`."""
    policies = [against, *(name for name in policies if name != against)]
    compared = [c for c in chosen if set(policies) <= results.get(str(c), {}).keys()]
    if not compared:
        yield "No case has results of all policies."
        return
    workloads = list(dict.fromkeys(case.workload for case in compared))
    yield f"{len(compared)} cases."
    yield ""
    yield header("policy", [*workloads, "mean", "us"])
    means: dict[str, list[float]] = {}
    for name in policies:
        skipped = {case: results[str(case)][name][0] for case in compared}
        row = [mean(s for c, s in skipped.items() if c.workload == w) for w in workloads]
        means[name] = [*row, mean(skipped.values())]
        micros = median(results[str(case)][name][1] for case in compared)
        yield f"| {name} | {' | '.join(f'{s:.1f}' for s in means[name])} | {micros:.0f} |"
    for name in policies[1:]:
        lost = [old - new for old, new in zip(means[against], means[name])]
        fallen = list(below_peers(compared, name, against, results, peers))
        verdicts = (
            (lost[-1] <= MEAN, f"{lost[-1]:.2f} points lost on the mean, {MEAN} allowed"),
            (
                max(lost[:-1]) <= EACH,
                f"{max(lost[:-1]):.2f} on {workloads[int(np.argmax(lost[:-1]))]}, {EACH} allowed",
            ),
            (not fallen, f"{len(fallen)} cases below a peer that {against} beats"),
        )
        yield ""
        yield f"**{name}: {'yes' if all(holds for holds, _ in verdicts) else 'no'}**"
        yield from (f"- {'holds' if holds else 'fails'}: {text}" for holds, text in verdicts)
        yield from (f"  - {text}" for text in fallen)

        def loss(case: Case, name: str = name) -> float:
            return results[str(case)][against][0] - results[str(case)][name][0]

        for case in sorted(compared, key=loss, reverse=True)[:8]:
            yield f"- {-loss(case):+.1f}: {case}"


def below_peers(
    compared: Iterable[Case], policy: str, against: str, results: Results, peers: Results
) -> Iterator[str]:
    """The cases in which a policy is below a peer that another policy beats."""
    for case in compared:
        name = str(case.of_peers)
        old, new = (results[str(case)][each][0] for each in (against, policy))
        found: Mapping[str, list[float]] = {**peers.get(name, {}), **results.get(name, {})}
        found = {peer: each for peer, each in found.items() if peer in ENGINES}
        worse = {p: r[0] for p, r in found.items() if old > r[0] + TIE and new < r[0] - TIE}
        if worse:
            peer = max(worse, key=lambda p: worse[p])
            yield f"{case}: {against} {old:.1f}, {peer} {worse[peer]:.1f}, {policy} {new:.1f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay.deciding", description=__doc__.splitlines()[0]
    )
    add, names = parser.add_argument, {"nargs": "+", "metavar": "NAME"}
    add(
        "--policies",
        choices=POLICIES,
        default=["today"],
        help="Replay these policies. The default is today.",
        **names,
    )
    add(
        "--against",
        choices=(*POLICIES, FORMER),
        default=FORMER,
        help="Compare them with this policy. The default is former.",
    )
    add(
        "--peers",
        choices=ENGINES,
        default=list(PEERS),
        help="Compare them with these engines. The default is %(default)s.",
        **names,
    )
    add("--no-peers", action="store_true", help="Compare them with no other engine.")
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="Replay cases whose name has all of these texts.",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Also replay the Mooncake conversation trace in this file.",
    )
    add(
        "--results",
        type=Path,
        default=FILE,
        metavar="FILE",
        help="Keep results in this file. The default is %(default)s.",
    )
    add("--summary", action="store_true", help="Replay nothing, and print the results of the file.")
    options = parser.parse_args(arguments)
    results, peers = read(options.results), published()
    chosen = [
        case
        for case in cases(options.summary or options.trace is not None)
        if all(text in f"{case}," for text in options.only)
    ]
    known = {name: {**peers.get(name, {}), **results.get(name, {})} for name in peers | results}
    asked = [] if options.no_peers else options.peers
    if not options.summary:
        policies = {*options.policies, options.against} - {FORMER}
        for name, policy, case, is_peer in replays(chosen, sorted(policies), asked, known):
            if policy in results.get(name, {}):
                continue  # the same case of peers, with other states
            run = run_peer if is_peer else run_policy
            found = run(case, policy, options.trace)
            results.setdefault(name, {})[policy] = found
            write(results, options.results)
            print(f"{name}, {policy}: {found[0]:.1f} %, {found[1]:.0f} us", flush=True)
    print("\n".join(summary(chosen, options.policies, options.against, results, peers)))


if __name__ == "__main__":
    main()
