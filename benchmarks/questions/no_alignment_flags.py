"""Do sizes of blocks and forwards have to be aligned for hits? Tokens computed of a prompt that is
sent again, that is fetched from host memory, and that goes on, by block and token budget."""

from collections.abc import Iterator, Sequence

from benchmarks.questions.common import aligned, answer, engine_of, random_tokens
from megatron_hybrid import load_pretrained

SETTINGS = ((16, 2048), (16, 500), (16, 333), (64, 528), (64, 1055), (256, 256), (256, 999))
"""block_size_tokens and max_tokens."""
PROMPT, ANSWER, TURN = 1055, 20, 30
ALL_PAGES = 1 << 30


def run(
    settings: Sequence[tuple[int, int]] = SETTINGS, prompt_tokens: int = PROMPT, model=None
) -> Iterator[str]:
    """The lines of the table. model: the demo model, where none is given."""
    model = model or load_pretrained("demo")[0]
    prompt = random_tokens(0, model, prompt_tokens)
    turn = random_tokens(1, model, TURN)
    exact = answer(engine_of(model, prefix_caching="off"), prompt, ANSWER).token_ids
    rows = [("block, budget", "first", "again", "from host memory", "next turn", "same answers")]
    for block, budget in settings:
        engine = engine_of(
            model, block_size_tokens=block, max_tokens=budget, host_cache_bytes=128 << 20
        )
        results = [answer(engine, prompt, ANSWER), answer(engine, prompt, ANSWER)]
        engine.cache.evict(ALL_PAGES)
        results.append(answer(engine, prompt, ANSWER))
        same = all(result.token_ids == exact for result in results)
        results.append(answer(engine, [*prompt, *exact, *turn], ANSWER))
        computed = [result.prefix.computed_tokens for result in results]
        rows.append((f"{block}, {budget:,}", *computed, "yes" if same else "no"))
        engine.close()
    yield f"prompt tokens computed; the prompt has {prompt_tokens:,}, its next turn {TURN} more"
    yield from aligned(rows)
