"""Random guides: what they let a model write fits, by `jsonschema` and `re`; what fits is allowed.

GUIDE_EXAMPLES=20000 makes so many guides of each kind; `make soak` does.
"""

import json
import os
import re
import warnings
from random import Random

import jsonschema
from guided import COMPILER, accepts, walk
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_hybrid.text.guide import Guide

LENGTHY = settings(
    max_examples=int(os.environ.get("GUIDE_EXAMPLES", "20")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
SEEDS = st.integers(0, 2**32)


# Regular expressions -----------------------------------------------------------------------------

ATOMS = st.sampled_from(
    [
        *(
            "a",
            "b",
            "0",
            "é",
            "😀",
            " ",
            "\n",
            ".",
            r"\.",
            r"\d",
            r"\D",
            r"\w",
            r"\W",
            r"\s",
            r"\S",
        ),
        *(
            r"\S",
            "[ab]",
            "[^a]",
            r"[^\s]",
            r"[^\W]",
            r"[\S]",
            r"[a-c0-9]",
            r"[\d_]",
            r"[^\D]",
            "[é-ü]",
        ),
        *("^", "$", r"\n", r"\t", r"\\", '"', r"\"", r"\/", r"\x41", r"\u00e9", r"\-", "/", "-"),
        *(r"\b", r"\B", r"\A", r"\Z", "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?i:a)", r"(a)\1"),
        *('[^"]', r"[^\\]", r'[^"\\]', r'[^"\n]', r'[^\\/:*?"<>|]', r"[\x00-\x1f]", r"[ -~]"),
        *("(?>a)", "a*+", "[]a]", "[^]a]", "a{,2}", "a{", "}", "]", "[[a]", r"\0", r"\101", r"\v"),
        *("(?P<n>a)", "(?#c)", "[a-]", "[-a]", r"[\b]", r"\a", "(?s:.)", "()", "[$^]"),
    ]
)
PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "é", ".", r"\d", r"\w", r"\s", "[ab]", "[^a]", "^", "$"]) | ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=4).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.lists(inner, min_size=2, max_size=3).map("|".join),
        st.builds(
            lambda part, times: f"(?:{part}){times}",
            inner,
            st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "+?", "??"]),
        ),
    ),
    max_leaves=7,
)
PATTERNS |= st.builds("^{}$".format, PATTERNS)
TEXTS = st.text(st.sampled_from('ab0Aé😀 \n\t._\\"/-^$\u00a0\x1c٣]{'), max_size=5)


