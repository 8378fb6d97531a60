"""Parsers of answers: text in pieces -> content, reasoning, and calls of functions.

One file a form of calls; `choice` finds the one of a model, `answer_parser` cuts its answers.
"""

from megatron_hybrid.serving.parsers.answer_parser import AnswerParser
from megatron_hybrid.serving.parsers.choice import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Style,
    shown_tool_parser,
    style_of,
)
from megatron_hybrid.serving.parsers.dialect import (
    AnswerPart,
    Content,
    Reasoning,
    ReasoningFormat,
    ToolCall,
)

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "AnswerParser",
    "AnswerPart",
    "Content",
    "Reasoning",
    "ReasoningFormat",
    "Style",
    "ToolCall",
    "shown_tool_parser",
    "style_of",
]
