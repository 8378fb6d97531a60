"""`megatron-hybrid chat`: a conversation in the terminal, and what each turn reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.sampling_params import SamplingParams


def chat(
    engine: DynamicInferenceEngine,
    questions: Iterator[str],
    params: SamplingParams,
    write: Callable[[str], None],
) -> None:
    """Answer one question after the other, each with all that was said before.

    Args:
        engine: with a tokenizer that has a chat template.
        questions: of the user; an empty one is left out.
        write: takes the pieces of what is shown.
    """
    messages: list[dict[str, str]] = []
    for question in questions:
        if not question.strip():
            continue
        messages.append({"role": "user", "content": question})
        try:
            outputs = engine.stream(messages, params)
        except (TypeError, ValueError) as error:  # such as a conversation that has grown too long
            write(f"{error}\n")
            messages.pop()
            continue
        for output in outputs:
            write(output.text)
        result = output.result
        messages.append({"role": "assistant", "content": result.generated_text or ""})
        prefix, seconds = result.prefix, result.time_to_first_token
        reason = f" ({prefix.miss_reason.value})" if prefix.miss_reason else ""
        skipped = f"{prefix.skipped_tokens:,} skipped{reason}"
        write(
            f"\n[{prefix.prompt_tokens:,} prompt tokens, {skipped}; first token after "
            f"{seconds * 1e3:.0f} ms]\n"
        )


def typed_lines(prompt: str = "> ") -> Iterator[str]:
    """What is typed, until the end of the input."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
