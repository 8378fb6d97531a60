"""Writes regular expressions of guides in Rust's syntax: Python's, and those of JSON Schema.

Python checks them. What Rust reads differently is rewritten, or refused by name.
"""

import re
import string
import warnings

MAX_NESTING = 200
"""Most brackets inside of each other: llguidance reads them by recursion."""
_FLAGS = re.DOTALL | re.ASCII
_ASCII = {"d": "0-9", "s": r"\x20\t\n\r\x0c\x0b", "w": "0-9A-Za-z_"}
_WIDEST = {
    "d": r"\p{N}",
    "s": r"\p{White_Space}\x1c-\x1f\x{feff}",
    "w": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}\p{Join_Control}",
}
"""Categories by ECMAScript's rules or by those of Python for Unicode, and more."""
_SCHEMA_ESCAPES = {*"dDsSwWnrtfvxu", *string.punctuation}
"""Characters after a backslash that ECMAScript and Python read alike."""
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_PIECE = re.compile(
    r"(?P<escape>\\(?:x..|u....|U.{8}|.))|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<group>\(\?(?:P<\w+>|P=|<[=!]|[^P<]))"
    r"|(?P<count>(?:[*+?]|\{(?=\d|,\d*\})\d*(?:,\d*)?\})[+?]?)|(?P<sign>.)",
    re.DOTALL,
)
_IN_SET = re.compile(r"\\(?:x..|u....|U.{8}|.)|.", re.DOTALL)
_PLACES = {"^": "^", r"\A": "^", "$": "$", r"\Z": "$"}


def escaped(character: str) -> str:
    """Return a character as regular expressions write it, in and out of sets."""
    if "\ud800" <= character <= "\udfff":
        _refuse(f"\\u{ord(character):x}, half of a character,")
    is_plain = character.isascii() and character.isalnum()
    return character if is_plain else f"\\x{{{ord(character):x}}}"


def full_match(pattern: str) -> str:
    """Write the texts that a pattern matches from end to end, as `re.fullmatch` with DOTALL and
    ASCII.

    Raises:
        ValueError: the pattern is wrong, or has a part that no grammar can express.
    """
    ways = (body for _, body, _ in _Reader(pattern, is_schema=False).ways)
    return f"(?:{'|'.join(ways)})"


def found_in(pattern: str) -> str:
    """Write the texts in which a pattern of JSON Schema is found, by the rules of ECMAScript (with
    the flag u) as well as by Python's: where these differ, those by both. `$` is the end alone.

    Only sets with both `"` and `\\` keep NUL: in a JSON string, llguidance takes these two for
    members of each set that has all control characters.

    Raises:
        ValueError: the pattern is wrong, or has a part that no grammar can express.
    """
    around = {True: "", False: "(?s:.*)"}
    ways = _Reader(pattern, is_schema=True).ways
    found = (f"{around[begins]}{body}{around[ends]}" for begins, body, ends in ways)
    return f"^(?:{'|'.join(found)})$"


def _refuse(what: str) -> None:
    raise ValueError(f"{what} is not supported in a pattern: leave it out, or write it otherwise")


