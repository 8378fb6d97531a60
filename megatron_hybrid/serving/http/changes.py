"""Parts of requests that are left out, or moved, so that agents are served and reuse prefixes.

The answer's header X-Request-Changes, the log and /cache/explain name each change.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]
HEADER = "X-Request-Changes"
IMAGE_LEFT_OUT = "[An image was left out: this model reads texts alone.]"
_MAX_HEADER = 2048
_MAX_LINE = 200
_MAX_TEXT = 1 << 20
"""Most characters of instructions in which lines are examined."""
_BILLING = re.compile(r"x-anthropic-billing-header:\s*cc_\w+=", re.IGNORECASE)
_NOW = {"current", "today", "local", "present", "is"}
_TIME = {"date", "time", "datetime", "timestamp"}
_SAYS = {*_NOW, *_TIME, "now", "currently", "the", "it", "in", "and", "s"}
"""Words that may stand with a time for it to be that of the request."""
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
_ANNOUNCES = re.compile(
    r"\b(?:(?:example|sample|suppose|assume|answer|repl|respon|output|write|say|print|format)[^.!?]*:"
    r"|(?:with|like|as|by|say|write|print|output|follows|example))[^\w.!?]*$",
    re.IGNORECASE,
)
"""The end of a line that announces an example, or the form of an answer."""


def header_of(changes: Sequence[str]) -> dict[str, str]:
    """Return the header that names the changes; an empty dict if there are none."""
    text = re.sub(r"[^ -~]", "?", "; ".join(dict.fromkeys(changes)))
    return {HEADER: text[:_MAX_HEADER]} if text else {}


def with_steady_start(messages: Sequence[Json]) -> tuple[list[Json], list[str]]:
    """Return messages whose instructions begin alike in all requests of a conversation, and the
    changes.

    The system's messages at the start lose the lines that differ in each request: a billing line of
    Claude Code is left out; a line that gives only the present time of day, or an id of the
    request, moves to the end of the last message, the newest, if that is the user's or a tool's.
    Lines stay that are code, part of an example or of the form of an answer, or next to another
    time or id.
    """
    found, moved, changes = list(messages), [], []
    last = found[-1]
    content = last.get("content")
    can_move = last.get("role") in ("user", "tool") and isinstance(content, str | list)
    left = _MAX_TEXT
    for index, message in enumerate(found):
        given = message.get("content")
        if message.get("role") != "system" or not isinstance(given, str | list):
            break
        kept = []
        parts = [{"text": given}] if isinstance(given, str) else given
        if (left := left - sum(len(part["text"]) for part in parts)) < 0:
            break
        for part in parts:
            lines = []
            for line, is_bare, is_changing in _lines(part["text"]):
                if is_bare and _BILLING.match(line):
                    changes.append("left out a billing line of the system's message")
                elif is_bare and is_changing and can_move:
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


def _lines(text: str) -> Iterator[tuple[str, bool, bool]]:
    """Yield each line of a text in Markdown, whether it is outside of blocks of code (between
    fences, or indented after a blank line), and whether it changes with each request."""
    lines = text.split("\n")
    kinds = [("", False), *map(_kind, lines), ("", False)]
    fence, is_indented, is_announced, was_blank = "", False, False, True
    last_indent, is_sentence, ends = 0, False, False  # of the last line with words
    for index, line in enumerate(lines):
        words = line.strip()
        mark = _FENCE.fullmatch(words)
        is_indented = line.startswith(("    ", "\t")) and (was_blank or is_indented)
        indent = len(line) - len(line.lstrip())
        announces = ends or (is_sentence and indent > last_indent)
        is_announced = announces or (is_announced and not was_blank)
        (last, _), (kind, changes), (following, _) = kinds[index : index + 3]
        is_alone = kind not in (last, following) and not is_announced
        yield line, not (fence or mark or is_indented), changes and is_alone
        was_blank = not words
        if words:
            last_indent, is_sentence = indent, len(words.split()) > 2
            ends = _ANNOUNCES.search(words[-80:]) is not None
        if fence:
            fence = "" if words.startswith(fence) and not words.strip(fence[0]) else fence
        elif mark and not is_indented:
            fence = mark[1] or mark[2]


def _kind(line: str) -> tuple[str, bool]:
    """Return "id" for an id of a request, "time" for what ends with a time of day, else "". Also
    return whether the line says only that, and a time is the present one."""
    if len(line) > _MAX_LINE:
        return "", False
    if _ID.fullmatch(line):
        return "id", True
    line = re.sub(r"</?\w+>", " ", _ZONE.sub("", line))
    value = re.sub(r"^\D*", "", line)
    if len(_CLOCK.findall(value)) != 1 or not all(map(_is_of_time, _WORDS.findall(value))):
        return "", False
    words = _WORDS.findall(line)
    said = {part for word in words for part in word.lower().split("_")} & _SAYS
    is_now = said & {"now", "currently"} or (
        said & _NOW and (said & _TIME or re.search(r"\b\d{4}\b", line))
    )
    # The time of a plan has no seconds.
    is_full = said <= _TIME and re.search(r":\d\d:\d\d" if said else _DATE, value)
    return "time", bool(is_now or is_full) and all(map(_is_of_time, words))


def _is_of_time(word: str) -> bool:
    return bool(_TIME_WORD.fullmatch(word)) or _SAYS.issuperset(word.lower().split("_"))
