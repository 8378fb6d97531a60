"""Requests from a JSONL file: one JSON object a line, in order of arrival.

| field | content |
| --- | --- |
| `prompt` | text, a list of token ids, or the messages of a chat |
| `messages` | the same, messages |
| `tokens`, `prompt_tokens` | the same, token ids |
| `tools` | optional, with messages: JSON schemas of functions |
| `output` or `completion` | if known: the answer, text or token ids |
| `session` | if known: a string or a number; turns of one session follow each other |
| `turn`, `arrival` | if known: a whole number from 0; seconds |

Other fields, null fields and empty lines are ignored.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from megatron_hybrid.tools.replay.protocol import Request
from megatron_hybrid.utils.validation import Range, check_field, check_text

PROMPT_FIELDS = ("prompt", "messages", "tokens", "prompt_tokens")
OUTPUT_FIELDS = ("output", "completion")
_NUMBER = Annotated[float, Range(ge=-1e300, le=1e300)]  # JSON in Python has NaN and 1e999, too

Tokenize = Callable[..., tuple[Sequence[int], Sequence[int]]]
"""(text or messages, tools=schemas of functions, is_answer=whether it continues other tokens) ->
token ids, and likely junctions with other chats in them."""


def load_jsonl(
    path: str | Path,
    limit: int | None = None,
    tokenize: Tokenize | None = None,
    vocab_size: int = 1 << 31,
) -> Iterator[Request]:
    """Yield the requests of a file. Without an output the answer is empty.

    Args:
        limit: most requests to read.
        tokenize: for text and chats; None: they are errors.
        vocab_size: token ids lie in [0, vocab_size).

    Raises:
        ValueError: a line is not a request, or out of order, or there is none; the message names
            file, line and remedy.
    """
    for line in read_lines(path, limit):
        with errors_name(line.place):
            request = _request(line, tokenize, vocab_size)
        yield request


@dataclass(frozen=True, eq=False)
class Line:
    """One request of a file, checked but for its prompt and its answer."""

    place: str
    """File and number of the line."""
    row: dict[str, Any]
    prompt_field: str
    """Name of the field with the prompt."""
    prompt: Any
    output_field: str | None
    output: Any
    """None: not known."""
    session: int | str
    turn: int
    arrival: float


@contextmanager
def errors_name(place: str) -> Iterator[None]:
    """Context that puts a place before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def read_lines(path: str | Path, limit: int | None = None) -> Iterator[Line]:
    """Yield the lines of a file, their texts and chats as they are.

    Raises:
        ValueError: as `load_jsonl`, but for prompts and answers.
    """
    count = 0
    latest: dict[tuple[str, int | str | None], float] = {}
    for number, row in rows(path):
        if count == limit:
            return
        place = f"{path}, line {number}"
        with errors_name(place):
            line = _line(place, row, count)
            _check_order(line, latest)
        yield line
        count += 1
    if not count:
        raise ValueError(f"{path} has no requests: write one JSON object a line, with `prompt`")


def rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers from 1, and the objects of a JSONL file.

    Raises:
        ValueError: a line is not a JSON object, or the file is not text or cannot be read.
    """
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:  # without a byte order mark
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _object(line, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {number}: {error}; save it as UTF-8 text") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): name a JSONL file") from error


def _check_order(line: Line, latest: dict[tuple[str, int | str | None], float]) -> None:
    """Check that a line is in order. latest: values so far, by field and session."""
    for field, session, now, of in (
        ("arrival", None, line.arrival, ""),
        ("turn", line.session, line.turn, " of its session"),
    ):
        if line.row.get(field) is None:
            continue
        before = latest.get((field, session), now)
        if now < before:
            raise ValueError(
                f"`{field}` is {now:g}, after {before:g}{of}: write the lines in order of arrival"
            )
        latest[field, session] = now


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place} is no JSON ({error}): write one object a line, without line breaks in it"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is a {type(row).__name__}: write an object with a `prompt`")
    return row


def _line(place: str, row: dict[str, Any], index: int) -> Line:
    prompt_field = _one_of(row, PROMPT_FIELDS)
    if prompt_field is None:
        names = ", ".join(f"`{name}`" for name in PROMPT_FIELDS)
        raise ValueError(f"there is no prompt: add one of the fields {names}")
    if prompt_field not in ("prompt", "messages") and isinstance(row[prompt_field], str):
        raise ValueError(f"`{prompt_field}` is text: give token ids, or name the field `prompt`")
    _checked(row, "tools", list[dict], None)
    session = _checked(row, "session", str | _NUMBER, index)
    arrival = float(_checked(row, "arrival", _NUMBER, index))
    turn = _checked(row, "turn", _NUMBER, 0)
    if turn < 0 or turn != int(turn):
        raise ValueError(f"`turn` is {turn:g}: give a whole number from 0 on, or leave it out")
    output_field = _one_of(row, OUTPUT_FIELDS)
    fields = prompt_field, row[prompt_field], output_field, row.get(output_field)
    return Line(place, row, *fields, session, int(turn), arrival)


def _checked(row: dict[str, Any], field: str, hint: Any, default: Any) -> Any:
    """The value of a field, if it is not null. Raises ValueError if its annotation is another."""
    if (value := row.get(field)) is None:
        return default
    check_field(f"`{field}`", value, hint)
    return value


def _request(line: Line, tokenize: Tokenize | None, vocab: int) -> Request:
    field, tools = line.prompt_field, line.row.get("tools")
    tokens, message_starts = _tokens(field, line.prompt, tokenize, vocab, tools)
    if not len(tokens):
        raise ValueError(f"`{field}` is empty: give at least one token, or remove the line")
    output = tokens[:0]
    if line.output_field is not None:
        output, _ = _tokens(line.output_field, line.output, tokenize, vocab)
    return Request(tokens, output, line.session, line.turn, line.arrival, message_starts)


def _one_of(row: dict[str, Any], names: Sequence[str]) -> str | None:
    """The only field of `names` that is not null."""
    found = [name for name in names if row.get(name) is not None]
    if len(found) > 1:
        raise ValueError(f"both `{found[0]}` and `{found[1]}` are given: keep one of them")
    return found[0] if found else None


def _tokens(
    field: str,
    value: Any,
    tokenize: Tokenize | None,
    vocab: int,
    tools: list[dict] | None = None,
) -> tuple[np.ndarray, tuple[int, ...]]:
    """int32 [n] of text, a chat or a list of ids; likely junctions of a chat."""
    starts: Sequence[int] = ()
    is_answer = field in OUTPUT_FIELDS
    # An answer is no chat: rendered as one, it would end with the header of the next answer.
    if isinstance(value, str) or (is_chat(value) and not is_answer):
        if tokenize is None:
            raise ValueError(f"`{field}` is text, and there is no tokenizer: give token ids")
        check_text(f"`{field}`", json.dumps(value, ensure_ascii=False))
        try:
            value, starts = tokenize(value, tools=tools, is_answer=is_answer)
        except TypeError as error:  # of a message
            raise ValueError(str(error)) from error
    check_tokens(field, value, vocab)
    return np.array(value, dtype=np.int32), tuple(starts)


def is_chat(value: Any) -> bool:
    """Return whether a prompt is the messages of a chat."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def check_tokens(field: str, value: Any, vocab: int) -> None:
    """Raise ValueError unless a field's value is a list of token ids in [0, vocab)."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"`{field}` is {_shown(value)}: give text, or a flat list of token ids")
    if value and not 0 <= min(value) <= max(value) < vocab:
        wrong = next(token for token in value if not 0 <= token < vocab)
        raise ValueError(
            f"`{field}` has the token id {wrong}, ids go from 0 to {vocab - 1}: "
            f"tokenize it with this model's tokenizer"
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
