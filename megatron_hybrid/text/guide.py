"""Guides: what an answer may look like (JSON, a regular expression, one of some texts, ...).

A `Guide` is plain data. A `GuideCompiler` turns it into a grammar over the tokens of a tokenizer,
by xgrammar (https://github.com/mlc-ai/xgrammar), which the first compiler imports. Each answer has
a `GuideMatcher`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from megatron_hybrid.text import guide_regex, guide_schema, guide_tag
from megatron_hybrid.text.guide_grammar import alt, check_ebnf, text, told, written
from megatron_hybrid.validation import check_text

_NAMES = {"json_schema": "JSON schema", "structural_tag": "structural tag"}
"""Kinds of guides whose source is JSON."""
CACHE_BYTES = 64 << 20
"""Of compiled grammars that a compiler keeps."""


@dataclass(frozen=True)
class Guide:
    """The form that an answer must have. One of the class methods makes it."""

    kind: str
    """ "json_schema", "regex", "grammar", "structural_tag" or "choices"."""
    source: str | tuple[str, ...]
    ebnf: str | None = field(default=None, compare=False, repr=False)
    """The grammar as xgrammar reads it, if a `GuidePool` has written it; None: it is written when
    it is needed."""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, check: bool = True) -> Guide:
        """JSON that fits a schema (a JSON value, or its text). Objects have only declared
        properties, in the order of the schema. If `type` is missing, it follows from the other
        keywords: a value with `minimum` is a number.

        check: refuse a schema here that cannot be enforced; otherwise the engine refuses requests
        with it.

        Raises:
            ValueError: the schema is not JSON, or has a keyword that cannot be enforced.
        """
        return cls._of_json("json_schema", schema, check)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str, *, check: bool = True) -> Guide:
        """Text with tags whose contents have a form: a structural tag of xgrammar (a JSON object,
        or its text), with schemas as in `json_schema` and patterns as in `regex`.

        check: as in `json_schema`.

        Raises:
            ValueError: the tag is not JSON, or has a part that cannot be enforced.
            ImportError: `check` needs xgrammar, which is missing.
        """
        return cls._of_json("structural_tag", tag, check)

    @classmethod
    def _of_json(cls, kind: str, value: Any, check: bool) -> Guide:
        try:
            if isinstance(value, str):
                value = json.loads(value)
            check_text("it", json.dumps(value, allow_nan=False, ensure_ascii=False))
            guide = cls(kind, json.dumps(value))
        except RecursionError:
            raise ValueError(f"the {_NAMES[kind]} is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"bad {_NAMES[kind]}: {error}") from None
        if check:
            grammar_of(guide)
        return guide

    def behind_thought(
        self, open: str, close: str, *, begins_inside: bool, prefix: str = ""
    ) -> Guide:
        """A guide of reasoning with any text, followed by the form of this guide.

        Args:
            open, close: marks around the reasoning; if `close` is "", there is no reasoning.
            begins_inside: the prompt has opened the reasoning; otherwise the answer may open it.
            prefix: text between the reasoning and the form of this guide.
        """
        elements: list[dict[str, Any]] = []
        if close:
            thought = {"type": "tag", "begin": "" if begins_inside else open, "end": close}
            thought["content"] = {"type": "any_text", "excludes": [close]}
            space = {"type": "regex", "pattern": "\\n{0,2}"}
            elements = [{"type": "sequence", "elements": [thought, space]}]
            if not begins_inside:
                elements = [{"type": "optional", "content": elements[0]}]
        if prefix:
            elements.append({"type": "const_string", "value": prefix})
        form = {"type": "sequence", "elements": [*elements, self._format]}
        return Guide("structural_tag", json.dumps({"type": "structural_tag", "format": form}))

    @property
    def _format(self) -> dict[str, Any]:
        """As a format of a structural tag."""
        if self.kind == "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(self.source)}
        if self.kind == "structural_tag":
            return guide_tag.format_of(json.loads(self.source))
        if self.kind == "choices":
            texts = [{"type": "const_string", "value": each} for each in self.source]
            return {"type": "or", "elements": texts}
        field = "pattern" if self.kind == "regex" else "grammar"
        return {"type": self.kind, field: self.source}

    @classmethod
    def json_object(cls) -> Guide:
        """Any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """A text that the whole pattern matches, as `re.fullmatch` with DOTALL and ASCII. The
        engine refuses parts that it cannot enforce: lookahead, lookbehind, backreferences, flags,
        word boundaries, `^` and `$` elsewhere than at the ends.

        Raises:
            TypeError: the pattern is not a str.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"a regex guide needs a str, got {type(pattern).__name__}")
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, source: str) -> Guide:
        """A text of a context-free grammar in xgrammar's EBNF (GBNF), which begins with the rule
        `root`.

        Raises:
            TypeError: the grammar is not a str.
            ValueError: the grammar is too long, nested too deeply, or repeats a part too often.
        """
        if not isinstance(source, str):
            raise TypeError(f"a grammar guide needs a str, got {type(source).__name__}")
        check_ebnf(source)
        return cls("grammar", source)

    @classmethod
    def choices(cls, texts: Iterable[str]) -> Guide:
        """One of some texts.

        Raises:
            ValueError: there is no text, or a text is empty or not a str.
        """
        texts = () if isinstance(texts, str) else tuple(texts)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"a guide's choices must be one or more non-empty strings: {texts!r}")
        return cls("choices", texts)


def grammar_of(guide: Guide) -> str:
    """The guide's grammar, as xgrammar reads it.

    Raises:
        ValueError: the guide cannot be kept to.
    """
    if guide.ebnf is not None:
        return guide.ebnf
    name = _NAMES.get(guide.kind)
    if name is None:
        return _written_grammar_of(guide)
    try:
        return _written_grammar_of(guide)
    except RecursionError:
        raise ValueError(f"the {name} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"bad {name}: {error}") from None


@lru_cache(maxsize=64)
def _written_grammar_of(guide: Guide) -> str:
    for each in (guide.source,) if isinstance(guide.source, str) else guide.source:
        check_text(f"the guide's {guide.kind}", each)
    if guide.kind == "json_schema":
        rules = guide_schema.grammar_of(json.loads(guide.source))
    elif guide.kind == "regex":
        try:
            rules = {"root": guide_regex.full_match(guide.source)}
        except RecursionError:
            raise ValueError("the guide's regex is nested too deeply") from None
        except ValueError as error:
            raise ValueError(f"the guide's regex cannot be used: {error}") from None
    elif guide.kind == "structural_tag":
        return guide_tag.grammar_of(json.loads(guide.source))
    elif guide.kind == "grammar":
        return guide.source
    else:
        rules = {"root": alt(map(text, guide.source))}
    grammar = written(rules)
    if grammar is None:
        raise ValueError(f"no answer fits the guide's {guide.kind}: {guide.source!s:.1000}")
    return grammar


class GuideCompiler:
    """Compiles guides for one tokenizer and model. Any thread may use it.

    Args:
        token_bytes: of each id: `Tokenizer.token_bytes`. Ids beyond these, and those without bytes,
            are never allowed.
        vocab_size: of the model.
        first_token_bytes: the same of an answer's first token: `Tokenizer.first_token_bytes`; None:
            `token_bytes`.
        num_threads: that compile one grammar; None: as many as there are CPUs, up to 8.
        keeps: grammars, for matchers.

    Raises:
        ImportError: xgrammar is missing.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        first_token_bytes: Sequence[bytes] | None = None,
        *,
        num_threads: int | None = None,
        keeps: bool = True,
    ):
        vocabulary = partial(
            _Vocabulary,
            size=vocab_size,
            num_threads=num_threads or min(8, os.cpu_count() or 1),
            keeps=keeps,
        )
        self._tokens = vocabulary(token_bytes)
        differs = first_token_bytes is not None and first_token_bytes != token_bytes
        self._first_tokens = vocabulary(first_token_bytes) if differs else None

    def compile(self, guide: Guide) -> None:
        """Compile the grammar, which is kept: the guide's matchers are made fast then.

        Raises:
            ValueError: the guide cannot be kept to.
        """
        grammar = grammar_of(guide)
        if self._first_tokens is not None:
            self._first_tokens.compile(grammar)
        self._tokens.compile(grammar)

    def matcher(self, guide: Guide, stop_ids: Iterable[int]) -> GuideMatcher:
        """The matcher of a new answer, which the stop tokens may end.

        Raises:
            ValueError: the guide cannot be kept to, by none of the tokens.
        """
        grammar, first = grammar_of(guide), self._first_tokens
        matcher = GuideMatcher(
            self._tokens.matcher(grammar),
            stop_ids,
            self._tokens,
            None if first is None else (first.matcher(grammar), first),
        )
        if matcher.is_stuck or (matcher.is_over and not matcher.has_stops):
            raise ValueError(
                f"no token of this tokenizer can begin an answer that the guide allows: {guide}"
            )
        return matcher


