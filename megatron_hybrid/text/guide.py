"""Guides: what an answer may look like (JSON, a regular expression, one of some texts).

A `Guide` is plain data. A `GuideCompiler` turns it into a grammar over the tokens of a tokenizer,
by xgrammar (https://github.com/mlc-ai/xgrammar), which the first compiler imports. Each answer has
a `GuideMatcher`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hybrid.validation import check_text

MAX_WHITESPACE = 16
"""Most spaces and newlines in a row between two parts of a JSON answer. Without a limit a model may
write nothing else until its answer is full."""
MAX_DEPTH = 64
"""Most schemas inside of each other; the time to compile them grows with the square, or faster."""
CACHE_BYTES = 256 << 20
"""Of compiled grammars that a compiler keeps."""

_UNSUPPORTED = {
    *("contains", "minContains", "maxContains", "uniqueItems", "not", "if", "then", "else"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
}
"""Keywords of JSON Schema that xgrammar 0.2 skips: an answer might not fit the schema."""
_CHOICES = ("anyOf", "oneOf", "allOf", "$ref")
"""Keywords beside which xgrammar 0.2 skips others."""
_BESIDE_CHOICES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$defs", "definitions", "$schema", "$id", "$comment", "discriminator"),
}
_UNSUPPORTED_FORMATS = ("json-pointer", "relative-json-pointer")
"""Those whose strings xgrammar 0.2 writes into JSON as they are, quotes too."""
_NEEDS_ESCAPE = re.compile(r'"|\\[\\abcefnrtuvx0]')
"""What a pattern says of characters that JSON escapes, which xgrammar 0.2 does not."""
_CONTROL = re.compile(rb"[\x00-\x1f]")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
"""How surrogates begin, which xgrammar 0.2 takes for characters and UTF-8 has not."""
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE_SCHEMAS = (
    *("items", "additionalProperties", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)


@dataclass(frozen=True)
class Guide:
    """What an answer may look like. Make it by one of the class methods."""

    kind: str
    """ "json_schema", "regex" or "choices"."""
    source: str | tuple[str, ...]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Guide:
        """JSON that fits a schema (a JSON value, or its text). Only declared properties may come,
        in the order of the schema. `oneOf` counts as `anyOf`.

        Raises:
            ValueError: it is no JSON, or has a keyword that cannot be kept to.
        """
        try:
            if isinstance(schema, str):
                schema = json.loads(schema)
            source = json.dumps(schema, allow_nan=False)
            for part in _parts_of(schema):
                _check_schema(part)
        except RecursionError:
            raise ValueError("the JSON schema is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"bad JSON schema: {error}") from None
        return cls("json_schema", source)

    @classmethod
    def json_object(cls) -> Guide:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """A text that the whole pattern matches, as `re.fullmatch` with DOTALL and ASCII; without
        lookahead, lookbehind, backreferences and flags.

        Raises:
            TypeError: it is no str.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"a regex guide needs a str, got {type(pattern).__name__}")
        return cls("regex", pattern)

    @classmethod
    def choices(cls, texts: Iterable[str]) -> Guide:
        """One of some texts.

        Raises:
            ValueError: there is none, or one is empty or no str.
        """
        texts = () if isinstance(texts, str) else tuple(texts)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"a guide's choices must be one or more non-empty strings: {texts!r}")
        return cls("choices", texts)


def _parts_of(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas in it, outer ones first."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_DEPTH} schemas inside of each other")
        inner = []
        for part in level:
            if isinstance(part, bool):
                continue
            if not isinstance(part, Mapping):
                raise ValueError(f"a schema must be an object or a bool, got {part!r}")
            yield part
            for name in _SCHEMAS_BY_NAME:
                inner += part[name].values() if isinstance(part.get(name), Mapping) else ()
            for name in _LISTS_OF_SCHEMAS:
                inner += part[name] if isinstance(part.get(name), list) else ()
            inner += [part[name] for name in _SINGLE_SCHEMAS if isinstance(part.get(name), Mapping)]
        level = inner


def _check_schema(part: Mapping[str, Any]) -> None:
    """Raise ValueError for what xgrammar would skip in one schema."""

    def refuse(what: str) -> None:
        raise ValueError(f"{what} is not supported: leave it out, and check the answer for it")

    for name in _UNSUPPORTED & part.keys():
        if part[name] is not False:  # uniqueItems
            refuse(repr(name))
    for name in _CHOICES:
        if name in part and (beside := part.keys() - _BESIDE_CHOICES - {name}):
            refuse(f"{sorted(beside)[0]!r} beside {name!r}")
    if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
        refuse("'allOf' of several schemas")
    for name in {"pattern", "format"} & part.keys():
        if beside := {"minLength", "maxLength"} & part.keys():
            refuse(f"{sorted(beside)[0]!r} beside {name!r}")
    for pattern in (part.get("pattern", ""), *part.get("patternProperties", ())):
        if isinstance(pattern, str) and (found := _NEEDS_ESCAPE.search(pattern)):
            refuse(f"{found[0]} in the pattern {pattern!r}")
    if part.get("format") in _UNSUPPORTED_FORMATS:
        refuse(f"the format {part['format']!r}")
    if not str(part.get("$ref", "#")).startswith("#"):
        refuse(f"a '$ref' out of the schema, {part['$ref']!r},")
    required = part.get("required")
    if isinstance(required, list):
        for name in required:
            if name not in part.get("properties", {}):
                raise ValueError(f"{name!r} is required and not in 'properties': declare it there")


