"""Random runs of the engine, every row of logits compared with a forward pass without any cache.

A run is drawn from one seed: the layer pattern, the sizes, families of prompts with prefixes in
common, and the order in which requests come, run and are cancelled. It can be repeated by its seed.
"""

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock

import numpy as np
import torch
from reference import VOCAB_SIZE, full_logits, greedy, tiny_engine, tiny_model

from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES
from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.requests.request import Request
from megatron_hybrid.inference.scheduling.step_plan import StepPlan
from megatron_hybrid.offload.tier import least_capacity_bytes

TOLERANCE = 1e-5
SYMBOLS = "MG*W-ESCH+KAZLPBQRUVJ"
PATTERNS = (
    "*-*-",
    "MG",
    "W-W-",
    "MG*-W-",
    "M*",
    "G*-",
    "W*W",
    "M-M-",
    "-",
    "GW-M*",
    "K-+-",
    "+W+",
    "ME*E",
    "SC*-",
    "H-MH",
    "VSZ-Z",
    "L-*E",
    "LWP*BP",
    "RQM",
    "UUW",
    "SWS-*J*J",
)


class LogitsRecorder:
    """Keeps every row of logits that an engine computes, with the tokens before it."""

    def __init__(self, engine):
        self.rows: list[tuple[Request, int, torch.Tensor]] = []  # request, position, logits [V]
        sample, scheduler = engine.runner.sample, engine.scheduler

        def recorded(plan: StepPlan, logits_nV: torch.Tensor):
            self._record(plan, logits_nV, {r.request_id: r for r in scheduler.running})
            return sample(plan, logits_nV)

        engine.runner.sample = recorded

    def _record(
        self, plan: StepPlan, logits_nV: torch.Tensor, requests: dict[int, Request]
    ) -> None:
        end = 0
        for work in plan.work:
            if work.source >= 0 and not work.draws:  # launched ahead of its request's end
                end += work.num_logits
                continue
            for position in range(work.end - work.num_logits, work.end):
                self.rows.append(
                    (requests[work.request_id], position, logits_nV[end].clone().cpu())
                )
                end += 1
        for ready in plan.ready:
            request = requests[ready.request_id]
            self.rows.append((request, request.num_tokens - 1, logits_nV[end].clone().cpu()))
            end += 1
        assert end == len(logits_nV)

    def check(self, model, tolerance: float = TOLERANCE) -> float:
        """Compares all rows so far with full forward passes, and forgets them. Returns the largest
        difference."""
        largest = 0.0
        rows: dict[Request, list[tuple[int, torch.Tensor]]] = {}
        for request, position, logits_V in self.rows:
            rows.setdefault(request, []).append((position, logits_V))
        for request, computed in rows.items():
            positions, logits = zip(*computed)
            full = full_logits(model, request.tokens[: request.num_tokens].tolist())
            errors = (full[list(positions)] - torch.stack(logits)).abs().amax(dim=1)
            worst = int(errors.argmax())
            about = f"request {request.request_id}, row {positions[worst]}"
            assert errors[worst] <= tolerance, f"{about}: off by {errors[worst]}"
            largest = max(largest, float(errors[worst]))
        self.rows.clear()
        return largest


class InjectedError(Exception):
    """Raised where a test wants a forward pass to fail."""


@contextlib.contextmanager
def failing_forward(engine):
    """Forward passes raise InjectedError after they have written KV and states."""
    forward = engine.runner.forward

    def failing(plan: StepPlan):
        forward(plan)
        raise InjectedError

    engine.runner.forward = failing
    yield
    engine.runner.forward = forward


def failing_at_first(call: Callable, error: BaseException, times: int = 1) -> Mock:
    """What raises an error so many times, and from then on does what the call does."""
    return Mock(wraps=call, side_effect=chain(repeat(error, times), repeat(DEFAULT)))


def poison(engine) -> None:
    """Fills all memory that holds nothing with NaN: free pages, the null page, free live slots."""
    free = engine.cache.allocator.ref_counts + engine.cache.allocator.cached_counts == 0
    pool = engine.memory.pool
    pool.index_fill_(0, torch.from_numpy(free.nonzero()[0]).to(pool.device), 0xFF)
    engine.memory.slots[engine.scheduler.free_slots] = 0xFF


def check_answer(model, request: Request) -> None:
    """The request's tokens are greedy and its log-probs are those of a full forward pass."""
    prompt = request.num_prompt_tokens
    generated = request.token_ids
    logits_TV = full_logits(model, request.tokens[: request.num_tokens].tolist())
    predicted_TV = logits_TV[prompt - 1 : prompt - 1 + len(generated)]
    chosen_T = predicted_TV.gather(1, torch.tensor(generated, dtype=torch.long)[:, None])[:, 0]
    # Two tokens closer than the tolerance are both right.
    assert (chosen_T >= predicted_TV.amax(dim=1) - 2 * TOLERANCE).all()
    if request.params.return_log_probs:
        check_log_probs(request, logits_TV)


