"""Random requests with extreme values of every sampling field, and with logits that are no numbers.

Each draw is compared with a naive model of it, and each answer with the same request alone,
without drafts. `python tests/helpers/extreme_sampling.py 18000 2000` makes so many
requests of engines, and so many over HTTP, in this process.
"""

import asyncio
import math
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager

import httpx
import numpy as np
import torch
from differential import RandomDraws
from drafted import GUIDES, Failing, Oracle, draft_with
from graph_recorder import recorded_graphs
from http_server import demo_service
from reference import VOCAB_SIZE, tiny_engine, tiny_model
from scripted import ByteTokenizer

from megatron_hybrid.inference.requests.options import RequestOptions
from megatron_hybrid.inference.sampling_params import NOT_FINITE, RULED_OUT, Draw, SamplingParams
from megatron_hybrid.inference.worker import model_runner
from megatron_hybrid.inference.worker.sampler import noise_keys
from megatron_hybrid.serving.app import create_app

LARGEST = float(np.finfo(np.float32).max)
EXTREMES = {
    "temperature": [0.0, -0.0, 5e-324, 1e-31, 1e-30, 1e-20, 1e-3, 0.7, 1.0, 3.0, 1e20, 1e30],
    "top_k": [0, 1, 2, 20, 96, 97, 10**6, 2**32 - 1],
    "top_p": [0.0, -0.0, 5e-324, 1e-40, 1e-9, 0.3, 0.9, 1 - 2**-53, 1.0],
    "min_p": [0.0, -0.0, 5e-324, 1e-40, 1e-9, 0.3, 1.0],
    "repetition_penalty": [1e-30, 1e-20, 0.5, 1.0, 1.0 + 1e-9, 1.3, 1e20, 1e30],
    "presence_penalty": [-2.0, -1e-40, -0.0, 5e-324, 1e-40, 0.5, 2.0],
    "frequency_penalty": [-2.0, -1e-40, -0.0, 5e-324, 1e-40, 0.5, 2.0],
    "seed": [-(2**63), -1, 0, 1, 2**63, 2**64 - 1],
}
"""Legal values."""
ILLEGAL = {
    "temperature": [1e31, 1e39, 1e300, -1e-40, 10**400],
    "repetition_penalty": [0.0, -0.0, 1e-40, 5e-324, 1e-31, 1e31, 1e39, 1e300, -1.0, 10**400],
    "top_p": [-1e-40, 1.0000001, 1e300],
    "min_p": [-1e-40, 1.0000001, 1e300],
    "presence_penalty": [-2.0000001, 1e39, 1e300],
    "frequency_penalty": [-2.0000001, 1e39, 1e300],
}
BIASES = [-100.0, -1e-40, -0.0, 5e-324, 1.0, 100.0]
FAULTS = {
    "nan": lambda row, random: row.index_fill_(0, random.integers(len(row)), math.nan),
    "inf": lambda row, random: row.index_fill_(0, random.integers(len(row)), math.inf),
    "all -inf": lambda row, random: row.fill_(-math.inf),
    "some -inf": lambda row, random: row[1::2].fill_(-math.inf),
    "huge": lambda row, random: row.sign_().mul_(LARGEST),
    "equal": lambda row, random: row.zero_(),
    "denormal": lambda row, random: row.copy_(row.argsort().argsort() * 1e-42),
}
"""What a row of logits becomes; once more, too, as a row that is drawn again."""


class _Random:
    """Indices of tokens, by a fault's point."""

    def __init__(self, *point: int):
        self.random = np.random.default_rng(point)

    def integers(self, length: int) -> torch.Tensor:
        return torch.from_numpy(self.random.integers(0, length, 1))


