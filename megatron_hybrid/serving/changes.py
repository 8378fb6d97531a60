"""What is left out of requests, or moved in them, so that agents are served and reuse prefixes.

Each change is said in the answer's header X-Request-Changes, in the log, and by /cache/explain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
HEADER = "X-Request-Changes"
_MAX_HEADER = 2048
IMAGE_LEFT_OUT = "[An image was left out: this model reads texts alone.]"
_MAX_LINE = 200
_BILLING = re.compile(r"x-anthropic-billing-header:", re.IGNORECASE)
_LABEL = re.compile(r"\W*[A-Za-z][A-Za-z'_/ -]{0,60}(?:[:=]|\bis\b)|\W*")
_CLOCK = re.compile(r"\d{1,2}:\d{2}")
_ID = re.compile(r"\W*(?:request|message|trace|turn|run)[ _-]?id\W+[\w.-]{6,}\W*", re.IGNORECASE)
_NAMES_TIME = re.compile(r"time|date|now|clock|today|\d{4}-\d\d-\d\d|\d [AP]M\b", re.IGNORECASE)
_WORDS = re.compile(r"\w[\w/]*")
_TIME_WORD = re.compile(
    r"\d+(?:st|nd|rd|th|Z)?|\d+T\d+|[TZ]|[AaPp][Mm]|[A-Z]{2,5}|[A-Z][a-z]+/[A-Z][A-Za-z_/]+|at|on|of"
    r"|(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
    r"|(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]*"
)


def header_of(changes: Sequence[str]) -> dict[str, str]:
    """The header of an answer; none if nothing was changed."""
    text = re.sub(r"[^ -~]", "?", "; ".join(dict.fromkeys(changes)))
    return {HEADER: text[:_MAX_HEADER]} if text else {}


def with_steady_start(messages: Sequence[Json]) -> tuple[list[Json], list[str]]:
    """Messages whose instructions begin alike in all requests of a conversation, and the changes.

    Of the first messages, as long as they are the system's, lines that differ in each request are
    taken out: a billing line of Claude Code is left out; a line that is nothing but a time of day,
    or an id of the request, moves to the end of the last message, the newest.
    """
    found, moved, changes = list(messages), [], []
    for index, message in enumerate(found):
        content = message.get("content")
        if message.get("role") != "system" or not isinstance(content, str):
            break
        kept = []
        for line in content.split("\n"):
            if _BILLING.match(line):
                changes.append("left out a billing line of the system's message")
            elif len(line) <= _MAX_LINE and _changes_each_time(line):
                moved.append(line)
            else:
                kept.append(line)
        found[index] = {**message, "content": "\n".join(kept)}
    last = found[-1]
    if moved and last.get("role") in ("user", "tool") and isinstance(last.get("content"), str):
        found[-1] = {**last, "content": "\n\n".join((last["content"], "\n".join(moved)))}
        changes.append("moved a line that changes in each request to the last message")
    elif moved:
        return list(messages), []
    return found, changes


def _changes_each_time(line: str) -> bool:
    """Return whether a line is nothing but a time of day with a label, or an id of a request."""
    if _ID.fullmatch(line):
        return True
    label = _LABEL.match(line)
    if not _CLOCK.search(line, label.end()) or not _NAMES_TIME.search(line):
        return False
    return all(map(_TIME_WORD.fullmatch, _WORDS.findall(line, label.end())))
