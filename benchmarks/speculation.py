"""Steps per answer with drafts and without, and the time of a step."""

import statistics
from collections.abc import Iterator

import torch

from benchmarks.common import Row, seconds
from megatron_hybrid import DynamicInferenceEngine, InferenceConfig, SamplingParams
from megatron_hybrid.checkpoints.pretrained import load_pretrained
from megatron_hybrid.models.hybrid_model import HybridModel

STORY = (
    "It was a cold evening in the middle of winter, and the old man sat by the fire with his "
    "grandchildren. He told them of the great ship that had sailed round the world, of the storm "
    "in which it was lost, and of the young sailor who alone came home again."
)
TOKENS = 120
SAMPLED = {"temperature": 0.8, "seed": 1}
TASKS: dict[str, tuple[str, dict]] = {
    "prose, greedy": (STORY, {"top_k": 1}),
    "prose, sampled": (STORY, SAMPLED),
    "a chat, greedy": (
        "User: Who sailed round the world?\nAssistant: The young sailor did.\n"
        "User: Who came home again?\nAssistant:",
        {"top_k": 1},
    ),
    "code, greedy": (
        "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef",
        {"top_k": 1},
    ),
    "an agent's calls, greedy": (
        "".join(
            f'call: {{"tool": "read", "path": "src/{name}.py"}}\nresult: ok\n'
            for name in ("main", "tree", "page")
        )
        + "call:",
        {"top_k": 1},
    ),
    "a list that goes on, sampled": (
        "\n".join(f"Chapter {n}. The ship" for n in range(1, 14)),
        SAMPLED,
    ),
    "a text that is copied, sampled": (f"{STORY}\n\n{STORY}\n\n{STORY[:40]}", SAMPLED),
}


def run() -> Iterator[Row]:
    """Answers of the demo model, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, tokenizer = load_pretrained("demo", "cpu", torch.float32)
        for name, (prompt, fields) in TASKS.items():
            tokens = tokenizer.tokenize(prompt)
            params = SamplingParams(
                num_tokens_to_generate=TOKENS, ignore_termination=True, **fields
            )
            yield Row(f"{name}: steps for {TOKENS} tokens", _steps(model, [tokens], params), "")
            if name == "prose, sampled":
                yield Row(f"{name}, asked again", _steps(model, [tokens, tokens], params), "")
        for batch in (1, 8):
            yield Row(
                f"a step of {batch} decodes without drafts, with 1 and 3", _times(model, batch)
            )
        with _engine(model, 3) as engine:
            kilobytes = engine.cache.spec.slot_bytes / 1e3
            yield Row("states to take back, for each draft of a request", f"{kilobytes:.0f} kB")
    finally:
        torch.set_num_threads(threads)


def _engine(model: HybridModel, drafts: int, **fields) -> DynamicInferenceEngine:
    if drafts:
        # All drafts, whether they pay on this machine or not.
        fields |= {"speculation": "lookup", "num_speculative_tokens": drafts, "warm_up": False}
    sizes = {"cache_bytes": 64 << 20, "max_requests": 8, "max_sequence_length": 1024}
    return DynamicInferenceEngine(model, None, InferenceConfig(**sizes, **fields))


def _steps(model: HybridModel, prompts: list[list[int]], params: SamplingParams) -> str:
    """Decode steps of the last prompt's answer with up to 1, 3 and 7 drafts, their acceptance, and
    the tokens of a step."""
    found, parts = [], []
    for drafts in (0, 1, 3, 7):
        with _engine(model, drafts) as engine:
            for prompt in prompts:
                steps, before = engine.num_steps, engine.stats()
                answer = engine.generate([prompt], params)[0].token_ids
            found.append(answer)
            if drafts:
                after = engine.stats()
                proposed, accepted = (
                    after[key] - before[key] for key in ("draft_tokens", "draft_tokens_accepted")
                )
                num_steps = engine.num_steps - steps
                length = len(answer) / num_steps
                parts.append(
                    f"k={drafts}: {num_steps}, {accepted} of {proposed}, {length:.2f} a step"
                )
    assert found[1:] == found[:1] * 3
    return "; ".join(parts)


class _Wrong:
    """A drafter whose drafts are all but never right."""

    def propose(self, request, most: int) -> list[int]:
        return [1] * most


def _times(model: HybridModel, batch: int) -> str:
    """Median milliseconds of a step, all of whose drafts are rejected."""
    medians = []
    for drafts in (0, 1, 3):
        with _engine(model, drafts) as engine:
            if drafts:
                engine.scheduler.draft_planner.drafts.drafter = _Wrong()
            params = SamplingParams(top_k=1, num_tokens_to_generate=70, ignore_termination=True)
            requests = [engine.add_request([5 + i] * 64, params) for i in range(batch)]
            while not all(request.num_generated for request in requests):
                engine.step()
            medians.append(statistics.median(seconds(engine.step) for _ in range(50)) * 1e3)
    return ", ".join(f"{median:.1f}" for median in medians) + " ms"
