"""Do models with sliding windows keep their prefix? Ten turns after 4,096 tokens, with a small
model of random weights in Gemma-3's pattern; with the whole history, and with thoughts cut out."""

from collections.abc import Iterator

from benchmarks.questions.common import aligned, answer, engine_of, random_tokens, small_model

SYSTEM, TURNS, USER, ANSWER, THOUGHT, WINDOW = 4096, 10, 40, 20, 10, 1024
PATTERN = "W-W-W-W-W-*-"
"""Five layers with windows to one without, as in Gemma-3."""


def conversation(model, system: int, turns: int, thought: int) -> Iterator[tuple]:
    """Of each turn the prompt, how many tokens of it were computed, and the answer.

    Args:
        thought: tokens at the start of each answer that later prompts leave out.
    """
    engine = engine_of(model)
    history = random_tokens(0, model, system)
    for user in random_tokens(1, model, turns, USER):
        prompt = [*history, *user]
        result = answer(engine, prompt, ANSWER)
        yield prompt, result.prefix.computed_tokens, result.token_ids
        history = [*prompt, *result.token_ids[thought:]]


def run(system: int = SYSTEM, turns: int = TURNS, window: int = WINDOW) -> Iterator[str]:
    """The lines of the table."""
    model = small_model(PATTERN, sliding_window=window)
    chats = [list(conversation(model, system, turns, thought)) for thought in (0, THOUGHT)]
    rows: list[tuple] = [("turn", "prompt", "computed", "prompt", "computed")]
    for number, (whole, cut) in enumerate(zip(*chats, strict=True), 1):
        rows.append((number, len(whole[0]), whole[1], len(cut[0]), cut[1]))
    rows.append(("all", *(sum(row[column] for row in rows[1:]) for column in range(1, 5))))
    yield "      whole history     thoughts cut out"
    yield from aligned(rows)
    alone = engine_of(model, prefix_caching="off")
    same = all(answer(alone, chat[-1][0], ANSWER).token_ids == chat[-1][2] for chat in chats)
    yield f"last answers, and those of a run without a cache: {'the same' if same else 'others'}"
