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

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_hybrid.tools.replay.request import Request
from megatron_hybrid.validation import check_text

PROMPT_FIELDS = ("prompt", "messages", "tokens", "prompt_tokens")
OUTPUT_FIELDS = ("output", "completion")


class Tokenize(Protocol):
    """A function that returns token ids, and likely junctions with other chats in them."""

    def __call__(
        self, text: str | list, *, tools: list[dict] | None, is_answer: bool
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Tokenize a prompt's text, the messages of a chat with the schemas of its tools, or an
        answer, which continues other tokens."""


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
    count = 0
    latest: dict[tuple[str, int | str | None], float] = {}
    for number, row in rows(path):
        if count == limit:
            return
        try:
            request = _request(row, count, tokenize, vocab_size)
            _check_order(row, request, latest)
            yield request
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
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


def _check_order(
    row: dict[str, Any], request: Request, latest: dict[tuple[str, int | str | None], float]
) -> None:
    """Check that a line is in order. latest: values so far, by field and session."""
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
    field, prompt = _one_of(row, PROMPT_FIELDS)
    if field is None:
        names = ", ".join(f"`{name}`" for name in PROMPT_FIELDS)
        raise ValueError(f"there is no prompt: add one of the fields {names}")
    if field not in ("prompt", "messages") and isinstance(prompt, str):
        raise ValueError(f"`{field}` is text: give token ids, or name the field `prompt`")
    tools = row.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError(
            f"`tools` is {_shown(tools)}: give a list of JSON schemas, or leave it out"
        )
    tokens, message_starts = _tokens(field, prompt, tokenize, vocab, tools)
    if not len(tokens):
        raise ValueError(f"`{field}` is empty: give at least one token, or remove the line")
    output_field, output = _one_of(row, OUTPUT_FIELDS)
    session = row.get("session")
    if session is None:
        session = index
    if isinstance(session, bool) or not isinstance(session, (str, int, float)):
        raise ValueError(f"`session` is {session!r}: give a string or a number, or leave it out")
    turn = _number(row, "turn", 0)
    if turn < 0 or turn != int(turn):
        raise ValueError(f"`turn` is {turn:g}: give a whole number from 0 on, or leave it out")
    return Request(
        tokens,
        _tokens(output_field, output, tokenize, vocab)[0] if output_field else tokens[:0],
        session,
        int(turn),
        float(_number(row, "arrival", index)),
        message_starts,
    )


def _one_of(row: dict[str, Any], names: Sequence[str]) -> tuple[str | None, Any]:
    """The only field of `names` that is not null, and its value."""
    found = [name for name in names if row.get(name) is not None]
    if len(found) > 1:
        raise ValueError(f"both `{found[0]}` and `{found[1]}` are given: keep one of them")
    return (found[0], row[found[0]]) if found else (None, None)


def _tokens(
    field: str,
    value: Any,
    tokenize: Tokenize | None,
    vocab: int,
    tools: list[dict] | None = None,
) -> tuple[np.ndarray, tuple[int, ...]]:
    """int32 [n] of text, a chat or a list of ids; likely junctions of a chat."""
    starts: Sequence[int] = ()
    is_chat = isinstance(value, list) and value and isinstance(value[0], dict)
    is_answer = field in OUTPUT_FIELDS
    # An answer is no chat: rendered as one, it would end with the header of the next answer.
    if isinstance(value, str) or (is_chat and not is_answer):
        if tokenize is None:
            raise ValueError(f"`{field}` is text, and there is no tokenizer: give token ids")
        check_text(f"`{field}`", json.dumps(value, ensure_ascii=False))
        try:
            value, starts = tokenize(value, tools=tools, is_answer=is_answer)
        except TypeError as error:  # of a message
            raise ValueError(str(error)) from error
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(f"`{field}` is {_shown(value)}: give text, or a flat list of token ids")
    if value and not 0 <= min(value) <= max(value) < vocab:
        wrong = next(token for token in value if not 0 <= token < vocab)
        raise ValueError(
            f"`{field}` has the token id {wrong}, ids go from 0 to {vocab - 1}: "
            f"tokenize it with this model's tokenizer"
        )
    return np.array(value, dtype=np.int32), tuple(starts)


def _number(row: dict[str, Any], field: str, default: float) -> float:
    value = row.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{field}` is {value!r}: give a number, or leave it out")
    if not abs(value) <= sys.float_info.max:  # JSON in Python has NaN, Infinity and 1e999
        raise ValueError(f"`{field}` is {_shown(value)}: give a finite number, or leave it out")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