class GuideCompiler:
    """Compiles guides for one tokenizer and model. Any thread may use it.

    Args:
        token_bytes: of each id: `Tokenizer.token_bytes`. Ids beyond these, and those without bytes,
            are never allowed.
        vocab_size: of the model.

    Raises:
        ImportError: xgrammar is missing.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int):
        try:
            import xgrammar
        except ImportError as error:
            raise ImportError("guided answers need xgrammar: pip install '.[serve]'") from error
        self._xgrammar = xgrammar
        texts = list(token_bytes[:vocab_size])
        is_text = [bool(text) and not _SURROGATE.search(text) for text in texts]
        # Strings of limited length might have control characters otherwise.
        in_json = [
            is_one and not _CONTROL.search(text.strip(b"\r\n"))
            for is_one, text in zip(is_text, texts)
        ]
        self._text_tokens = _Usable(is_text, texts, vocab_size)
        self._json_tokens = _Usable(in_json, texts, vocab_size)
        info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=[],
        )
        threads = min(8, os.cpu_count() or 1)
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=threads, cache_limit_bytes=CACHE_BYTES
        )

    def compile(self, guide: Guide) -> Any:
        """The grammar, which is kept, for it to be fast the second time.

        Raises:
            ValueError: the guide cannot be kept to.
        """
        compilers: dict[str, Callable[[Any], Any]] = {
            "json_schema": lambda schema: self._compiler.compile_json_schema(
                schema, max_whitespace_cnt=MAX_WHITESPACE
            ),
            "regex": self._compiler.compile_regex,
            "choices": lambda texts: self._compiler.compile_grammar(
                f"root ::= {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}"
            ),
        }
        for text in (guide.source,) if isinstance(guide.source, str) else guide.source:
            check_text(f"the guide's {guide.kind}", text)
        try:
            return compilers[guide.kind](guide.source)
        except (RuntimeError, ValueError) as error:
            reason = re.sub(r"^\[[^\]]*\] \S+: ", "", str(error).strip())
            raise ValueError(f"the guide's {guide.kind} cannot be used: {reason}") from None

    def matcher(self, guide: Guide, stop_ids: Iterable[int]) -> GuideMatcher:
        """The matcher of a new answer, which the stop tokens may end.

        Raises:
            ValueError: the guide cannot be kept to, by none of the tokens.
        """
        matcher = self._xgrammar.GrammarMatcher(self.compile(guide))
        usable = self._json_tokens if guide.kind == "json_schema" else self._text_tokens
        matcher = GuideMatcher(matcher, stop_ids, usable)
        if matcher.is_stuck or (matcher.is_over and not matcher.has_stops):
            raise ValueError(
                f"no token of this tokenizer can begin an answer that the guide allows: {guide}"
            )
        return matcher


class _Usable:
    """The tokens that may come in any answer, as bits of `GuideMatcher.allowed`.

    Args:
        flags: of each token.
        texts: of each token.
        vocab_size: of the model.
    """

    def __init__(self, flags: Sequence[bool], texts: Sequence[bytes], vocab_size: int):
        def bits(flags: Iterable[bool]) -> np.ndarray:
            padded = np.zeros(-(-vocab_size // 32) * 32, bool)
            padded[: len(texts)] = list(flags)
            return np.packbits(padded, bitorder="little").view(np.int32)

        completes = (_SURROGATE.match(b"\xed" + text) for text in texts)
        self._anywhere = bits(flags)
        self._behind_ed = self._anywhere & ~bits(map(bool, completes))
        self._ends_in_ed = {i for i, text in enumerate(texts) if text.endswith(b"\xed")}

    def behind(self, token: int | None) -> np.ndarray:
        """Those that may come next. token: the last one; None: there is none."""
        return self._behind_ed if token in self._ends_in_ed else self._anywhere


class GuideMatcher:
    """Which tokens may come next in one answer.

    Args:
        matcher: xgrammar's.
        stop_ids: allowed where the answer may end, and only there.
        usable: tokens that may ever come.
    """

    def __init__(self, matcher: Any, stop_ids: Iterable[int], usable: _Usable):
        self._matcher = matcher
        self._stops = np.array(sorted(stop_ids), np.int64)
        self._usable = usable
        self.num_tokens = 0
        """That it has seen of the answer."""
        self._look(None)

    @property
    def has_stops(self) -> bool:
        return len(self._stops) > 0

    def add(self, tokens: Sequence[int]) -> None:
        """Go on by tokens of the answer.

        Raises:
            ValueError: the guide does not allow them, or allows no token of the tokenizer behind.
        """
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise ValueError(f"the guide does not allow token {token} here")
            self.num_tokens += 1
        if tokens:
            self._look(tokens[-1])
        if self.is_stuck:
            raise ValueError(
                "the guide allows no token of this tokenizer behind the answer so far: relax it"
            )

    def _look(self, last: int | None) -> None:
        usable = self._usable.behind(last)
        allowed = np.zeros_like(usable)
        self._matcher.fill_next_token_bitmask(allowed[None])
        allowed &= usable  # where any text may follow, all bits are set
        words = allowed.view(np.uint32)
        stops, bits = self._stops >> 5, (1 << (self._stops & 31)).astype(np.uint32)
        np.bitwise_and.at(words, stops, ~bits)
        may_end, may_go_on = self._matcher.is_completed(), bool(words.any())
        if may_end:
            np.bitwise_or.at(words, stops, bits)
        self.allowed = allowed
        """int32 [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 says whether token i may come
        next."""
        self.is_over = may_end and not may_go_on
        """The answer is complete: only its end may follow."""
        self.is_stuck = not (may_end or may_go_on)