class _Vocabulary:
    """The tokens of a tokenizer, and grammars over them.

    Args:
        texts: of each id.
        size: of the model's vocabulary.
        num_threads, keeps: see `GuideCompiler`.
    """

    def __init__(self, texts: Sequence[bytes], size: int, num_threads: int, keeps: bool):
        try:
            import xgrammar
        except ImportError as error:
            raise ImportError("guided answers need xgrammar: pip install '.[serve]'") from error
        self._xgrammar = xgrammar
        self.texts = list(texts[:size])
        padded = np.zeros(-(-size // 32) * 32, bool)
        padded[: len(self.texts)] = list(map(bool, self.texts))
        self.usable = np.packbits(padded, bitorder="little").view(np.int32)
        """The tokens that have a text, as bits of `GuideMatcher.allowed`."""
        info = xgrammar.TokenizerInfo(
            self.texts, xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[]
        )
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=num_threads, cache_enabled=keeps, cache_limit_bytes=CACHE_BYTES
        )

    def compile(self, grammar: str) -> Any:
        try:
            return self._compiler.compile_grammar(grammar)
        except RuntimeError as error:  # of a grammar that a caller wrote
            raise ValueError(f"the guide's grammar cannot be used: {told(error)}") from None

    def matcher(self, grammar: str) -> Any:
        return self._xgrammar.GrammarMatcher(self.compile(grammar))


class GuideMatcher:
    """Which tokens may come next in one answer.

    A stop token is allowed where the answer may end, and ends it. Elsewhere one that has a text is
    allowed only if no other token can follow: there it is text (`stops_are_text`).

    Args:
        matcher: xgrammar's.
        stop_ids: tokens that end the answer.
        vocabulary: the tokens.
        first: another matcher of xgrammar and its tokens, for the first token; None: the same.
    """

    def __init__(
        self,
        matcher: Any,
        stop_ids: Iterable[int],
        vocabulary: _Vocabulary,
        first: tuple[Any, _Vocabulary] | None = None,
    ):
        self._matcher = matcher
        self._stops = np.array(sorted(stop_ids), np.int64)
        self._vocabulary = vocabulary
        self._first = first
        self.num_tokens = 0
        """That it has seen of the answer."""
        self._look()

    @property
    def has_stops(self) -> bool:
        return len(self._stops) > 0

    def add(self, tokens: Sequence[int]) -> None:
        """Go on by tokens of the answer.

        Raises:
            ValueError: the guide does not allow them, or allows no token of the tokenizer behind.
        """
        for token in tokens:
            if not self._accept(token):
                raise ValueError(f"the guide does not allow token {token} here")
            self.num_tokens += 1
        if tokens:
            self._look()
        if self.is_stuck:
            raise ValueError(
                "the guide allows no token of this tokenizer behind the answer so far: relax it"
            )

    def allows(self, token: int) -> bool:
        """Whether a token may come next."""
        return bool(self.allowed[token >> 5] >> (token & 31) & 1)

    def go_back_to(self, num_tokens: int) -> None:
        """Take back the tokens behind the first `num_tokens` (at least 1, if it has seen any)."""
        if num_tokens < self.num_tokens:
            self._matcher.rollback(self.num_tokens - num_tokens)
            self.num_tokens = num_tokens
            self._look()

    def _accept(self, token: int) -> bool:
        if self._first is None or self.num_tokens:
            return self._matcher.accept_token(token)
        texts = self._first[1].texts
        text = texts[token] if token < len(texts) else b""
        return bool(text) and self._matcher.accept_string(text)

    def _look(self) -> None:
        matcher, vocabulary = self._matcher, self._vocabulary
        if self._first is not None and not self.num_tokens:
            matcher, vocabulary = self._first
        allowed = np.zeros_like(vocabulary.usable)
        matcher.fill_next_token_bitmask(allowed[None])
        allowed &= vocabulary.usable  # where any text may follow, all bits are set
        others = allowed.copy()
        words = others.view(np.uint32)
        stops, bits = self._stops >> 5, (1 << (self._stops & 31)).astype(np.uint32)
        np.bitwise_and.at(words, stops, ~bits)
        may_end, may_go_on = self._matcher.is_completed(), bool(words.any())
        if may_end:
            np.bitwise_or.at(words, stops, bits)
        self.stops_are_text = not (may_end or may_go_on)
        """The stop tokens that are allowed do not end the answer."""
        self.allowed = allowed if self.stops_are_text else others
        """int32 [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 says whether token i may come
        next."""
        self.is_over = may_end and not may_go_on
        """The answer is complete: only its end may follow."""
        self.is_stuck = self.stops_are_text and not allowed.any()
