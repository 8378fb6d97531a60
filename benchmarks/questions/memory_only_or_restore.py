"""Share memory alone, or restore states, too? Ten equal requests of 644 tokens in each mode."""

from collections.abc import Iterator

from benchmarks.questions.common import aligned, answer, engine_of, random_tokens
from megatron_hybrid import SamplingParams, load_pretrained
from megatron_hybrid.cache.matching import PREFIX_CACHING_MODES

REQUESTS, PROMPT, ANSWER = 10, 644, 16


def run(requests: int = REQUESTS, prompt_tokens: int = PROMPT, model=None) -> Iterator[str]:
    """The lines of the table. model: the demo model, where none is given."""
    model = model or load_pretrained("demo")[0]
    prompt = random_tokens(0, model, prompt_tokens)
    params = SamplingParams(top_k=1, num_tokens_to_generate=ANSWER, ignore_termination=True)
    rows = [("mode", "first", "each later", "all", "all, at once", "MiB, at once")]
    answers = []
    for mode in PREFIX_CACHING_MODES:
        engine = engine_of(model, prefix_caching=mode)
        in_turn = [answer(engine, prompt, ANSWER) for _ in range(requests)]
        engine.close()
        engine = engine_of(model, prefix_caching=mode)
        at_once = engine.generate([prompt] * requests, params)
        stats = engine.stats()
        engine.close()
        first, *later = (result.prefix.computed_tokens for result in in_turn)
        if len(set(later)) > 1:
            raise AssertionError(f"equal requests computed {later} tokens in mode {mode}")
        together = sum(result.prefix.computed_tokens for result in at_once)
        held = stats["peak_pages_in_use"] * stats["page_bytes"] / 2**20
        rows.append((mode, first, later[0], first + sum(later), together, f"{held:.1f}"))
        answers += [result.token_ids for result in (*in_turn, *at_once)]
    yield f"prompt tokens computed of {requests} equal prompts of {prompt_tokens:,} tokens, and the"
    yield "most memory of running requests"
    yield from aligned(rows)
    same = all(tokens == answers[0] for tokens in answers)
    yield f"answers in all modes: {'the same' if same else 'not the same'}"
