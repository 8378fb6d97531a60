"""Guides: what an answer may look like (JSON, a regular expression, one of some texts, ...).

A `Guide` is plain data. A `GuideCompiler` turns it into a grammar over the tokens of a tokenizer,
by llguidance (https://github.com/guidance-ai/llguidance), which the first compiler imports. Each
answer has a `GuideMatcher`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_hybrid.text import guide_tag
from megatron_hybrid.text.guide_grammar import lark
from megatron_hybrid.text.guide_trial import error_of, library, limits
from megatron_hybrid.utils.validation import check_text, json_value

_NAMES = {"json_schema": "JSON schema", "structural_tag": "structural tag"}
"""Kinds of guides whose source is JSON."""
MAX_CHARS = 256 << 10
"""Most characters of a guide's source: the JSON of a schema, a pattern, all choices together."""
MAX_KEPT = 64
"""Most compiled guides that a compiler keeps."""
NICENESS = 10
"""Niceness of a thread that compiles guides while an engine steps."""


@dataclass(frozen=True)
class Guide:
    """The form that an answer must have. One of the class methods makes it."""

    kind: str
    """ "json_schema", "regex", "grammar", "structural_tag" or "choices"."""
    source: str | tuple[str, ...]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, check: bool = True) -> Guide:
        """Return a guide of JSON that fits a schema (a JSON value, or its text). Declared
        properties come in the order of the schema, and others after them.

        check: refuse a schema here that cannot be enforced; otherwise the engine refuses requests
        with it.

        Raises:
            ValueError: the schema is not JSON, or has a keyword that cannot be enforced.
            ImportError: `check` needs llguidance, which is missing.
        """
        return cls._of_json("json_schema", schema, check)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str, *, check: bool = True) -> Guide:
        """Return a guide of text with tags whose contents have a form: a structural tag of xgrammar
        (a JSON object, or its text), with schemas and patterns as in `json_schema` and `regex`.

        check: as in `json_schema`.

        Raises:
            ValueError: the tag is not JSON, or has a part that cannot be enforced.
            ImportError: `check` needs llguidance, which is missing.
        """
        return cls._of_json("structural_tag", tag, check)

    @classmethod
    def _of_json(cls, kind: str, value: Any, check: bool) -> Guide:
        try:
            if isinstance(value, str):
                value = json_value(value)
            check_text("it", json.dumps(value, allow_nan=False, ensure_ascii=False))
            guide = cls(kind, json.dumps(value))
        except RecursionError:
            raise ValueError(f"the {_NAMES[kind]} is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"bad {_NAMES[kind]}: {error}") from None
        if check:
            _check(guide)
        return guide

    def after_reasoning(
        self, open: str, close: str, *, begins_inside: bool, prefix: str = ""
    ) -> Guide:
        """Return a guide of reasoning with any text, followed by the form of this guide.

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
        form = {"type": "sequence", "elements": [*elements, self.format]}
        return Guide("structural_tag", json.dumps({"type": "structural_tag", "format": form}))

    @property
    def format(self) -> dict[str, Any]:
        """The guide as a format of a structural tag."""
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
        """Return a guide of any JSON object."""
        return cls("json_schema", '{"type": "object"}')

    @classmethod
    def regex(cls, pattern: str) -> Guide:
        """Return a guide of a text that matches the whole pattern, as `re.fullmatch` with DOTALL
        and ASCII. The engine refuses parts that it cannot enforce: lookahead, lookbehind,
        backreferences, flags, word boundaries, `^` and `$` elsewhere than at the ends.

        Raises:
            TypeError: the pattern is not a str.
        """
        if not isinstance(pattern, str):
            raise TypeError(f"a regex guide needs a str, got {type(pattern).__name__}")
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, source: str) -> Guide:
        """Return a guide of the texts of a context-free grammar in EBNF (GBNF), which begins with
        the rule `root`.

        Raises:
            TypeError: the grammar is not a str.
            ValueError: the grammar is wrong, too long, nested too deeply, or repeats a part too
                often.
            ImportError: llguidance is missing.
        """
        if not isinstance(source, str):
            raise TypeError(f"a grammar guide needs a str, got {type(source).__name__}")
        grammar_of(cls("grammar", source))
        return cls("grammar", source)

    @classmethod
    def choices(cls, texts: Iterable[str]) -> Guide:
        """Return a guide of one of some texts.

        Raises:
            ValueError: there is no text, or a text is empty or not a str.
        """
        found = () if isinstance(texts, str) else tuple(texts)
        if not found or not all(isinstance(text, str) and text for text in found):
            raise ValueError(f"a guide's choices must be one or more non-empty strings: {texts!r}")
        return cls("choices", found)


def grammar_of(guide: Guide) -> str:
    """Return the guide's grammar, as llguidance reads it.

    Raises:
        ValueError: the guide cannot be enforced.
    """
    texts = (guide.source,) if isinstance(guide.source, str) else guide.source
    if (size := sum(map(len, texts))) > MAX_CHARS:
        raise ValueError(
            f"the guide has {size} characters, and may have {MAX_CHARS}: make it smaller"
        )
    for each in texts:
        check_text(f"the guide's {guide.kind}", each)
    try:
        return lark(guide_tag.node_of(guide.format))
    except RecursionError:
        name = _NAMES.get(guide.kind, f"guide's {guide.kind}")
        raise ValueError(f"the {name} is nested too deeply") from None
    except ValueError as error:
        raise _refusal(guide, str(error)) from None


def _refusal(guide: Guide, reason: str) -> ValueError:
    if guide.kind in _NAMES:
        return ValueError(f"bad {_NAMES[guide.kind]}: {reason}")
    return ValueError(f"the guide's {guide.kind} cannot be used: {reason}")


# llguidance --------------------------------------------------------------------------------------


_PLACE = re.compile(r"\Aat \d+\(\d+\): (failed to compile JSON schema: )?")
_ONE_OF = (
    "'oneOf' is supported only where it is plain that no value fits two of its schemas: use "
    "'anyOf', or require a property with another 'const' in each"
)


_NO_ANSWER = "no answer fits, or no token of this tokenizer can begin one"


def _told(message: str) -> str:
    """Return an error of llguidance without its places in a grammar that the caller never saw."""
    line = _PLACE.sub("", message.strip()).split("\n", 1)[0].strip()
    if "oneOf" in line:
        return _ONE_OF
    if "if regex is empty" in line:
        return "a pattern is too complex next to limits of its length, or next to another pattern"
    if "not disjoint" in line:
        return "'patternProperties' are supported only where no name matches two of the patterns"
    return line.replace("Unsatisfiable schema", "no answer fits")[:300]


def _check(guide: Guide) -> str:
    """Return the guide's grammar, after a trial by llguidance in another process.

    Raises:
        ValueError: the guide cannot be enforced.
    """
    grammar = grammar_of(guide)
    if error := error_of(grammar):
        raise _refusal(guide, _told(error))
    return grammar


class UnsatisfiableError(ValueError):
    """The request allows no token after the answer so far. It is found out late, but the request is
    at fault, not the server."""


class GuideCompiler:
    """Compiles guides for one tokenizer and model. Any thread may use it.

    Args:
        token_bytes: `Tokenizer.token_bytes`, those of each id. Ids beyond these, and ids without
            bytes, are never allowed.
        vocab_size: that of the model.

    Raises:
        ImportError: llguidance is missing.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int):
        self._tokens = _Vocabulary(token_bytes, vocab_size)
        self._kept = lru_cache(MAX_KEPT)(self._compiled)

    def matcher(self, guide: Guide, stop_ids: Iterable[int]) -> GuideMatcher:
        """Return the matcher of a new answer, which the stop tokens may end.

        Raises:
            ValueError: the guide cannot be enforced, or allows no first token.
        """
        stops = list(stop_ids)
        matcher = GuideMatcher(self.compile(guide).deep_copy(), stops, self._tokens)
        if matcher.is_stuck or (matcher.is_over and not stops):
            raise ValueError(
                "no token of this tokenizer can begin an answer that the guide allows: "
                f"{guide!s:.1000}"
            )
        return matcher

    def compile(self, guide: Guide) -> Any:
        """Return llguidance's matcher, which is kept: each answer gets a copy, which is fast.

        Raises:
            ValueError: the guide cannot be enforced.
        """
        return self._kept(guide)

    def _compiled(self, guide: Guide) -> Any:
        grammar, tokenizer = _check(guide), self._tokens.tokenizer
        matcher = library().LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        if matcher.is_error():  # it takes too much memory or time
            raise _refusal(guide, _told(matcher.get_error()))
        if not (self._tokens.bits(matcher).any() or matcher.is_accepting()):
            error = matcher.get_error()  # the grammar may allow nothing at all
            is_limit = error and "NoExtension" not in error
            raise _refusal(guide, _told(error) if is_limit else _NO_ANSWER)
        return matcher