def naive_draw(logits_V: np.ndarray, draw: Draw) -> int:
    """The token of one row, in float32 where the definition says so, else in float64."""
    if np.isnan(logits_V).any() or (logits_V == np.inf).any() or (logits_V == -np.inf).all():
        return NOT_FINITE
    own, x, f32 = draw.params, logits_V.astype(np.float32), np.float32
    ids = np.arange(len(x))
    if draw.allowed is not None:
        bits = np.unpackbits(draw.allowed.view(np.uint8), bitorder="little")
        x[~np.isin(ids, np.flatnonzero(bits))] = -np.inf
    for token, bias in own.logit_bias.items():
        x[token] += f32(bias)
    answer = [] if draw.answer_tokens is None else draw.answer_tokens.tolist()
    prompt = [] if draw.prompt_tokens is None else draw.prompt_tokens.tolist()
    for token in {*answer, *prompt}:
        if x[token] != -np.inf:
            penalty = f32(own.repetition_penalty)
            changed = x[token] / penalty if x[token] > 0 else x[token] * penalty
            x[token] = min(max(changed, f32(-LARGEST)), f32(LARGEST))
    for token, count in Counter(answer).items():
        x[token] = x[token] - f32(own.frequency_penalty) * f32(count)
        x[token] = x[token] - f32(own.presence_penalty)
    x[list(draw.banned)] = -np.inf
    if (x == -np.inf).all():
        return RULED_OUT
    order = np.lexsort((ids, -x.astype(np.float64)))
    if own.is_greedy:
        return int(order[0])
    tempered = ((x - x.max()) / f32(own.temperature)).astype(np.float64)
    if own.min_p:
        tempered[tempered < f32(math.log(own.min_p))] = -np.inf
    kept = order[: own.top_k or len(order)]
    if 0 < own.top_p < 1:
        masses = [int(mass) for mass in np.exp(tempered[kept]) * 2.0**40]
        limit, before = own.top_p * sum(masses), 0
        for number, mass in enumerate(masses):
            if before >= limit:
                kept = kept[:number]
                break
            before += mass
    return int(kept[np.argmax(tempered[kept] + _noise(kept, draw))])


def naive_hash(ids: np.ndarray, keys: tuple[int, int]) -> np.ndarray:
    """`token_hash` of a row's tokens, in whole numbers."""
    first, second = (key % 2**32 for key in keys)
    h = ids.astype(np.uint64) * 0x9E3779B9 % 2**32 ^ first
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32 ^ second
    h = (h ^ h >> 15) * 0x846CA68B % 2**32
    return (h ^ h >> 16) % 2**31


def _noise(ids: np.ndarray, draw: Draw) -> np.ndarray:
    w = (naive_hash(ids, noise_keys(draw.seed, draw.sample_index, draw.position)) + 0.5) / 2**31
    return -np.log(-np.log1p(-w))


@contextmanager
def watched_draws(runner, fault_of, counts: Counter, num_candidates: int):
    """Context in which each draw of a runner is compared with `naive_draw`, and the number of
    redraws with its bound.

    Args:
        fault_of: the fault of a draw's row, by the draw; None: none.
        counts: gets what was seen.
        num_candidates: of the first draw of a row.
    """
    sampled_of, draw_of, redraws = runner._sampled, runner._draw, []

    def faulty(logits_nV, draws, size):
        rows = []
        for row_V, draw in zip(logits_nV.clone(), draws, strict=True):
            if (fault := fault_of(draw)) is not None:
                FAULTS[fault](row_V, _Random(draw.seed % 2**32, draw.position))
            rows.append(row_V)
        redraws.append(size)
        return draw_of(torch.stack(rows), draws, size)

    def compared(drawn, values):
        redraws.clear()
        sampled = sampled_of(drawn, values)
        vocab_size = drawn.logits_nV.shape[1]
        most = max(0, math.ceil(math.log(vocab_size / num_candidates, 16)))
        assert len(redraws) <= most, (redraws, vocab_size)
        counts["redraws"] += len(redraws)
        rows = drawn.logits_nV.float().numpy()
        with np.errstate(all="ignore"):
            for row_V, draw, own in zip(rows, drawn.draws, sampled, strict=True):
                assert own.token == naive_draw(row_V, draw), (own, draw, row_V)
                counts["draws"] += 1
                if draw.params.return_log_probs and own.token >= 0:
                    assert own.log_prob <= 0, (own, draw)
        return sampled

    before, model_runner.NUM_CANDIDATES = model_runner.NUM_CANDIDATES, num_candidates
    runner._sampled, runner._draw = compared, faulty
    try:
        yield
    finally:
        runner._sampled, runner._draw = sampled_of, draw_of
        model_runner.NUM_CANDIDATES = before


