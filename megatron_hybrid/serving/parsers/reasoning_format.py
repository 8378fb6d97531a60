"""ReasoningFormat: how models write their reasoning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks around reasoning."""

    open: str
    close: str
    always: bool = False
    """Every answer begins inside of reasoning, also where the prompt does not open it."""


TAGS = ReasoningFormat("<think>", "</think>")
STYLES = {
    "cohere_command4": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "deepseek_v3": TAGS,
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "glm45": TAGS,
    "kimi_k2": TAGS,
    "minimax_m2": TAGS,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_v3": TAGS,
    "olmo3": TAGS,
    "qwen3": TAGS,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}
"""Formats by their names for `--reasoning-parser`."""


def thoughts_of(template: str) -> ReasoningFormat | None:
    """Return the format that a chat template shows; None: its model has no reasoning."""
    return next((each for each in (TAGS, *STYLES.values()) if each.open.strip() in template), None)
