"""Thoughts: how models write their reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thoughts:
    """Marks around reasoning."""

    open: str
    close: str
    always: bool = False
    """Every answer begins inside of reasoning, also where the prompt does not open it."""


TAGS = Thoughts("<think>", "</think>")
STYLES = {
    "deepseek_r1": Thoughts("<think>", "</think>", always=True),
    "deepseek_v3": TAGS,
    "gemma4": Thoughts("<|channel>thought\n", "<channel|>"),
    "glm45": TAGS,
    "kimi_k2": TAGS,
    "minimax_m2": TAGS,
    "mistral": Thoughts("[THINK]", "[/THINK]"),
    "nemotron_v3": TAGS,
    "olmo3": TAGS,
    "qwen3": TAGS,
    "seed_oss": Thoughts("<seed:think>", "</seed:think>"),
}
"""By the names of `--reasoning-parser`."""


def thoughts_of(template: str) -> Thoughts | None:
    """As a chat template shows; None: its model has none."""
    return next((each for each in (TAGS, *STYLES.values()) if each.open.strip() in template), None)
