"""Requests from a JSONL file: one JSON object a line, in order of arrival.

| field | content |
| --- | --- |
| `prompt` | text, a list of token ids, or the messages of a chat |
| `messages` | the same, messages |
| `tokens`, `prompt_tokens` | the same, token ids |
| `tools` | optional, with messages: JSON schemas of functions |
| `output` or `completion` | optional: the answer, text or token ids |
| `session` | optional: a string or a number; turns of one session follow each other |
| `turn`, `arrival` | optional: a whole number from 0; seconds |

Other fields, null fields and empty lines are ignored.
"""

import json
from collections.abc import Callable, Iterator, Sequence
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
    path: str | Path, tokenize: Tokenize | None = None, vocab_size: int = 1 << 31
) -> Iterator[Request]:
    """Yield the requests of a file. Without an output the answer is empty.

    Args:
        tokenize: tokenizes text and chats; without it they are errors.
        vocab_size: token ids lie in [0, vocab_size).

    Raises:
        ValueError: a line is not a request, or out of order, or the file has none; the message
            names file, line and remedy.
    """
    index = -1
    latest: dict[tuple[str, int | str | None], float] = {}
    for index, (number, row) in enumerate(rows(path)):
        try:
            request = _request(row, index, tokenize, vocab_size)
            _check_order(row, request, latest)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        yield request
    if index < 0:
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


def _check_order(
    row: dict[str, Any], request: Request, latest: dict[tuple[str, int | str | None], float]
) -> None:
    """Raise ValueError for a request out of order. latest: values so far, by field and session."""
    for field, session, now, of in (
        ("arrival", None, request.arrival, ""),
        ("turn", request.session, request.turn, " of its session"),
    ):
        if row.get(field) is None:
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


def _request(row: dict[str, Any], index: int, tokenize: Tokenize | None, vocab: int) -> Request:
    field = _one_of(row, PROMPT_FIELDS)
    if field is None:
        names = ", ".join(f"`{name}`" for name in PROMPT_FIELDS)
        raise ValueError(f"there is no prompt: add one of the fields {names}")
    if field not in ("prompt", "messages") and isinstance(row[field], str):
        raise ValueError(f"`{field}` is text: give token ids, or name the field `prompt`")
    tools = _checked(row, "tools", list[dict], None)
    session = _checked(row, "session", str | _NUMBER, index)
    arrival = float(_checked(row, "arrival", _NUMBER, index))
    turn = _checked(row, "turn", _NUMBER, 0)
    if turn < 0 or turn != int(turn):
        raise ValueError(f"`turn` is {turn:g}: give a whole number from 0 on, or leave it out")
    tokens, message_starts = _tokens(field, row[field], tokenize, vocab, tools)
    if not len(tokens):
        raise ValueError(f"`{field}` is empty: give at least one token, or remove the line")
    output = tokens[:0]
    if (answer := _one_of(row, OUTPUT_FIELDS)) is not None:
        output, _ = _tokens(answer, row[answer], tokenize, vocab)
    return Request(tokens, output, session, int(turn), arrival, message_starts)


def _checked(row: dict[str, Any], field: str, hint: Any, default: Any) -> Any:
    """Return the value of a field, or the default for null. Raise ValueError for another type."""
    if (value := row.get(field)) is None:
        return default
    check_field(f"`{field}`", value, hint)
    return value


def _one_of(row: dict[str, Any], names: Sequence[str]) -> str | None:
    """Find the only field of `names` that is not null. Raise ValueError if there are several."""
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
    """Return int32 [n], the token ids of text, a chat or a list, and likely junctions of a chat."""
    starts: Sequence[int] = ()
    is_answer = field in OUTPUT_FIELDS
    # An answer is no chat: rendered as one, it would end with the header of the next answer.
    is_chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if isinstance(value, str) or (is_chat and not is_answer):
        if tokenize is None:
            raise ValueError(f"`{field}` is text, and there is no tokenizer: give token ids")
        check_text(f"`{field}`", json.dumps(value, ensure_ascii=False))
        try:
            value, starts = tokenize(value, tools=tools, is_answer=is_answer)
        except TypeError as error:  # of a message
            raise ValueError(str(error)) from error
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        text = json.dumps(value)
        text = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"`{field}` is {text}: give text, or a flat list of token ids")
    if value and not 0 <= min(value) <= max(value) < vocab:
        wrong = next(token for token in value if not 0 <= token < vocab)
        raise ValueError(
            f"`{field}` has the token id {wrong}, ids go from 0 to {vocab - 1}: "
            f"tokenize it with this model's tokenizer"
        )
    return np.array(value, dtype=np.int32), tuple(starts)
