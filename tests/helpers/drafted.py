"""Random runs of an engine with drafts, each compared with the same requests without drafts.

A run is drawn from one seed: the layer pattern, the cache, the requests. Its kind and its drafter
go round with the seed. What lies behind rejected drafts is filled with NaN in every step.
`python tests/helpers/drafted.py 20000` makes runs of as many requests.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from differential import PATTERNS, SYMBOLS, InjectedError, RandomDraws, failing_forward, poison
from graph_recorder import recorded_graphs
from grouped_experts import grouped_experts
from reference import VOCAB_SIZE, tiny_engine, tiny_model
from scripted import ByteTokenizer

from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES
from megatron_hybrid.inference.config import STATE_ENCODINGS
from megatron_hybrid.inference.drafters import Drafter, Drafts
from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import GenerationResult, Request
from megatron_hybrid.inference.sampling_params import SamplingParams
from megatron_hybrid.text.guide import Guide

KINDS = {
    "crowded": "a pool for little more than one request, so that running ones are preempted",
    "sequential": "one request after the other, compared to the bit",
    "disk": "what is cached goes to the disk again and again, and is fetched from there",
    "host": "the same with host memory",
}
COUNTED = (
    *("draft_tokens", "draft_tokens_accepted", "preemptions", "steps", "graph_steps"),
    *("fetched_tokens", "step_failures"),
)
"""Keys of `engine.stats()` that runs add up."""
GUIDES = [
    Guide.regex("(ab|b|cd){3,12}STOP"),
    Guide.regex("[a-f]{2,30}"),
    Guide.choices(["ab", "abSTOP", "fed"]),
]


class Oracle:
    """A drafter that knows the answers, by request id, and is wrong in a part of its tokens."""

    def __init__(self, answers: dict[int, list[int]], wrong: float = 0.0, seed: int = 0):
        self.answers, self.wrong = answers, wrong
        self.random = np.random.default_rng(seed)

    def propose(self, request: Request, most: int) -> list[int]:
        tokens = self.answers[request.request_id][request.num_generated :][:most]
        return [(t + 1) % VOCAB_SIZE if self.random.random() < self.wrong else t for t in tokens]


class Failing:
    """A drafter that raises in half of its calls, and else proposes anything."""

    def __init__(self):
        self.random = np.random.default_rng(0)

    def propose(self, request: Request, most: int) -> list[int]:
        if self.random.random() < 0.5:
            raise KeyError("no draft")
        return self.random.integers(-3, VOCAB_SIZE + 3, most).tolist()


def draft_with(engine: DynamicInferenceEngine, drafter: Drafter) -> None:
    """Let an engine that speculates ask this drafter instead of its own."""
    drafts = engine.scheduler.draft_planner.drafts
    engine.scheduler.draft_planner.drafts = Drafts(drafter, drafts.most, VOCAB_SIZE)


def noted(engine: DynamicInferenceEngine, used: bool = True) -> list[tuple[list[int], list[int]]]:
    """A list that gets the tokens before each step's drafts, and these."""
    told, propose = [], engine.scheduler.draft_planner.drafts.propose

    def propose_noted(request, most):
        drafts = propose(request, most)
        told.append((request.tokens[: request.num_tokens].tolist(), drafts))
        return drafts if used else []

    engine.scheduler.draft_planner.drafts.propose = propose_noted
    return told


def poison_rejected(engine: DynamicInferenceEngine) -> None:
    """From now on KV behind rejected drafts, and the states inside of a forward with drafts, are
    NaN as soon as the step no longer needs them."""
    take_back, memory = engine.runner.take_back, engine.memory

    def poisoned(plan, ends):
        take_back(plan, ends)
        engine.context.captured_states().fill_(0xFF)
        for work in plan.work:
            if not work.draft_draws:
                continue
            for layer, (group, column) in memory.table_of_layer.items():
                table = work.tables[0 if group is None else 1 + group]
                for position in range(ends[work.request_id], work.end):
                    block, row = divmod(position, memory.spec.block_size_tokens)
                    for pages in memory.kv_pages(layer):
                        pages[int(table[block, column]), row] = torch.nan

    engine.runner.take_back = poisoned


DRAFTERS: dict[str, Callable[[dict[int, list[int]], int], Drafter | None]] = {
    "lookup": lambda answers, seed: None,
    "perfect": lambda answers, seed: Oracle(answers),
    "30 % wrong": lambda answers, seed: Oracle(answers, 0.3, seed),
    "wrong": lambda answers, seed: Oracle(answers, 1.0),
    "failing": lambda answers, seed: Failing(),
    "part": lambda answers, seed: None,
}
"""Makers of drafters, from the answers by request id; None: the engine's own."""


@dataclass
class Asked:
    """A request of a script."""

    prompt: list[int]
    turn_of: int | None
    """The earlier request whose prompt and answer come first; None: of none."""
    params: SamplingParams
    options: RequestOptions


