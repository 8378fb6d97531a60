"""`megatron-hybrid profile`: skip rates of several prefix caches on your own prompts.

The prompts are replayed without a model: through this project's cache, called as by the engine, and
through models of other engines' documented rules (`tools/replay/rules.py`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap

import numpy as np
import torch

from megatron_hybrid.cache.report import MissReason
from megatron_hybrid.checkpoints.pretrained import model_folder
from megatron_hybrid.inference.config import InferenceConfig
from megatron_hybrid.models.config.hybrid_config import HybridConfig
from megatron_hybrid.models.hybrid_model import build_hybrid_model
from megatron_hybrid.text.tokenizer import Tokenizer
from megatron_hybrid.text.tokenizer_files import find_tokenizer
from megatron_hybrid.tools.plan import spec_of
from megatron_hybrid.tools.rates import WIDTH
from megatron_hybrid.tools.replay.jsonl import load_jsonl
from megatron_hybrid.tools.replay.lru import Ceiling
from megatron_hybrid.tools.replay.ours import Ours
from megatron_hybrid.tools.replay.protocol import Engine, Request
from megatron_hybrid.tools.replay.rules import rules
from megatron_hybrid.utils.progress import progress
from megatron_hybrid.utils.tables import GB, size, table

OURS = "this engine, any token"
CEILING = "infinite cache, any token"
_BAR = 24
_NOTE = (
    "The first caches are models of other engines' documented rules (LRU, one pool for KV and "
    "states), not measurements of the engines:"
)


@dataclass(frozen=True)
class CacheResult:
    """Skip rates of one cache."""

    name: str
    what: str
    block_tokens: int
    """Distance of the positions from which a prompt can resume."""
    too_short_percent: float
    """Percent of compared prompts that skip nothing, as they end before such a position."""
    skipped_percent: float
    """Percent of the compared prompts' tokens that are skipped."""