def check_log_probs(request: Request, logits_TV: torch.Tensor) -> None:
    """They are those of a full forward pass, whichever tokens were drawn."""
    prompt, log_probs_TV = request.num_prompt_tokens, logits_TV.log_softmax(dim=-1)
    tokens = torch.tensor(request.tokens[1 : request.num_tokens].tolist(), dtype=torch.long)
    expected = log_probs_TV[:-1].gather(1, tokens[:, None])[:, 0]
    assert_near(request.log_probs, expected[prompt - 1 :])
    if not request.params.skip_prompt_log_probs:
        done = len(request.prompt_log_probs)
        assert done == prompt - 1 or request.finish_reason == "cancelled"
        assert_near(request.prompt_log_probs, expected[:done])


def assert_near(given: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(given), expected, atol=TOLERANCE, rtol=0)


class RandomDraws:
    """What random runs draw, from the `random` of each."""

    random: np.random.Generator

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def choose(self, values):
        return values[self.random.integers(len(values))]

    def _tokens(self, length: int) -> list[int]:
        return self.random.integers(0, VOCAB_SIZE, length).tolist()


@dataclass
class RandomRun(RandomDraws):
    """One run.

    Args:
        seed: what everything is drawn from.
        num_requests: how many requests come.
        longest_prompt, longest_answer: tokens.
        patterns: half of the layer patterns come from these, the others are random.
        crowded: many requests in a pool for one, so that they preempt each other.
        tiers: with host memory, a disk, or both below the pool.
        ahead: with decodes that are launched before the tokens before them are known.
        device: of the model.
    """

    seed: int
    num_requests: int = 10
    longest_prompt: int = 150
    longest_answer: int = 40
    patterns: tuple[str, ...] = PATTERNS
    crowded: bool = False
    tiers: bool = False
    ahead: bool = False
    device: str = "cpu"
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)
        self.pattern = self._draw_pattern()
        # Models on the CPU are cached, and others are not taken for them.
        build = tiny_model if self.device == "cpu" else tiny_model.__wrapped__
        with torch.device(self.device):
            self.model = self._draw_model(build)
        self.families = [self._tokens(self.longest_prompt) for _ in range(2)]
        self.fields = self._draw_sizes()
        self.engine = tiny_engine(self.model, **self.fields)
        self.recorder = LogitsRecorder(self.engine)
        self.stats: Counter[str] = Counter()

    def _draw_model(self, build):
        # A norm makes more than the tolerance of one ulp where its input is all but zero, as the
        # first outputs of a random delta rule are: the epsilon bounds that.
        has_streams = self.pattern.endswith("P") and not {*"ZV"} & {*self.pattern}
        return build(
            self.pattern,
            seed=self.seed % 3,
            layernorm_epsilon=1e-2,
            num_residual_streams=3 if has_streams else None,
            residual_rank=5 if has_streams else None,
            sliding_window=int(self.choose([1, 7, 16, 24, 100])),
            attention_chunk_size=int(self.choose([1, 7, 16, 24, 100])),
            softmax_type=str(self.choose(["vanilla", "vanilla", "off-by-one", "learnable"])),
            attention_logit_softcap=self.choose([None, None, 2.0]),
            attention_temperature_scale=self.choose([None, None, 0.3]),
            attention_temperature_floor=16,
            rotary_interleaved=self.chance(0.3),
            value_l2_norm=self.chance(0.3),
            keys_as_values=self.chance(0.3) and not {*"ZV"} & {*self.pattern},
            layer_scalar=self.chance(0.3),
            mamba_chunk_size=int(self.choose([4, 16, 64])),
            linear_chunk_size=int(self.choose([4, 16, 64])),
            position_embedding_type=str(self.choose(["rope", "none"])),
            qk_layernorm=self.chance(0.5),
            attention_output_gate=self.chance(0.3) and not {*"ZV"} & {*self.pattern},
            add_bias_linear=self.chance(0.3) and not {*"ZV"} & {*self.pattern},
            mamba1_norm=str(self.choose(["none", "weighted", "weightless"])),
            short_conv_bias=self.chance(0.5),
            mamba_gated_norm=str(self.choose(["gate_first", "norm_first", "none"])),
            mamba_norm_epsilon=1e-2,
            mamba_proj_bias=self.chance(0.3),
            num_shared_blocks=int(self.choose([1, 2])),
            shared_block_attention_adapters=self.chance(0.5),
            attention_output_multiplier=0.7,
            mamba_input_multiplier=1.2,
        )

    def _draw_pattern(self) -> str:
        if self.chance(0.5):
            return self.choose(self.patterns)
        drawn = "".join(self.choose(SYMBOLS) for _ in range(self.random.integers(1, 7)))
        return "S" * ("J" in drawn) + drawn  # which J reads

    def _draw_sizes(self) -> dict:
        block = 16 if self.crowded else int(self.choose([16, 16, 16, 32, 64, 128, 256]))
        longest = self.longest_prompt + self.longest_answer
        fields = {
            "prefix_caching": str(self.choose((*PREFIX_CACHING_MODES, "restore", "restore"))),
            "block_size_tokens": block,
            "max_tokens": int(self.choose([1, 7, 16, 33, 64, 200, 512])),
            "max_requests": 8 if self.crowded else int(self.choose([1, 2, 4, 8])),
            "max_sequence_length": longest,
            "async_scheduling": self.ahead,
        }
        spec = tiny_engine(self.model, **fields, cache_bytes=64 << 20).cache.spec
        if self.crowded or self.chance(0.6):
            # A pool that holds the longest request, and little or nothing beside it.
            pages = (spec.num_blocks(longest) + 1) * sum(spec.pages_per_block) + 2
            more = 4 if self.crowded else pages + 2 * spec.checkpoint_pages
            pages += int(self.random.integers(0, more))
            fields["cache_bytes"] = pages * spec.page_bytes
        if self.tiers:
            fields["prefix_caching"] = "restore"
            least = least_capacity_bytes(spec)
            most = max(least, self.choose([100_000, 1_000_000, 1 << 30]))
            fields["host_cache_bytes"] = int(self.choose([0, most, most]))
            if not fields["host_cache_bytes"] or self.chance(0.4):
                self.folder = tempfile.TemporaryDirectory()
                fields["cache_dir"] = self.folder.name
                fields["disk_cache_bytes"] = max(least, int(self.choose([200_000, 1 << 30])))
        return fields

    def _prompt(self) -> list[int]:
        family = self.choose(self.families)
        finished = [request for request in self.requests if request.done]
        if finished and self.chance(0.2):  # another turn of a conversation
            request = self.choose(finished)
            family = request.tokens[: request.num_tokens].tolist()
        cut = int(self.random.integers(0, len(family) + 1))
        if self.chance(0.3):
            cut = len(family)
        suffix = int(self.random.integers(0, 20)) if self.chance(0.7) else 0
        return (family[:cut] + self._tokens(suffix))[: self.longest_prompt] or self._tokens(1)

    def add(self) -> None:
        prompt = self._prompt()
        scored = self.chance(0.3)
        breakpoints = [int(p) for p in self.random.integers(1, len(prompt) + 1, 2)]
        request = self.engine.add_request(
            prompt,
            greedy(
                int(self.random.integers(0, self.longest_answer + 1)),
                return_log_probs=scored,
                skip_prompt_log_probs=scored and self.chance(0.5),
                stop_token_ids=tuple(self._tokens(2)) if self.chance(0.3) else (),
            ),
            RequestOptions(
                salt=str(self.choose(["", "", "", "other"])),
                cache_breakpoints=breakpoints if self.chance(0.3) else [],
                n=int(min(self.choose([1, 1, 1, 2, 4]), self.fields["max_requests"])),
            ),
        )
        self.requests += request.samples

    def step(self) -> None:
        self.engine.step()
        self.engine.check_integrity()
        poison(self.engine)

    def fail(self) -> None:
        """A step whose forward pass writes what it writes, and then raises."""
        with failing_forward(self.engine), contextlib.suppress(InjectedError):
            self.engine.step()
        self.engine.check_integrity()

    def restart(self) -> None:
        """The cache is saved, and a new engine goes on with it."""
        self.engine.save_cache()
        self.engine.close()
        for request in self.requests:
            if not request.closed:
                self.engine.cancel(request)
        self.recorder.check(self.model)
        self.stats.update(self.engine.stats())
        self.engine = tiny_engine(self.model, **self.fields)
        self.recorder = LogitsRecorder(self.engine)

    def cancel(self) -> None:
        open_requests = [r for r in self.requests if not r.closed and not r.sample_index]
        if open_requests:
            self.engine.cancel(self.choose(open_requests))
            self.engine.check_integrity()

    def run(self) -> None:
        to_add = self.num_requests
        while to_add or self.engine.has_work:
            if to_add and self.chance(0.4):
                self.add()
                to_add -= 1
            elif self.chance(0.03):
                self.cancel()
            elif self.chance(0.03):
                self.fail()
            elif self.chance(0.15 if self.tiers else 0.03):
                self.engine.cache.evict(int(self.random.integers(1, 500 if self.tiers else 20)))
            elif self.chance(0.01):
                self.engine.cache.clear()
            elif "cache_dir" in self.fields and self.chance(0.01):
                self.restart()
            else:
                self.step()
        self.check()

    def check(self) -> None:
        """Nothing runs any more: all answers are right and nothing is held."""
        self.recorder.check(self.model)
        for request in self.requests:
            check_answer(self.model, request)
            report = request.prefix
            assert report.skipped_tokens + report.computed_tokens == request.num_prompt_tokens
            assert 0 <= report.skipped_tokens <= report.shared_tokens <= request.num_prompt_tokens
        assert not self.engine.cache.allocator.ref_counts.any()
        assert self.engine.stats()["leases"] == 0
        self.stats.update(self.engine.stats())
        self.engine.close()
        if "cache_dir" in self.fields:
            self.folder.cleanup()
