"""`megatron-hybrid chat`: a conversation in the terminal, and what each turn reused."""

from collections.abc import Callable, Iterator

from megatron_hybrid.inference.engine import DynamicInferenceEngine
from megatron_hybrid.inference.requests.request import GenerationResult
from megatron_hybrid.inference.sampling_params import SamplingParams

HELP = """\
/system TEXT  begin anew, with TEXT as the instructions to the model
/reset        begin anew, with the same instructions; the cache stays
/stats        show what the cache holds and has saved
/help         show this list
Ctrl-C ends an answer, Ctrl-D the conversation.
"""


def banner(engine: DynamicInferenceEngine, name: str) -> str:
    """Return the lines at the head of a conversation with the model of this name."""
    stats = engine.stats()
    return (
        f"{name}: the cache has {stats['pool_bytes'] >> 20:,} MiB, room for "
        f"{stats['pool_tokens']:,} tokens.\nType a message, or /help. Ctrl-D ends.\n"
    )


def chat(
    engine: DynamicInferenceEngine,
    questions: Iterator[str],
    params: SamplingParams,
    write: Callable[[str], None],
) -> None:
    """Answer one question after the other, each with all that was said before.

    Args:
        engine: has a tokenizer with a chat template.
        questions: those of the user. An empty one is left out, and one that begins with "/" is a
            command of `HELP`.
        write: gets the pieces of text to show.
    """
    instructions: list[dict[str, str]] = []
    messages: list[dict[str, str]] = []
    for question in questions:
        if not question.strip():
            continue
        command, _, text = question.strip().partition(" ")
        if command in ("/system", "/reset"):
            if command == "/system":
                instructions = [{"role": "system", "content": text.strip()}] if text else []
            messages = [*instructions]
            write("A new conversation begins.\n")
        elif command == "/stats":
            write(f"{engine.stats()}\n")
        elif command == "/help":
            write(HELP)
        elif command.startswith("/"):
            write(f"There is no command {command}.\n{HELP}")
        else:
            _answer(engine, messages, question, params, write)


def _answer(
    engine: DynamicInferenceEngine,
    messages: list[dict[str, str]],
    question: str,
    params: SamplingParams,
    write: Callable[[str], None],
) -> None:
    """Answer one question, and add both to the messages."""
    asked = [*messages, {"role": "user", "content": question}]
    try:
        outputs = engine.stream(asked, params)
    except (TypeError, ValueError) as error:  # such as a conversation that has grown too long
        write(f"{error}\n")
        return
    pieces = []
    try:
        for output in outputs:
            pieces.append(output.text)
            write(output.text)
    except KeyboardInterrupt:  # what has been said stays
        outputs.close()
        messages[:] = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        write("\n[ended]\n")
        return
    messages[:] = [*asked, {"role": "assistant", "content": output.result.text or ""}]
    write(f"\n{reuse_of(output.result)}\n")


def reuse_of(result: GenerationResult) -> str:
    """Return the line below an answer: what its prompt reused."""
    prefix, seconds = result.prefix, result.time_to_first_token
    reason = f", {prefix.miss_reason.value}" if prefix.miss_reason else ""
    fetched = f", {prefix.fetched_tokens:,} of them fetched" if prefix.fetched_tokens else ""
    return (
        f"[{prefix.prompt_tokens:,} prompt tokens, {prefix.shared_tokens:,} shared, "
        f"{prefix.skipped_tokens:,} skipped{fetched}{reason}; first token after "
        f"{seconds * 1e3:.0f} ms]"
    )


def typed_lines() -> Iterator[str]:
    """Yield typed lines, until the end of the input."""
    while True:
        try:
            yield input("> ")
        except EOFError:
            return