class _Reader:
    """Reads a pattern, piece by piece.

    Args:
        is_schema: whether it is a pattern of JSON Schema.
    """

    def __init__(self, pattern: str, is_schema: bool):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                flags = re.compile(pattern, _FLAGS).flags
        except (re.error, OverflowError) as error:
            raise ValueError(f"{pattern!r:.80} is no regular expression: {error}") from None
        except RecursionError:
            raise ValueError("the pattern is nested too deeply") from None
        if flags != _FLAGS:
            _refuse("a flag")
        self._is_schema = is_schema
        self._most = _WIDEST if is_schema else _ASCII
        self.ways: list[tuple[bool, str, bool]] = []
        """For each branch whether it begins with an anchor, its body, and whether it ends with
        one."""
        depth, begins, ends, body = 0, False, False, ""
        for found in _PIECE.finditer(pattern):
            piece, kind = found[0], found.lastgroup or ""
            depth += (piece[0] == "(") - (piece == ")")
            if depth > MAX_NESTING:
                raise ValueError("the pattern is nested too deeply")
            if piece == "|" and not depth:
                self.ways.append((begins, body, ends))
                begins, ends, body = False, False, ""
            elif piece in _PLACES and not depth:
                self._check_escape(piece)
                if ends or (body and _PLACES[piece] == "^"):
                    _refuse(f"{piece!r} inside of {pattern!r:.80}")
                begins, ends = begins or _PLACES[piece] == "^", _PLACES[piece] == "$"
            elif ends or piece in _PLACES:
                _refuse(f"{piece if piece in _PLACES else '$'!r} inside of {pattern!r:.80}")
            else:
                body += getattr(self, f"_{kind}")(piece)
        self.ways.append((begins, body, ends))

    def _escape(self, piece: str) -> str:
        self._check_escape(piece)
        if (name := piece[1].lower()) in _ASCII:
            return f"[{_ASCII[name]}]" if piece[1] == name else f"[^{self._most[name]}]"
        return self._literal(_character(piece))

    def _set(self, piece: str) -> str:
        negates = piece[1] == "^"
        if self._is_schema and piece[1 + negates] == "]":
            _refuse("an empty set '[]'")
        written, members = "", _IN_SET.findall(piece[1 + negates : -1])
        for index, member in enumerate(members):
            if self._is_schema and (
                member == "[" or (member in "-&~|" and members[index + 1 : index + 2] == [member])
            ):
                _refuse(f"{member!r} in a set")
            self._check_escape(member)
            name = member[-1].lower() if member[0] == "\\" and len(member) == 2 else ""
            if name in _ASCII:
                is_other = member[-1] != name
                name = (self._most if is_other != negates else _ASCII)[name]
                written += f"[^{name}]" if is_other else name
            elif member == "-" and 0 < index < len(members) - 1:
                written += "-"
            else:
                written += escaped(_character(member))
        written = f"[{'^' if negates else ''}{written}]"
        held = re.findall(piece, '\0"\\') if self._is_schema else ()
        return rf"[{written}--\x00]" if "\0" in held and len(held) < 3 else written

    def _group(self, piece: str) -> str:
        if piece != "(?:" and (self._is_schema or piece[-1] != ">" or piece == "(?>"):
            _refuse(f"{piece}...)")
        return "(?:"

    def _count(self, piece: str) -> str:
        if piece[-1] == "+" and len(piece) > 1:
            _refuse("a possessive repetition, such as a*+,")
        if piece.startswith("{,"):
            if self._is_schema:
                _refuse("'{' that begins no count")
            piece = "{0" + piece[1:]
        return piece[0] + piece[1:].removesuffix("?")

    def _literal(self, character: str) -> str:
        if self._is_schema and character == "\0":
            _refuse("NUL")
        return escaped(character)

    def _sign(self, piece: str) -> str:
        if piece == ".":
            return r"[^\n\r\x{2028}\x{2029}]" if self._is_schema else "(?s:.)"
        if self._is_schema and piece == "{":
            _refuse("'{' that begins no count")
        return {"(": "(?:", ")": ")", "|": "|"}.get(piece) or self._literal(piece)

    def _check_escape(self, piece: str) -> None:
        if piece[0] == "\\" and self._is_schema and piece[1] not in _SCHEMA_ESCAPES:
            _refuse(piece[:2])
        if piece[0] == "\\" and (piece[1] in "bBN" or piece[1].isdigit()):
            _refuse("a backreference" if piece[1].isdigit() else piece[:2])


def _character(piece: str) -> str:
    if len(piece) > 2:
        return chr(int(piece[2:], 16))
    return _SHORT.get(piece[-1], piece[-1]) if piece[0] == "\\" else piece