def made(make, *arguments) -> Guide | None:
    """The guide; None: it was refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            guide = make(*arguments)
            COMPILER.compile(guide)
            return guide
        except ValueError:
            return None


def searches(pattern: str, text: str) -> bool:
    return all(re.search(pattern, text, flag) for flag in (re.ASCII, re.UNICODE))


@LENGTHY
@given(PATTERNS, st.lists(TEXTS, max_size=5), SEEDS)
def test_a_regex_is_that_of_python_or_refused(pattern, texts, seed):
    guide = made(Guide.regex, pattern)
    assume(guide is not None)
    compiled, random = re.compile(pattern, re.DOTALL | re.ASCII), Random(seed)
    for text in texts:
        assert accepts(guide, text) == bool(compiled.fullmatch(text)), (pattern, text)
    for _ in range(3):
        text = walk(guide, random, b"ab0 \n", most=30)
        assert text is None or compiled.fullmatch(text), (pattern, text)


@LENGTHY
@given(PATTERNS, st.lists(TEXTS, max_size=5), SEEDS)
def test_a_pattern_of_a_schema_is_found_in_the_string_or_refused(pattern, texts, seed):
    guide = made(Guide.json_schema, {"type": "string", "pattern": pattern})
    assume(guide is not None)
    random = Random(seed)
    for text in texts:
        found, is_plain = searches(pattern, text), text.isascii() and "\n" not in text
        if accepts(guide, json.dumps(text, ensure_ascii=False)):
            assert found, (pattern, text)
        elif is_plain and "\x1c" not in text:  # what Python alone takes for a space
            assert not found, (pattern, text)
    for _ in range(3):
        answer = walk(guide, random, b'ab0"\\n', most=40)
        assert answer is None or searches(pattern, json.loads(answer)), (pattern, answer)


# JSON --------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-12, 12), st.integers(-5000, 5000), st.sampled_from([0.5, -0.25, 0.1, 2.5, 1e-3])
)
SIZES = st.integers(0, 3)
NAMES = st.sampled_from(["a", "ab", "b c", 'q"', "é", "", "x"])
SIMPLE = st.sampled_from(["", "a", "ab", "aé", 'q"', "\n", "😀", "2024-02-29", "x" * 5])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
FORMATS = st.sampled_from(["date", "ipv4", "uuid", "email", "ipv6", "date-time", "regex", "idn"])
SCHEMA_PATTERNS = st.sampled_from(["^a", "a$", "^[a-c]{1,3}$", "a|b", r"\d", "^.$", "^(?!a)", "^x"])
SOME = {"title": st.just("T"), "default": VALUES, "$comment": st.just("c"), "x-y": st.just(1)}
NUMERIC = {name: NUMBERS for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}
RANGES = st.builds(
    lambda low, high, start, size: {"type": "number", low: start, high: start + size},
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    *(st.integers(-2, 2) | NUMBERS, st.sampled_from([0.25, 0.5, 1, 2.5])),
)
REF = st.sampled_from(["#", "#/$defs/a", "#/$defs/b"]).map(lambda ref: {"$ref": ref})


def some_of(fields: dict, **required) -> st.SearchStrategy:
    """Objects with few of the fields, in any order."""
    few = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return few.flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: fields[name] for name in names}})
    )


def typed(fields: dict, *types: str) -> st.SearchStrategy:
    each = some_of(fields, type=st.sampled_from(types))
    return each | each | some_of(fields | {"type": st.lists(st.sampled_from(TYPES), max_size=3)})


def leaves() -> st.SearchStrategy:
    enums = {
        **{"enum": st.lists(VALUES, max_size=4), "const": VALUES, **NUMERIC, "maxLength": SIZES},
        **{"type": st.sampled_from(TYPES), "format": FORMATS, "title": st.just("T")},
    }
    lengths = {"minLength": SIZES, "maxLength": st.integers(0, 6)}
    return st.one_of(
        typed({**NUMERIC, **SOME, "multipleOf": st.just(3)}, "integer", "number"),
        RANGES,
        typed(lengths, "string"),
        typed({"pattern": SCHEMA_PATTERNS, "format": FORMATS, **SOME, **lengths}, "string"),
        some_of(enums, enum=st.lists(VALUES, min_size=1, max_size=4)),
        some_of(enums),
        st.booleans(),
        REF,
    )


def compound(inner: st.SearchStrategy) -> st.SearchStrategy:
    arrays = {
        **{"items": inner, "prefixItems": st.lists(inner, max_size=2), "minItems": SIZES},
        **{"maxItems": SIZES, "uniqueItems": st.booleans(), "contains": inner},
        "unevaluatedItems": inner,
    }
    named = st.dictionaries(NAMES, inner, max_size=3)
    objects = {
        **{"properties": named, "required": st.lists(NAMES, max_size=2), "maxProperties": SIZES},
        **{"minProperties": SIZES, "additionalProperties": inner, "propertyNames": inner},
        **{"patternProperties": st.dictionaries(SCHEMA_PATTERNS, inner, max_size=2)},
        "unevaluatedProperties": inner,
    }
    closed = named.flatmap(
        lambda properties: some_of(
            {**objects, "additionalProperties": st.booleans() | inner},
            type=st.just("object"),
            properties=st.just(properties),
            required=st.lists(st.sampled_from(sorted(properties) or ["a"]), max_size=2).map(
                lambda names: [name for name in names if name in properties]
            ),
        )
    )
    several = st.lists(inner, min_size=1, max_size=3)
    kinds = st.sampled_from(["a", "b"]).map(lambda kind: {"const": kind})
    tagged = st.builds(
        lambda tag, part: {
            **{"type": "object", "properties": {"tag": tag, "v": part}, "required": ["tag"]},
        },
        kinds,
        inner,
    )
    choices = {"anyOf": several, "allOf": several, "oneOf": several, "not": inner, "if": inner}
    return st.one_of(
        typed(arrays, "array"),
        typed(objects, "object"),
        *(closed, closed),
        several.map(lambda parts: {"anyOf": parts}),
        several.map(lambda parts: {"oneOf": parts}),
        st.lists(tagged, min_size=2, max_size=2).map(lambda parts: {"oneOf": parts}),
        some_of({**choices, **NUMERIC, "type": st.sampled_from(TYPES)}),
    )


SCHEMAS = st.builds(
    lambda root, a, b: {**root, "$defs": {"a": a, "b": b}} if isinstance(root, dict) else root,
    *[st.recursive(leaves(), compound, max_leaves=5)] * 3,
)


def in_order(value, schema, root):
    """The value with its properties in the order of the schema, where that is plain to see."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        rest = schema.get("items")
        parts = [first[i] if i < len(first) else rest for i in range(len(value))]
        return [in_order(*each, root) for each in zip(value, parts)]
    if isinstance(value, dict):
        names = list(schema.get("properties", {}))
        place = {name: index for index, name in enumerate(names)}
        ordered = sorted(value, key=lambda name: place.get(name, len(names)))
        return {
            name: in_order(value[name], schema.get("properties", {}).get(name), root)
            for name in ordered
        }
    return value


def fits(validator, value) -> bool:
    """Whether a value is valid; no example, if the validator follows references for ever."""
    try:
        return validator.is_valid(value)
    except RecursionError:
        assume(False)


@LENGTHY
@given(SCHEMAS, st.lists(VALUES, max_size=6), SEEDS)
def test_an_answer_fits_its_schema_or_the_schema_is_refused(schema, values, seed):
    guide = made(Guide.json_schema, schema)
    assume(guide is not None)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    random = Random(seed)
    for value in values:
        answer = json.dumps(in_order(value, schema, schema), ensure_ascii=False)
        assert not accepts(guide, answer) or fits(validator, value), (schema, answer)
    for _ in range(3):
        answer = walk(guide, random, b'"}]0a')
        assert answer is None or fits(validator, json.loads(answer)), (schema, answer)
