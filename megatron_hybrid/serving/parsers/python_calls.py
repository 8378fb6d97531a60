"""Calls as programs in Python write them, to JSON."""

import ast
import json
import re
from typing import Any

from megatron_hybrid.serving.parsers.brackets import PYTHON_QUOTES
from megatron_hybrid.serving.parsers.json_text import BETWEEN, value_end

MAX_DEPTH = 64
_MAX_LENGTH, _MAX_COMMAS = 1 << 20, 1 << 16
"""Limits of the memory that Python's parser may need."""
_HEAD = re.compile(r"([^\W\d][\w.-]{0,255})\s*\(")
_TOKENS = re.compile(
    r"""(?P<prefix>\b[rRuU])?(?P<quote>'''|\"\"\"|'|\")(?P<text>(?:\\.|(?!(?P=quote)).)*)(?P=quote)"""
    r"|(?<![\w.])0+(?=[1-9]\d*(?![\w.]))",
    re.DOTALL,
)
_ESCAPES = re.compile(r"\\(.)|[\r\n\0]", re.DOTALL)
_LINES = {"\r": "\\r", "\n": "\\n", "\0": "\\x00"}
_TEXT_ENDS = r"\s*(?:[,)\]}:]|\Z)"
_LOOSE = re.compile(
    rf"(['\"])((?:\\.|(?!\1{_TEXT_ENDS}).)*)\1(?={_TEXT_ENDS})",
    re.DOTALL,
)
_NEXT_ARGUMENT = re.compile(r"['\"]\s*,|,\s*\w+\s*=")
_WORDS = {"true": True, "false": False, "null": None}


def calls(text: str, may_be_cut: bool = False) -> list[tuple[str, str, str]] | None:
    """Return the calls in a list, or one after the other: name, arguments and the whole call, as
    they are written; or None if something else is there, or a call is open.

    may_be_cut: the last call may be open; then it has no name.
    """
    text, found, at = text.strip(), [], 0
    if text.startswith("[") and (may_be_cut or text.endswith("]")):
        text = text[1:].removesuffix("]")
    while (at := BETWEEN.match(text, at).end()) < len(text):
        head = _HEAD.match(text, at)
        stop = head and value_end(text, head.end() - 1, PYTHON_QUOTES)
        if stop is None:
            return [*found, ("", "", text[at:])] if head and may_be_cut else None
        found.append((head[1], text[head.end() : stop - 1], text[at:stop]))
        at = stop
    return found


def arguments_json(text: str) -> str:
    """Return the JSON of a call's named arguments, as Python's own parser reads them. Texts of
    several lines or with their own quotes, zeros before a number, `true` and `null` pass, too.

    Raises:
        ValueError: they are no literals, or too large.
    """
    if len(text) > _MAX_LENGTH or text.count(",") > _MAX_COMMAS:
        raise ValueError("it is too large")
    try:
        call = _parsed(text)
    except ValueError:
        call = _parsed(with_quotes_escaped(text))
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError("it has other than named arguments")
    found: dict[str, Any] = {}
    for each in call.keywords:
        if each.arg is None or each.arg in found:
            raise ValueError(f"{each.arg} comes twice")
        found[each.arg] = _value(each.value, MAX_DEPTH)
    return json.dumps(found, ensure_ascii=False, allow_nan=False)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(f"f({_TOKENS.sub(_as_python, text)}\n)", mode="eval").body
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("it is no Python") from None


def value_json(text: str) -> str:
    """Return the JSON of one literal.

    Raises:
        ValueError: it is no literal.
    """
    written = arguments_json(f"x={text}")
    found = json.loads(written)
    if found.keys() != {"x"}:
        raise ValueError("it is more than a value")
    return json.dumps(found["x"], ensure_ascii=False)


def with_quotes_escaped(text: str) -> str:
    """Escape the quotes inside of texts: a text ends at a quote before a bracket, comma or colon.

    Raises:
        ValueError: the end of a text is ambiguous.
    """
    return _LOOSE.sub(_escaped, text)


def _escaped(found: re.Match) -> str:
    quote, text = found[1], found[2]
    if _NEXT_ARGUMENT.search(text):
        raise ValueError("a text may have swallowed an argument")
    return quote + re.sub(rf"\\.|{quote}", lambda at: at[0].rjust(2, "\\"), text) + quote


def _as_python(found: re.Match) -> str:
    """Return a text on one line, without escapes unknown to Python, or "" for leading zeros."""
    text, quote = found["text"], found["quote"]
    if text is None:
        return ""
    if found["prefix"] in ("r", "R"):
        return repr(text)
    return quote + _ESCAPES.sub(_escape, text) + quote


def _escape(found: re.Match) -> str:
    if found[1] is None:
        return _LINES[found[0]]
    return found[0] if found[1] in "\\'\"abfnrtvxuUN01234567\n" else "\\" + found[0]


def _value(node: ast.expr, depth: int) -> Any:
    if depth == 0:
        raise ValueError("it is nested too deeply")
    match node:
        case ast.Constant(value=str(text)):
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=sign, operand=ast.Constant(value=int() | float() as number)):
            if isinstance(sign, (ast.UAdd, ast.USub)):
                return -number if isinstance(sign, ast.USub) else number
        case ast.List(elts=each) | ast.Tuple(elts=each) | ast.Set(elts=each):
            return [_value(one, depth - 1) for one in each]
        case ast.Dict(keys=keys, values=values):
            names = [key and _value(key, depth - 1) for key in keys]
            if not all(isinstance(name, str) for name in names) or len({*names}) != len(names):
                raise ValueError("a key is no text, or comes twice")
            return dict(zip(names, (_value(one, depth - 1) for one in values)))
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
    raise ValueError(f"{type(node).__name__} is no literal")