class _Vocabulary:
    """Holds the tokens of a tokenizer, as llguidance knows them.

    Args:
        texts: bytes of each id.
        size: that of the model's vocabulary.
    """

    eos_token_id: int
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, texts: Sequence[bytes], size: int):
        self.texts = [*texts[:size], *[b""] * (size - len(texts))]
        padded = np.zeros(-(-size // 32) * 32, bool)
        padded[:size] = list(map(bool, self.texts))
        self.usable = np.packbits(padded, bitorder="little").view(np.int32)
        """The tokens that have a text, as bits like those of `GuideMatcher.allowed`."""
        # After the model's tokens come all bytes, into which llguidance tokenizes texts of a
        # grammar, and an end, which is never drawn. 0xff begins special tokens.
        self._first_byte = size
        self.tokens = [*self.texts, *(bytes([byte]) for byte in range(256)), b"\xff[end]"]
        self.eos_token_id = len(self.tokens) - 1
        wrapper = library().TokenizerWrapper(self)
        self.tokenizer = library().LLTokenizer(wrapper, n_vocab=len(self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text for llguidance: one for each byte."""
        return [
            self._first_byte + byte for byte in (text.encode() if isinstance(text, str) else text)
        ]

    def bits(self, matcher: Any) -> np.ndarray:
        """Return the tokens that may come next, as bits like those of `GuideMatcher.allowed`."""
        words = np.frombuffer(matcher.compute_bitmask(), np.int32)
        return words[: len(self.usable)] & self.usable


class GuideMatcher:
    """Says which tokens may come next in one answer.

    A stop token is allowed where the answer may end, and ends it. Elsewhere a stop token that has a
    text is allowed only if no other token can follow: there it is text (`stops_are_text`).

    Args:
        matcher: llguidance's.
        stop_ids: tokens that end the answer.
        vocabulary: the tokens.
    """

    def __init__(self, matcher: Any, stop_ids: Iterable[int], vocabulary: _Vocabulary):
        self._matcher = matcher
        self._stops = np.array(sorted(stop_ids), np.int64)
        self._vocabulary = vocabulary
        self.num_tokens = 0
        """Number of tokens of the answer so far."""
        self._look()

    def add(self, tokens: Sequence[int]) -> None:
        """Add tokens of the answer.

        Raises:
            UnsatisfiableError: the guide allows no token of the tokenizer after them, or has become
                too complex.
            ValueError: the guide does not allow them.
        """
        for token in tokens:
            if not self._accept(int(token)):
                self._check()
                raise ValueError(f"the guide does not allow token {token} here")
            self.num_tokens += 1
        if tokens:
            self._look()
        if self.is_stuck:
            raise UnsatisfiableError(
                "the guide allows no token of this tokenizer after the answer so far: relax it"
            )

    def allows(self, token: int) -> bool:
        """Return whether a token may come next."""
        return bool(self.allowed[token >> 5] >> (token & 31) & 1)

    def go_back_to(self, num_tokens: int) -> None:
        """Remove the tokens after the first `num_tokens` (at least 1, if there are any)."""
        if num_tokens < self.num_tokens:
            self._matcher.rollback(self.num_tokens - num_tokens)
            self.num_tokens = num_tokens
            self._look()

    def _accept(self, token: int) -> bool:
        texts = self._vocabulary.texts
        if not (0 <= token < len(texts) and texts[token]):
            return False
        return self._matcher.try_consume_tokens([token]) == 1

    def _check(self) -> None:
        if self._matcher.is_error():
            error = _told(self._matcher.get_error())
            raise UnsatisfiableError(f"the guide is too complex to go on: {error}: simplify it")

    def _look(self) -> None:
        allowed = self._vocabulary.bits(self._matcher)
        self._check()
        others = allowed.copy()
        words = others.view(np.uint32)
        stops, bits = self._stops >> 5, (1 << (self._stops & 31)).astype(np.uint32)
        np.bitwise_and.at(words, stops, ~bits)
        may_end, may_go_on = self._matcher.is_accepting(), bool(words.any())
        if may_end:
            np.bitwise_or.at(words, stops, bits)
        self.stops_are_text = not (may_end or may_go_on)
        """Whether the stop tokens that are allowed do not end the answer."""
        self.allowed = allowed if self.stops_are_text else others
        """int32 [ceil(vocab_size / 32)]: bit i % 32 of word i // 32 says whether token i may come
        next."""
        self.is_over = may_end and not may_go_on
        """Whether the answer is complete, so that only its end may follow."""
        self.is_stuck = self.stops_are_text and not allowed.any()
