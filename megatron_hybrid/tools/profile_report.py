"""The report of a profile, in tables."""

from textwrap import wrap

import numpy as np

from megatron_hybrid.tools.profile import Profile
from megatron_hybrid.tools.rates import WIDTH
from megatron_hybrid.utils.tables import size, table

_BAR = 24
_NOTE = (
    "The first caches are models of other engines' documented rules (LRU, one pool for KV and "
    "states), not measurements of the engines:"
)


def render(result: Profile) -> str:
    """Format a profile as plain text."""
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