def is_alike(found, expected) -> bool:
    """Whether two answers are equal, numbers within what rows beside it change in a product."""
    if isinstance(expected, float):
        return found == expected or abs(found - expected) < 1e-5 or found != found != expected
    if isinstance(expected, dict):
        return is_alike(sorted(found.items()), sorted(expected.items()))
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(is_alike, found, expected))
    return found == expected


class Round(RandomDraws):
    """Some requests beside each other, and each alone.

    Args:
        seed: of all that is random.
        counts: gets what was seen.
    """

    def __init__(self, seed: int, counts: Counter):
        self.seed, self.counts, self.random = seed, counts, np.random.default_rng(seed)
        self.model = tiny_model(["-", "-", "M*"][seed % 3])
        self.requests = [self._ask() for _ in range(16)]
        self.faults = {}
        for _, params, _ in self.requests:
            if self.chance(0.4):
                self.faults[params.seed] = self.choose(list(FAULTS)), int(self.choose(range(4)))

    def extremes(self) -> dict:
        """Some fields with legal values."""
        return {name: self.choose(values) for name, values in EXTREMES.items() if self.chance(0.4)}

    def _ask(self) -> tuple[list[int], SamplingParams, RequestOptions]:
        def tokens(most: int) -> list[int]:
            return self.random.integers(0, VOCAB_SIZE, self.random.integers(1, most + 1)).tolist()

        scored, bans = self.chance(0.4), self.chance(0.2)
        fields = self.extremes() | {"seed": int(self.random.integers(1 << 40))}
        params = SamplingParams(
            **fields,
            num_tokens_to_generate=int(self.choose([0, 1, 4, 6])),
            logit_bias={t: self.choose(BIASES) for t in tokens(97)} if self.chance(0.3) else None,
            allowed_token_ids=tokens(3) if not bans and self.chance(0.15) else None,
            bad_words_ids=[[token] for token in tokens(60)] if bans else (),
            stop_token_ids=tokens(3) if self.chance(0.2) else (),
            return_log_probs=scored,
            skip_prompt_log_probs=scored and self.chance(0.5),
            top_n_logprobs=int(self.choose([1, 97, 10**9])) if scored else 0,
        )
        is_free = not bans and params.allowed_token_ids is None
        guide = self.choose(GUIDES) if is_free and self.chance(0.2) else None
        return tokens(9), params, RequestOptions(guide=guide, n=int(self.choose([1, 1, 3])))

    def _fault(self, draw: Draw) -> str | None:
        fault, first = self.faults.get(draw.seed, (None, 0))
        return fault if draw.position % 4 >= first else None

    def run(self) -> None:
        """Raises AssertionError where a draw is wrong, or another request changes an answer."""
        fields = {
            "logprobs_mode": str(self.choose(["raw_logprobs", "processed_logprobs"])),
            "prefix_caching": "off",
            "warm_up": False,
        }
        drafts = self.seed % 2 and {"speculation": "lookup", "num_speculative_tokens": 3}
        with ExitStack() as ends:
            beside = fields | (drafts or {})
            if self.seed % 5 == 4:
                ends.enter_context(recorded_graphs())
                beside["cuda_graphs"] = True
            alone = tiny_engine(self.model, ByteTokenizer(), **fields)
            with watched_draws(alone.runner, self._fault, self.counts, 97):
                expected = [self._answers(alone, [request])[0] for request in self.requests]
            engine = tiny_engine(self.model, ByteTokenizer(), **beside)
            if drafts:
                known = dict(enumerate(t for group in expected for t, *_ in group))
                draft_with(engine, Failing() if self.seed % 4 == 1 else Oracle(known, 0.3))
            size = int(self.choose([1, 4, 97]))
            with watched_draws(engine.runner, self._fault, self.counts, size):
                found = self._answers(engine, self.requests)
            assert engine.stats()["step_failures"] == 0
            engine.check_integrity()
        for asked, own, other in zip(self.requests, expected, found, strict=True):
            assert is_alike(other, own), (self.seed, fields, asked, own, other)
            self.counts["requests"] += len(own)
            for _, reason, error, *_ in own:
                self.counts[error.split(":")[1].split(",")[0] if error else reason] += 1
        if drafts:
            self.counts["accepted drafts"] += engine.stats()["draft_tokens_accepted"]

    def _answers(self, engine, requests) -> list[list[tuple]]:
        added = [engine.add_request(*request) for request in requests]
        while engine.has_work:
            engine.step()
        return [
            [
                (r.token_ids, r.finish_reason, r.error, r.log_probs, r.top_n_logprobs)
                for r in (sample.result() for sample in request.samples)
            ]
            for request in added
        ]