@dataclass(frozen=True)
class Profile:
    """Result of `profile`."""

    layer_pattern: str
    memory_bytes: int
    state_encoding: str
    kv_bytes_per_token: int
    checkpoint_bytes: int
    """Bytes of a checkpoint with its windows, without other KV."""
    requests: int
    prompt_tokens: int
    answers: bool
    """Whether the answers of all requests are known."""
    lengths: list[int]
    """Tokens of each prompt."""
    caches: list[CacheResult]
    """Results of the other rules, this engine, and the ceiling."""
    lost_tokens: dict[str, int]
    """Tokens that this engine knew and computed again, by reason, the largest number first."""
    too_large: int
    """Requests whose prompt does not fit into this engine's pool; left out of the comparison."""
    compared_tokens: int
    """Prompt tokens of the compared requests."""

    @property
    def histogram(self) -> list[dict[str, int]]:
        """Numbers of prompts (`requests`) of at least `start` tokens and less than `end`, which are
        powers of two."""
        lengths = np.array(self.lengths)
        first, last = (int(n).bit_length() for n in (lengths.min(), lengths.max()))
        return [
            {"start": end // 2, "end": end, "requests": int(np.sum(lengths // (end // 2) == 1))}
            for end in (1 << b for b in range(first, last + 1))
        ]

    def to_dict(self) -> dict:
        """Return values for JSON, with the histogram in place of the lengths."""
        values = {**asdict(self), "histogram": self.histogram}
        del values["lengths"]
        return values


def read_requests(path: str | Path, model: str | Path, vocab_size: int) -> list[Request]:
    """Read the requests of a JSONL file, with texts and chats tokenized by the model's folder.

    Raises:
        ValueError: a line cannot be used; the message names file, line and remedy.
    """
    tokenizer, folder = None, model_folder(model)

    def tokenize(
        text: str | list, *, tools: list[dict] | None, is_answer: bool
    ) -> tuple[list[int], list[int]]:
        nonlocal tokenizer
        if tokenizer is None:
            if not folder.is_dir() or find_tokenizer(folder) is None:
                raise ValueError(
                    f"it has text, and {model} is no folder with a tokenizer: give the model's "
                    f"folder, or token ids in place of text"
                )
            tokenizer = Tokenizer.from_folder(folder)
        if isinstance(text, str):
            return tokenizer.tokenize(text, add_special_tokens=not is_answer), []
        return tokenizer.chat_prompt(text, tools=tools)

    return list(load_jsonl(path, tokenize=tokenize, vocab_size=vocab_size))


def profile(
    requests: Sequence[Request],
    config: HybridConfig,
    memory_bytes: float,
    state_encoding: str = "exact",
) -> Profile:
    """Replay requests, one after the other, through caches of this size.

    Args:
        requests: at least one.
        config: that of the model, with tensor_model_parallel_size 1.
        memory_bytes: size of KV and cached states, that is `InferenceConfig.cache_bytes`.
        state_encoding: that of this engine's checkpoints, as in InferenceConfig.

    Raises:
        ValueError: an unknown encoding, or memory for less than two pages, or for no prompt.
    """
    with torch.device("meta"):
        model = build_hybrid_model(config)
    block = InferenceConfig.block_size_tokens  # the default
    spec = spec_of(model, block, state_encoding)
    if memory_bytes < 2 * spec.page_bytes:
        raise ValueError(
            f"{memory_bytes / GB:.10g} GB of cache hold less than 2 pages of {spec.page_bytes} "
            f"bytes; give at least {2 * spec.page_bytes / GB:.10g} GB"
        )
    lengths = [len(request.prompt) for request in requests]
    ours = Ours(spec, memory_bytes)
    compared = [request for request in requests if ours.holds(len(request.prompt))]
    compared_tokens = sum(len(request.prompt) for request in compared)
    if not compared:
        raise ValueError(
            f"none of the prompts fits into {memory_bytes / GB:.10g} GB of cache, the shortest has "
            f"{min(lengths):,} tokens: give more memory"
        )
    caches: list[CacheResult] = []

    def add(name: str, what: str, block_tokens: int, longest: int, engine: Engine) -> None:
        """Add a cache's result. Prompts of up to `longest` tokens are too short."""
        too_short = sum(len(request.prompt) <= longest for request in compared)
        shares = too_short / len(compared), _replay(compared, engine) / compared_tokens
        percents = (round(100 * share, 2) for share in shares)
        caches.append(CacheResult(name, what, block_tokens, *percents))

    for rule in rules(model.cache_requirements(), spec):
        add(rule.name, rule.what, rule.block_tokens, rule.block_tokens, rule.build(memory_bytes))
    add(OURS, "its own cache, as the engine drives it", 1, 0, ours)
    add(CEILING, "what bounds every cache from above", 1, 0, Ceiling())
    stats = ours.cache.stats()
    lost = {reason.value: stats[f"lost_tokens_{reason.value}"] for reason in MissReason}
    lost = sorted(((n, reason) for reason, n in lost.items() if n), reverse=True)
    return Profile(
        layer_pattern=config.layer_pattern,
        memory_bytes=int(memory_bytes),
        state_encoding=state_encoding,
        kv_bytes_per_token=spec.kv_bytes_per_token,
        checkpoint_bytes=spec.checkpoint_bytes + spec.local_bytes if spec.needs_state else 0,
        requests=len(requests),
        prompt_tokens=sum(lengths),
        answers=all(len(request.output) for request in requests),
        lengths=lengths,
        caches=caches,
        lost_tokens={reason: tokens for tokens, reason in lost},
        too_large=len(requests) - len(compared),
        compared_tokens=compared_tokens,
    )


def _replay(requests: Sequence[Request], engine: Engine) -> int:
    """Run requests, one after the other. Return how many tokens of their prompts are skipped."""
    skipped = 0
    with progress("replaying", len(requests), in_bytes=False) as advance:
        for request in requests:
            running = engine.begin(request.prompt, request.message_starts)
            engine.finish(running, np.concatenate([request.prompt, request.output]))
            skipped += running.skipped_tokens
            advance(1)
    return skipped


def render(result: Profile) -> str:
    lengths = np.array(result.lengths)
    median, most = (int(np.quantile(lengths, q)) for q in (0.5, 0.95))
    heads = [
        f"{_prompts(result.requests)}, {result.prompt_tokens:,} tokens; median {median:,}, 95 % up "
        f"to {most:,}, longest {lengths.max():,}",
        f"{size(result.memory_bytes)} of cache: KV {size(result.kv_bytes_per_token)} per token, a "
        f"saved position {size(result.checkpoint_bytes)} (states {result.state_encoding})",
    ]
    if result.too_large:
        verb = "does" if result.too_large == 1 else "do"
        rest = result.requests - result.too_large
        heads.insert(
            0,
            f"{_prompts(result.too_large)} {verb} not fit into the cache at all: an engine would "
            f"refuse them. All that is skipped or lost is of the other {_prompts(rest)}, "
            f"{result.compared_tokens:,} tokens. Give more memory for all.",
        )
    lines = [
        *(line for head in heads for line in wrap(head, WIDTH)),
        "",
        *_histogram(result),
        "",
        *table(
            ("", "too short, % of prompts", "skipped, % of tokens"),
            [
                (row.name, f"{row.too_short_percent:.1f}", f"{row.skipped_percent:.1f}")
                for row in result.caches
            ],
        ),
    ]
    if result.lost_tokens:
        share = 100 / result.compared_tokens
        lost = [(reason, f"{n:,}", f"{n * share:.1f}") for reason, n in result.lost_tokens.items()]
        heads = ("known to this engine, computed again", "tokens", "% of tokens")
        lines += ["", *table(heads, lost)]
    notes = [_NOTE, *(f"- {row.name}: {row.what}" for row in result.caches[:-2])]
    if not result.answers:
        notes.append(
            "Answers (`output`) are not given for all prompts: what a next turn shares with an "
            "answer counts as new."
        )
    lines.append("")
    for note in notes:
        lines += wrap(note, WIDTH, subsequent_indent="  " if note.startswith("-") else "")
    return "\n".join(lines)


def _prompts(number: int) -> str:
    return f"{number:,} prompt" if number == 1 else f"{number:,} prompts"


def _histogram(result: Profile) -> list[str]:
    bins = [each.values() for each in result.histogram]
    most = max(number for *_, number in bins)
    rows = []
    for start, end, number in bins:
        here = [f"< {row.name}" for row in result.caches[:-2] if start <= row.block_tokens < end]
        bar = "#" * -(-number * _BAR // most)
        rows.append((f"{start:,} - {end - 1:,}", f"{number:,}", bar, here or [""]))
    bar = max(len(row[2]) for row in rows)
    head, *lines = table(
        ("prompt tokens", "prompts"), [(length, number) for length, number, *_ in rows]
    )
    return [
        head,
        *(
            f"{'' if again else line:{len(head)}}  {'' if again else row[2]:{bar}}  {mark}".rstrip()
            for line, row in zip(lines, rows)
            for again, mark in enumerate(row[3])  # a line for each
        ),
    ]
