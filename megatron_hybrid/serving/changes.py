"""What is left out of requests, or moved in them, so that agents are served and reuse prefixes.

Each change is said in the answer's header X-Request-Changes and in the log, and by /cache/explain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]
HEADER = "X-Request-Changes"
IMAGE_LEFT_OUT = "[An image was left out: this model reads texts alone.]"
_MAX_HEADER = 2048
_MAX_LINE = 200
_BILLING = re.compile(r"x-anthropic-billing-header:\s*cc_\w+=", re.IGNORECASE)
_NOW = r"current|today'?s|today|local|present|utc|now|time is"
_TIME = "date|time|datetime|timestamp"
_LABEL = re.compile(
    r"[\W_]*(?:"
    rf"(?=.{{0,40}}?(?<![a-z])(?:{_NOW})(?![a-z]))"
    rf"(?:(?:the|it|is|in|and|{_TIME}|{_NOW})(?![a-z])[\W_]*)+"
    rf"|(?:{_TIME})\s*[:=](?=.*:\d\d:\d\d)"  # seconds: no time of a plan
    r")?",
    re.IGNORECASE,
)
"""What may stand before a time for it to be that of the request: words for the present."""
_FENCE = re.compile(r"(`{3,})[^`]*|(~{3,}).*")
_CLOCK = re.compile(r"(?<![\d:+-])\d{1,2}:\d{2}")
"""A time of day, not the end of another one or its distance from UTC."""
_ZONE = re.compile(r"\([\w/+: ,-]+\)")
_ID = re.compile(
    r"\W*(?:request|message|trace|turn|run)[ _-]?id\s*[:=]\W*(?=(?:[\w.-]*\d){4})[\w.-]{8,}\W*",
    re.IGNORECASE,
)
_DATE = re.compile(r"\d{4}-\d\d-\d\dT?")
_WORDS = re.compile(r"\w[\w/]*")
_TIME_WORD = re.compile(
    r"\d+(?:st|nd|rd|th|Z)?|\d+(?:/\d+)+|\d+T\d+|[TZ]|[AaPp][Mm]|[A-Z]{2,5}\d*|[A-Z][a-z]+/[A-Z][A-Za-z_/]+|at|on|of"
    r"|(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
    r"|(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*"
)


def header_of(changes: Sequence[str]) -> dict[str, str]:
    """The header of an answer; none if nothing was changed."""
    text = re.sub(r"[^ -~]", "?", "; ".join(dict.fromkeys(changes)))
    return {HEADER: text[:_MAX_HEADER]} if text else {}


def with_steady_start(messages: Sequence[Json]) -> tuple[list[Json], list[str]]:
    """Return messages whose instructions begin alike in all requests of a conversation, and the
    changes.

    Of the first messages, as long as they are the system's, lines that differ in each request are
    taken out: a billing line of Claude Code is left out; a line that is nothing but the present
    time of day, or an id of the request, moves to the end of the last message, the newest, if that
    is the user's or a tool's. Lines in a block of code stay.
    """
    found, moved, changes = list(messages), [], []
    last = found[-1]
    content = last.get("content")
    can_move = last.get("role") in ("user", "tool") and isinstance(content, str | list)
    for index, message in enumerate(found):
        given = message.get("content")
        if message.get("role") != "system" or not isinstance(given, str | list):
            break
        kept = []
        for part in [{"text": given}] if isinstance(given, str) else given:
            lines = []
            for line, is_code in _lines(part["text"]):
                if not is_code and _BILLING.match(line):
                    changes.append("left out a billing line of the system's message")
                elif not is_code and can_move and _changes_each_time(line):
                    moved.append(line)
                else:
                    lines.append(line)
            kept.append({**part, "text": "\n".join(lines)})
        found[index] = {**message, "content": kept[0]["text"] if isinstance(given, str) else kept}
    if moved:
        text = "\n\n" + "\n".join(moved)
        added = text if isinstance(content, str) else [{"type": "text", "text": text}]
        found[-1] = {**last, "content": content + added}
        changes.append("moved a line that changes in each request to the last message")
    return found, changes


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a text in Markdown, and whether each is in a block of code: between
    fences, or indented after a blank line."""
    fence, is_indented, was_blank = "", False, True
    for line in text.split("\n"):
        words = line.strip()
        mark = _FENCE.fullmatch(words)
        is_indented = line.startswith(("    ", "\t")) and (was_blank or is_indented)
        was_blank = not words
        yield line, bool(fence or mark or is_indented)
        if fence:
            fence = "" if words.startswith(fence) and not words.strip(fence[0]) else fence
        elif mark and not is_indented:
            fence = mark[1] or mark[2]


def _changes_each_time(line: str) -> bool:
    """Return whether a line is nothing but the present time of day, or an id of a request."""
    if len(line) > _MAX_LINE:
        return False
    if _ID.fullmatch(line):
        return True
    line = re.sub(r"</?\w+>", " ", _ZONE.sub("", line))
    label = _LABEL.match(line)
    value = line[label.end() :]
    if len(_CLOCK.findall(value)) != 1 or not (
        label[0].strip(" -*#") or _DATE.match(value.strip())
    ):
        return False
    return all(map(_TIME_WORD.fullmatch, _WORDS.findall(value)))
