"""Chooses the dialect that a model writes: by name, or by its chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.serving.parsers import (
    gemma,
    harmony,
    json_dialects,
    pythonic,
    tagged_parameters,
)
from megatron_hybrid.serving.parsers.answer_parser import AnswerParser
from megatron_hybrid.serving.parsers.dialect import Dialect, ReasoningFormat

TOOL_PARSERS: dict[str, Dialect] = {
    "cohere_command4": json_dialects.COHERE,
    "deepseek_v3": json_dialects.DEEPSEEK_V3,
    "deepseek_v31": json_dialects.DEEPSEEK_V31,
    "deepseek_v32": tagged_parameters.DEEPSEEK_V32,
    "deepseek_v4": tagged_parameters.DEEPSEEK_V4,
    "ernie45": json_dialects.HERMES,
    "functiongemma": gemma.FUNCTIONGEMMA,
    "gemma4": gemma.GEMMA4,
    "glm45": tagged_parameters.GLM45,
    "glm47": tagged_parameters.GLM45,
    "granite": json_dialects.GRANITE,
    "granite4": json_dialects.HERMES,
    "hermes": json_dialects.HERMES,
    "hunyuan_a13b": json_dialects.JAMBA,
    "jamba": json_dialects.JAMBA,
    "kimi_k2": json_dialects.KIMI_K2,
    "lfm2": pythonic.LFM2,
    "llama3_json": json_dialects.LLAMA3_JSON,
    "llama4_json": json_dialects.LLAMA4_JSON,
    "llama4_pythonic": pythonic.LLAMA4_PYTHONIC,
    "minimax_m1": json_dialects.MINIMAX_M1,
    "minimax_m2": tagged_parameters.MINIMAX_M2,
    "mistral": json_dialects.MISTRAL,
    "mistral_names": json_dialects.MISTRAL_NAMES,
    "nemotron_json": json_dialects.NEMOTRON_JSON,
    "olmo3": pythonic.OLMO3,
    "openai": harmony.OPENAI,
    "phi4_mini": json_dialects.PHI4_MINI,
    "pythonic": pythonic.PYTHONIC,
    "qwen3_coder": tagged_parameters.QWEN3_CODER,
    "qwen3_xml": tagged_parameters.QWEN3_CODER,
    "seed_oss": tagged_parameters.SEED_OSS,
    "step3": tagged_parameters.STEP3,
    "xlam": json_dialects.XLAM,
}
"""Dialects by their names for `--tool-call-parser`."""
TAGS = ReasoningFormat("<think>", "</think>")
REASONING_PARSERS: dict[str, ReasoningFormat | None] = {
    "cohere_command4": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "deepseek_v3": TAGS,
    "gemma4": ReasoningFormat("<|channel>thought\n", "<channel|>"),
    "glm45": TAGS,
    "kimi_k2": TAGS,
    "minimax_m2": TAGS,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_v3": TAGS,
    "none": None,
    "olmo3": TAGS,
    "openai_gptoss": harmony.THOUGHTS,
    "qwen3": TAGS,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}
"""Formats by their names for `--reasoning-parser`."""
_JSON_SIGN = '"parameters": dictionary of argument'
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>",)),
    ("cohere_command4", ("<|START_ACTION|>",)),
    ("step3", ("<steptml:invoke",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),  # noqa: RUF001
    ("deepseek_v31", ("<｜tool▁sep｜>",)),  # noqa: RUF001
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),  # noqa: RUF001
    ("deepseek_v32", ("｜DSML｜",)),  # noqa: RUF001
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("mistral_names", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm45", ("<arg_key>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("olmo3", ("<function_calls>",)),
    ("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    ("jamba", ("<tool_calls>",)),
    ("phi4_mini", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("llama4_json", ("<|header_start|>", _JSON_SIGN)),
    ("llama4_pythonic", ("<|header_start|>",)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", (_JSON_SIGN,)),
)
"""Parsers of calls, each with texts of its chat templates. The first that has all counts."""


@dataclass(frozen=True)
class Style:
    """How a model writes its answers."""

    dialect: Dialect
    thoughts: ReasoningFormat | None

    def parser(self, tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> AnswerParser:
        """Return the parser of one answer. `AnswerParser` describes the arguments."""
        kind = harmony.HarmonyParser if self.dialect is harmony.OPENAI else AnswerParser
        return kind(self.dialect, self.thoughts, tools, **options)

    @property
    def marks(self) -> list[str]:
        """Marks that may be special tokens, and have to be seen."""
        given = [self.dialect.begin, self.dialect.end, *self.dialect.inner, *self.dialect.unsaid]
        return [*given, self.thoughts.open, self.thoughts.close] if self.thoughts else given


def shown_tool_parser(template: str) -> str:
    """Find the name of the parser of calls that a chat template shows."""
    return next((name for name, texts in _SIGNS if all(t in template for t in texts)), "hermes")


def style_of(template: str | None, tool_parser: str = "", reasoning_parser: str = "") -> Style:
    """Return the style by the names of parsers or, where a name is empty, by the chat template. A
    template that shows no calls is taken for Hermes's.

    Raises:
        ValueError: a name is unknown.
    """
    template = template or ""
    for option, name, known in (
        ("tool-call", tool_parser, TOOL_PARSERS),
        ("reasoning", reasoning_parser, REASONING_PARSERS),
    ):
        if name and name not in known:
            names = ", ".join(sorted(known))
            raise ValueError(f"--{option}-parser {name} is unknown: use one of {names}")
    dialect = TOOL_PARSERS[tool_parser or shown_tool_parser(template)]
    if reasoning_parser:
        return Style(dialect, REASONING_PARSERS[reasoning_parser])
    if dialect is harmony.OPENAI:
        return Style(dialect, harmony.THOUGHTS)
    formats = filter(None, (TAGS, *REASONING_PARSERS.values()))
    return Style(dialect, next((each for each in formats if each.open.strip() in template), None))