@dataclass
class DraftedRun(RandomDraws):
    """One run, drawn from its seed.

    Args:
        num_requests: how many requests come.
        scale: factor of the lengths of prompts and answers.
    """

    seed: int
    num_requests: int = 20
    scale: int = 1
    stats: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        pattern = "".join(self.choose(SYMBOLS) for _ in range(self.random.integers(1, 4)))
        pattern = "S" * ("J" in pattern) + pattern  # which J reads
        if self.scale > 1:
            pattern = self.choose(PATTERNS)
        self.drafter = list(DRAFTERS)[(self.seed + self.seed // 12) % len(DRAFTERS)]
        if self.drafter == "part":
            pattern += "/" + self.choose(["*", "*-*", "+E"])
        self.model = tiny_model(
            pattern,
            layernorm_epsilon=1e-2,
            mamba_norm_epsilon=1e-2,
            sliding_window=int(self.choose([7, 24])),
            mamba_chunk_size=int(self.choose([4, 16])),
        )
        self.kind = list(KINDS)[self.seed % len(KINDS)]
        self.is_sequential = self.kind == "sequential"
        self.has_tier = self.kind in ("disk", "host")
        self.has_graphs = self.seed % 7 == 6
        modes = ("restore",) if self.has_tier else (*PREFIX_CACHING_MODES, "restore", "restore")
        longest = self.scale * (50 if self.kind == "crowded" else 100)
        self.fields = {
            "prefix_caching": str(self.choose(modes)),
            "state_encoding": "exact",
            "block_size_tokens": int(self.choose([16, 16, 32])),
            "max_tokens": int(self.choose([7, 33, 200])),
            # Each number of decodes has a graph.
            "max_requests": 3 if self.has_graphs else int(self.choose([3, 6, 10])),
            "max_sequence_length": longest,
            # The keys of a part take pages, and as much is to be left for what is cached.
            "cache_bytes": (4 << 20 if self.drafter == "part" else 1 << 20) * self.scale,
            "logprobs_mode": str(self.choose(["raw_logprobs", "processed_logprobs"])),
        }
        if self.is_sequential:  # side by side, requests may resume at other states, rounded ones
            self.fields["state_encoding"] = str(self.choose(STATE_ENCODINGS))
        if self.kind == "crowded":
            kinds = ("off", "mtp") if self.drafter == "part" else ("off",)
            more = int(self.random.integers(0, 3))
            self.fields["cache_bytes"] = max(
                self._least_bytes(tiny_engine(self.model, **self.fields, speculation=kind), more)
                for kind in kinds
            )
        elif self.kind == "host":
            self.fields["host_cache_bytes"] = 1 << 20
        prompts, self.lengths = [20, 35], [0, 1, 4, 8, 8]
        if self.kind == "crowded":  # many start, and their answers need more than there is
            prompts, self.lengths = [3, 8], [1, 24, 32]
        self.most = int(self.choose([1, 2, 3, 5]))
        self.families = [self._tokens(self.scale * int(self.choose(prompts))) for _ in range(2)]
        self.script = [self._ask(i) for i in range(self.num_requests)]

    def _least_bytes(self, engine: DynamicInferenceEngine, more: int) -> int:
        """Of a pool for one request, and of a few pages more."""
        spec = engine.cache.spec
        num_blocks = spec.num_blocks(self.fields["max_sequence_length"]) + 1
        return (num_blocks * sum(spec.pages_per_block) + 2 + more) * spec.page_bytes

    def _ask(self, index: int) -> Asked:
        family = self.choose(self.families)
        cut = len(family) if self.chance(0.4) else int(self.random.integers(0, len(family) + 1))
        turn_of = int(self.random.integers(index)) if index and self.chance(0.1) else None
        more = self._tokens(int(self.random.integers(1, 12)))
        prompt = more if turn_of is not None else family[:cut] + more
        params = SamplingParams(
            **{"top_k": 1}
            if self.chance(0.5)
            else {
                "temperature": float(self.choose([0.3, 1.0])),
                "top_p": float(self.choose([0.0, 0.5, 0.95])),
                "top_k": int(self.choose([0, 5])),
            },
            seed=int(self.random.integers(1 << 30)),
            num_tokens_to_generate=self.scale * int(self.choose(self.lengths)),
            stop_token_ids=tuple(self._tokens(3)) if self.chance(0.3) else (),
            stop_words=("a", "STOP", "gh") if self.chance(0.3) else (),
            detokenize_stop_sequence=self.chance(0.3),
        )
        scored = self.chance(0.3)
        params = replace(
            params,
            return_log_probs=scored,
            skip_prompt_log_probs=scored and self.chance(0.7),
            top_n_logprobs=2 if scored and self.chance(0.5) else 0,
            repetition_penalty=1.3 if self.chance(0.2) else 1.0,
            frequency_penalty=0.5 if self.chance(0.2) else 0.0,
            min_tokens=min(3, params.num_tokens_to_generate) if self.chance(0.2) else 0,
        )
        guide = self.choose(GUIDES) if self.chance(0.15) else None
        if guide is None and self.chance(0.2):
            params = replace(params, bad_words_ids=(self._tokens(1), self._tokens(2)))
        options = RequestOptions(
            guide=guide,
            salt=str(self.choose(["", "", "other"])),
            n=1 if self.is_sequential else int(self.choose([1, 1, 1, 3])),
            priority=int(self.choose([0, 0, 1])),
        )
        return Asked(prompt, turn_of, params, options)

    def run(self) -> None:
        """Raises AssertionError where drafts make a difference."""
        expected = self._answers(speculation="off")
        by_id = {sample.request_id: sample.token_ids for sample in expected}
        drafted = self._answers(
            DRAFTERS[self.drafter](by_id, self.seed),
            speculation="mtp" if self.drafter == "part" else "lookup",
            num_speculative_tokens=self.most,
        )
        for before, after in zip(expected, drafted, strict=True):
            self._compare(before, after)

    def _compare(self, before: GenerationResult, after: GenerationResult) -> None:
        pattern = self.model.config.layer_pattern
        about = f"seed {self.seed}, {pattern}, {self.fields}, {self.drafter}"
        for part in ("token_ids", "text", "finish_reason", "stop_reason", "error"):
            assert getattr(before, part) == getattr(after, part), (about, part, before, after)
        # On a CPU, rows of torch's grouped products, of experts in graphs, depend on their number.
        if self.is_sequential and not (self.has_graphs and {"E", "B"} & {*pattern}):
            if self.drafter == "part":  # its keys and values are shared where the model has none
                assert before.prefix.skipped_tokens == after.prefix.skipped_tokens, about
                after = replace(after, prefix=before.prefix)
            assert before == replace(
                after,
                time_to_first_token=before.time_to_first_token,
                total_time=before.total_time,
            ), about  # to the bit, with the reports
        for part in ("log_probs", "prompt_log_probs"):
            if (own := getattr(before, part)) is not None:
                given = torch.tensor(getattr(after, part))
                torch.testing.assert_close(given, torch.tensor(own), atol=2e-5, rtol=1e-5)
        self.stats["requests"] += 1

    def _answers(self, drafter: Drafter | None = None, **fields) -> list[GenerationResult]:
        with ExitStack() as ends:
            if self.kind == "disk":
                fields["cache_dir"] = ends.enter_context(tempfile.TemporaryDirectory())
            if self.has_graphs:
                ends.enter_context(recorded_graphs())
                ends.enter_context(grouped_experts())
                fields["cuda_graphs"] = True
            engine = tiny_engine(self.model, ByteTokenizer(), **self.fields, **fields)
            ends.enter_context(engine)
            return self._answers_of(engine, drafter)

    def _answers_of(
        self, engine: DynamicInferenceEngine, drafter: Drafter | None
    ) -> list[GenerationResult]:
        speculates = engine.scheduler.draft_planner.drafts is not None
        if drafter is not None:
            draft_with(engine, drafter)
        poison_rejected(engine)
        random = np.random.default_rng(self.seed)
        fails = speculates and not self.is_sequential
        found: list[Request] = []
        sent: dict[int, list[int]] = {}

        def settle() -> None:
            while engine.has_work:
                if fails and random.random() < 0.02:
                    with failing_forward(engine), suppress(InjectedError):
                        engine.step()
                else:
                    for output in engine.step():
                        sent.setdefault(output.request_id, []).extend(output.token_ids)
                if random.random() < 0.3:
                    engine.check_integrity()
                poison(engine)

        for number, asked in enumerate(self.script):
            if self.has_tier and number % 4 == 0:
                settle()
                engine.cache.evict(10_000)
            prompt = asked.prompt
            if asked.turn_of is not None:
                settle()
                before = [r for r in found if not r.sample_index][asked.turn_of]
                prompt = [*before.tokens[: before.num_tokens].tolist(), *prompt]
            limit = self.fields["max_sequence_length"] - asked.params.num_tokens_to_generate
            request = engine.add_request(prompt[-limit:], asked.params, asked.options)
            found += request.samples
            if self.is_sequential:
                settle()
        settle()
        results = [request.result() for request in found]
        for result in results:
            assert sent.get(result.request_id, []) == result.token_ids
        assert not engine.cache.allocator.ref_counts.any()
        if speculates:
            stats = engine.stats()
            self.stats.update({key: stats[key] for key in COUNTED})
            self.stats[f"{self.kind}: fetched tokens"] += stats["fetched_tokens"]
        return results


def main(num_requests: int) -> None:
    total, seed, tied = Counter(), 0, 0
    while total["requests"] < num_requests:
        run = DraftedRun(seed, scale=1 if seed % 5 else 3)
        try:
            run.run()
        except AssertionError as error:
            tied += 1
            print(f"seed {seed}: {error}", flush=True)
        total.update(run.stats)
        seed += 1
    print(f"{tied} of {seed} runs differ; {dict(total)}")
    for key in (*COUNTED, "disk: fetched tokens", "host: fetched tokens"):
        assert total[key], f"no run has any of: {key}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