class HttpRounds:
    """Requests of the demo model's server, some of them illegal: 8 at a time, and each alone."""

    def __init__(self, counts: Counter):
        self.counts, self.service = (
            counts,
            demo_service({"prefix_caching": "off", "warm_up": False}),
        )
        transport = httpx.ASGITransport(create_app(self.service), raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        self._faults: dict[int, str] = {}

    async def run(self, seed: int) -> None:
        """Raises AssertionError for a wrong answer or status."""
        source = Round(seed, self.counts)
        bodies = [self._body(source) for _ in range(8)]
        runner, fault_of = self.service.engine._engine.runner, self._fault
        with watched_draws(runner, fault_of, self.counts, int(source.choose([16, 4096]))):
            alone = [await self._post(body) for body, _ in bodies]
            together = await asyncio.gather(*(self._post(body) for body, _ in bodies))
        for (body, illegal), own, other in zip(bodies, alone, together, strict=True):
            assert is_alike(other, own), (seed, body, own, other)
            status, text = own
            fails = self._faults.get(body["seed"]) in ("nan", "inf", "all -inf")
            assert status == (400 if illegal else 500 if fails else 200), (seed, body, own)
            if illegal:
                assert any(name in text for name in illegal), (body, text)
            elif fails:
                assert "NaN" in text, (body, text)
            self.counts["requests"] += 1
            self.counts[f"HTTP {status}"] += 1

    def _fault(self, draw: Draw) -> str | None:
        return self._faults.get(draw.seed)

    def _body(self, source: Round) -> tuple[dict, list[str]]:
        seed = int(source.random.integers(1 << 40))
        body = source.extremes() | {"prompt": "Once upon a", "max_tokens": 3, "seed": seed}
        if source.chance(0.3):
            body["logprobs"] = 2
        if source.chance(0.3):
            body["logit_bias"] = {str(i * 7): source.choose(BIASES) for i in range(99)}
        if source.chance(0.3):
            self._faults[seed] = source.choose(list(FAULTS))
        illegal = [name for name in ILLEGAL if source.chance(0.04)]
        return body | {name: source.choose(ILLEGAL[name]) for name in illegal}, illegal

    async def _post(self, body: dict) -> tuple[int, str | tuple]:
        answer = await self._client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return answer.status_code, answer.text
        choice = answer.json()["choices"][0]
        return 200, (choice["text"], choice["finish_reason"], choice["logprobs"])

    async def close(self) -> None:
        """End the server."""
        await self._client.aclose()
        await self.service.close()


async def over_http(num_requests: int, counts: Counter, seed: int = 0) -> None:
    """So many requests, 8 beside each other."""
    rounds = HttpRounds(counts)
    try:
        for number in range(seed, seed + -(-num_requests // 8)):
            await rounds.run(number)
            if number % 10 == 9:
                print(dict(counts), flush=True)
    finally:
        await rounds.close()


def main(num_requests: int, num_over_http: int) -> None:
    counts, seed = Counter(), 0
    while counts["requests"] < num_requests:
        Round(seed, counts).run()
        seed += 1
        if seed % 10 == 0:
            print(dict(counts), flush=True)
    print(f"{seed} rounds of engines:", dict(counts), flush=True)
    counts = Counter()
    asyncio.run(over_http(num_over_http, counts))
    print("over HTTP:", dict(counts), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:]))
