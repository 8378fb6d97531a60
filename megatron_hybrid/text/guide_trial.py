"""The process that reads each guide first.

llguidance bounds most of what a guide may cost, but not all: some small schemas take it minutes,
and deep ones end its process. Here that ends a process which has no other work, and the guide is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_hybrid.utils.limited_process import LimitedProcess, TooMuchWorkError, answer_all


def library() -> Any:
    """Return llguidance.

    Raises:
        ImportError: it is missing.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ImportError("guided answers need llguidance: pip install '.[serve]'") from error
    return llguidance


def limits() -> Any:
    """Return what llguidance itself bounds: the work of a compilation, and that of one token."""
    return library().LLParserLimits(
        max_items_in_row=2100,  # four for each of `guide_schema.MAX_OPTIONAL` properties
        initial_lexer_fuel=1_000_000,
        max_lexer_states=10_000,  # of one answer
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


_process = LimitedProcess(__name__)


def error_of(grammar: str) -> str:
    """Return why llguidance cannot use a grammar; an empty text if it can."""
    library()
    try:
        return _process.ask(grammar)
    except TooMuchWorkError as error:
        return f"{error} to compile, or is too deep: use fewer patterns, properties and references"


class _Bytes:
    """Stands for a tokenizer, whose tokens are single bytes."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = ()
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff[end]")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _trial() -> Callable[[str], str]:
    """What tries one grammar."""
    llguidance = library()
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=257)

    def answer(grammar: str) -> str:
        _, said = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, None, limits=limits()
        )
        if said:
            return said[0]
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        return matcher.get_error() or ""

    return answer


if __name__ == "__main__":
    answer_all(_trial())
