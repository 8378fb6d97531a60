"""Guides: a token is allowed if and only if an answer that the guide allows can go on with it, and
a stop token where the answer may end."""

import cProfile
import json
import pickle
import pstats
import sys
from codecs import getincrementaldecoder
from itertools import product
from random import Random

import numpy as np
import pytest
from guided import EOS, accepts
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid.text.guide import Guide, GuideCompiler
from megatron_hybrid.text.guide_grammar import ebnf

PIECES = [*(bytes([byte]) for byte in range(256)), b"", b"ab", b'{"', b"yes", b"\xc3\xa9t", b"no "]
VOCAB_SIZE = 300  # padded
COMPILER = GuideCompiler(PIECES, VOCAB_SIZE)


def allowed_tokens(matcher) -> set[int]:
    bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def reached(guide: Guide, text: bytes, stops=(EOS,)):
    """The matcher behind a text, byte by byte; ValueError if it does not allow one."""
    matcher = COMPILER.matcher(guide, stops)
    for byte in text:
        if byte not in allowed_tokens(matcher):
            raise ValueError(f"{byte} is not allowed")
        matcher.add([byte])
    return matcher


ODD = ['a"b', "\\n", "\n\t", "é😀", "\x01\x7f", "ab" * 3, "'", "a|b"]


def digits(*counts: int) -> list[str]:
    return ["".join(each) for count in counts for each in product("012", repeat=count)]


@pytest.mark.parametrize(
    ("guide", "texts"),
    [
        (Guide.choices(["yes", "yellow", "no"]), ["yes", "yellow", "no"]),
        (Guide.regex("(a|été)[0-2]{1,2}"), [a + b for a in ("a", "été") for b in digits(1, 2)]),
        (Guide.regex("(ab)?(yes|no )?"), ["", "ab", "yes", "no ", "abyes", "abno "]),
        (Guide.choices(ODD), ODD),
        (Guide.json_schema({"enum": ["yes", 1, None, {"a": []}]}), ['"yes"', "1", "null"]),
    ],
)
def test_allowed_are_the_tokens_that_some_answer_goes_on_with(guide, texts):
    whole = [text.encode() for text in texts]
    for text in whole:
        for end in range(len(text) + 1):
            before = text[:end]
            expected = {
                token
                for token, piece in enumerate(PIECES)
                if piece and any(each.startswith(before + piece) for each in whole)
            }
            given_ = allowed_tokens(reached(guide, before))
            if guide.kind == "json_schema":  # of objects we do not list all spellings
                assert expected <= given_ and (EOS in given_) == (before in whole)
                continue
            assert given_ == expected | ({EOS} if before in whole else set())


def test_a_stop_token_is_allowed_where_the_answer_may_end_and_only_there():
    guide = Guide.regex("ab*")
    assert allowed_tokens(reached(guide, b"", (7, EOS))) == {ord("a"), 257}
    assert allowed_tokens(reached(guide, b"a", (7, EOS))) == {ord("b"), 7, EOS}
    # One that has a text of its own is no text here.
    assert allowed_tokens(reached(guide, b"", (257,))) == {ord("a")}
    assert allowed_tokens(reached(guide, b"a", (ord("b"),))) == {ord("b")}
    assert allowed_tokens(reached(guide, b"a", ())) == {ord("b")}


def test_a_stop_token_without_which_a_guide_cannot_go_on_is_text_there():
    guide = Guide.regex("(ab|x)c")
    matcher = reached(guide, b"a", (ord("b"), ord("c"), EOS))
    assert allowed_tokens(matcher) == {ord("b")} and matcher.stops_are_text
    matcher.add(b"b")
    assert allowed_tokens(matcher) == {ord("c")} and matcher.stops_are_text
    matcher.add(b"c")
    assert allowed_tokens(matcher) == {ord("b"), ord("c"), EOS} and not matcher.stops_are_text
    assert matcher.is_over


def test_a_guide_is_over_where_nothing_but_the_end_can_follow():
    for guide, text in (
        (Guide.choices(["yes", "yes!"]), "yes!"),
        (Guide.regex("a{2}"), "aa"),
        (Guide.json_object(), '{"a": [1, {"b": null}]}'),
    ):
        cuts = [reached(guide, text.encode()[:end], ()).is_over for end in range(len(text) + 1)]
        assert cuts == [False] * len(text) + [True]


def test_padded_ids_and_special_tokens_are_never_allowed():
    any_text = Guide.regex(r"(.|\n)*")
    assert max(allowed_tokens(reached(any_text, b"", (EOS,)))) < len(PIECES)
    assert EOS not in allowed_tokens(reached(any_text, b"", ()))


@pytest.mark.parametrize(
    "guide", [Guide.regex(r"(.|\n)*"), Guide.json_schema({"type": "string", "maxLength": 40})]
)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_utf8_so_surrogates_do_not_come(guide, seed):
    """Whatever the tokens: single bytes, surrogates as a whole, and pieces of them."""
    pieces = [*(bytes([byte]) for byte in range(256)), b"\xed\xa0", b"\xa0\x80", b"\xc3\xa9\xed"]
    random = Random(seed)
    compiler = GuideCompiler(pieces, len(pieces) + 9)
    matcher, answer = compiler.matcher(guide, ()), b""
    likely = {0xED, *range(0xA0, 0xC0), *range(256, len(pieces))}
    num_after_ed = 0
    for _ in range(60):
        allowed = allowed_tokens(matcher)
        if not allowed:
            break
        token = random.choice(sorted(allowed & likely) or sorted(allowed))
        num_after_ed += answer.endswith(b"\xed")
        matcher.add([token])
        answer += pieces[token]
        getincrementaldecoder("utf-8")().decode(answer)  # raises if no text can begin so
    assert num_after_ed > 3


def test_matchers_of_one_guide_are_independent_and_catch_up():
    guide = Guide.choices(["yes", "no"])
    first, second = COMPILER.matcher(guide, (EOS,)), COMPILER.matcher(guide, (EOS,))
    first.add(list(b"y"))
    first.add(list(b"es"))
    assert (first.num_tokens, second.num_tokens) == (3, 0)
    second.add([259])  # "yes" as one token
    assert np.array_equal(first.allowed, second.allowed) and second.is_over
    with pytest.raises(ValueError, match="does not allow token 120 here"):
        COMPILER.matcher(guide, (EOS,)).add([ord("x")])


def test_a_guide_that_no_token_can_begin_is_refused():
    lacking = GuideCompiler([b"a", b"b", b""], 8)
    lacking.matcher(Guide.regex("a|é"), (2,))
    for guide in (Guide.regex("é"), Guide.json_object()):
        with pytest.raises(ValueError, match="no token of this tokenizer can begin"):
            lacking.matcher(guide, (2,))
    with pytest.raises(ValueError, match="no token of this tokenizer after the answer so far"):
        lacking.matcher(Guide.regex("aé"), (2,)).add([0])


# An answer writes DEL as an escape, which RFC 8259 leaves open.
TEXTS = st.text(st.characters(exclude_characters="\x7f", exclude_categories=["Cs"]), max_size=5)


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner),
        max_leaves=8,
    ),
    st.sampled_from([None, 2]),
)
def test_a_json_object_is_any_of_them(value, indent):
    for text in (json.dumps(value, indent=indent, ensure_ascii=bool(indent)),):
        assert accepts(Guide.json_object(), text) == isinstance(value, dict)
        assert not accepts(Guide.json_object(), text + "x")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "minLength": 1},
        {"type": "string", "pattern": r"^\W|\s|.|[^a]$"},
        {"type": "object", "patternProperties": {"^.$": {}}, "additionalProperties": False},
    ],
)
def test_what_json_escapes_comes_escaped_or_not_at_all(schema):
    text = '"%s"' if schema["type"] == "string" else '{"%s": 1}'
    guide = Guide.json_schema(schema)
    wrong = [chr(byte) for byte in (*range(32), ord('"'), ord("\\"))]
    assert not [character for character in wrong if accepts(guide, text % character)]
    assert accepts(guide, text % "é")


def test_whitespace_is_limited():
    assert accepts(Guide.json_object(), '{"a":' + " " * 16 + "1}")
    assert not accepts(Guide.json_object(), '{"a":' + " " * 17 + "1}")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "a '.ref' out of the schema"),
        ({"$ref": "#/$defs/missing"}, "'#/.defs/missing' leads nowhere"),
        ({"$ref": "#"}, "no answer fits"),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "no answer fits",
        ),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "no answer fits: minLength"),
        ({"$ref": "#name"}, "to an anchor"),
        ({"items": 5}, "must be an object or a bool, got 5"),
        ({"properties": {"a": 5}}, "must be an object or a bool, got 5"),
        ("{", "bad JSON schema"),
        ({"a": {1, 2}}, "bad JSON schema"),
        ({"minimum": float("nan")}, "bad JSON schema"),
        ({"type": "objec"}, "Invalid type: objec"),
        (False, "no answer fits"),
        ({"const": "\ud800"}, "half of a character"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        COMPILER.matcher(Guide.json_schema(schema), (EOS,))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Guide.choices([]), ValueError, "one or more non-empty strings"),
        (lambda: Guide.choices("yes"), ValueError, "one or more non-empty strings"),
        (lambda: Guide.choices(["a", ""]), ValueError, "one or more non-empty strings"),
        (lambda: Guide.choices(["a", 1]), ValueError, "one or more non-empty strings"),
        (lambda: Guide.choices(["\ud800"]), ValueError, "guide's choices has .*half of a char"),
        (lambda: Guide.regex(5), TypeError, "needs a str, got int"),
        (lambda: Guide.regex("(a"), ValueError, "regex cannot be used: .* unterminated"),
        (lambda: Guide.regex("[^\\s\\S]"), ValueError, "no answer fits"),
    ],
)
def test_bad_guides(make, error, message):
    with pytest.raises(error, match=message):
        COMPILER.compile(make())


X_IS_A_DIGIT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}


def call_of(name, content):
    return {"begin": f"<f={name}>", "content": content, "end": "</f>"}


CALLS = {
    "triggers": ["<f="],
    "tags": [
        call_of("a", {"type": "json_schema", "json_schema": X_IS_A_DIGIT, "style": "json"}),
        call_of('"é\\\n🦊', {"type": "regex", "pattern": "[ab]+"}),
    ],
}
ONCE = {"at_least_one": True, "stop_after_first": True}
CHOICE = {
    "type": "sequence",
    "elements": [
        {"type": "or", "elements": [{"type": "const_string", "value": v} for v in ("x", 'y"')]},
        {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "-"}},
        {
            "type": "optional",
            "content": {"type": "grammar", "grammar": 'root ::= "a" other\nother ::= "b"'},
        },
    ],
}


@pytest.mark.parametrize(
    ("tag", "yes", "no"),
    [
        (
            {"format": {"type": "triggered_tags", **CALLS}},
            ["", "any", 'so <f=a>{"x":3}</f> and <f="é\\\n🦊>ab</f>!', "<f"],
            ["<f=b>", '<f=a>{"x":10}</f>', "<f=a>", '<f=a>{"x":1,"y":2}</f>', '<f="é\\\n🦊>c</f>'],
        ),
        (
            {"format": {"type": "triggered_tags", **CALLS, **ONCE}},
            ['<f=a>{"x":3}</f>'],
            ["", "any", '<f=a>{"x":3}</f> '],
        ),
        (
            {"format": {"type": "tags_with_separator", "tags": CALLS["tags"], "separator": ","}},
            ["", '<f=a>{"x":3}</f>,<f=a>{"x":4}</f>'],
            ["any", '<f=a>{"x":3}</f> <f=a>{"x":4}</f>'],
        ),
        (
            {
                "structures": [{"begin": "<f=a>", "schema": X_IS_A_DIGIT, "end": "</f>"}],
                "triggers": ["<f="],
                "at_least_one": True,
            },
            ['<f=a>{"x":3}</f> and any'],
            ["any", "<f=b>", '<f=a>{"x":"3"}</f>'],
        ),
        ({"format": CHOICE}, ["x-", 'y"--ab'], ["x", "z-", "x---", "x-a"]),
    ],
)
def test_a_structural_tag_is_kept_to(tag, yes, no):
    for guide in (Guide.structural_tag(tag), Guide.structural_tag(json.dumps(tag))):
        assert [text for text in yes if not accepts(guide, text)] == []
        assert [text for text in no if accepts(guide, text)] == []


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (None, "a format must be an object"),
        ({"type": "token", "token": 1}, "the format 'token' is not supported: use any_text,"),
        ({"type": "any_text", "max_tokens": 1}, "'max_tokens' of the format 'any_text'"),
        ({"type": "any_text", "excludes": [""]}, "any_text.excludes.0. is ''; it must be text"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, "'not' is not supported"),
        ({"type": "json_schema", "style": "qwen_xml"}, "'style' of the format 'json_schema'"),
        ({"type": "json_schema", "json_schema": False}, "no answer fits"),
        ({"type": "regex", "pattern": "(?=a)"}, r"\(\?="),
        ({"type": "regex"}, "regex.pattern is None; it must be text"),
        ({"type": "grammar", "grammar": "root ::= x"}, "Rule 'x' not found"),
        ({"type": "grammar", "grammar": "root ::= " + "(" * 300}, "over 200 open brackets"),
        ({"type": "repeat", "min": 1, "max": 10**6, "content": CHOICE}, "over 1000 times"),
        ({"type": "triggered_tags", **CALLS, "triggers": ["<g"]}, "has no trigger"),
        ({"type": "sequence"}, "elements"),
    ],
    ids=str,
)
def test_a_structural_tag_that_cannot_be_kept_to_is_refused(form, message):
    with pytest.raises(ValueError, match=f"bad structural tag: .*{message}"):
        Guide.structural_tag({"format": form})
    with pytest.raises(ValueError, match="'colour' is not supported"):
        Guide.structural_tag({"format": form, "colour": "red"})


def test_a_grammar_is_read_in_calls_that_grow_with_it():
    def calls(count):
        rules = (f'r{i} ::= "a" r{i + 1} | r{i + 1}' for i in range(count))
        profile = cProfile.Profile()
        profile.runcall(ebnf, "\n".join(["root ::= r0", *rules, f'r{count} ::= "b"']))
        return pstats.Stats(profile).total_calls

    assert calls(50) and calls(400) < 5 * calls(100)


def test_what_is_nested_too_deeply_is_refused():
    form = {"type": "any_text"}
    for _ in range(40):
        form = {"type": "optional", "content": form}
    with pytest.raises(ValueError, match="more than 32 formats inside of each other"):
        Guide.structural_tag({"format": form})
    schema = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        Guide.json_schema(schema)
    for _ in range(99_900):
        schema = schema["items"]
    with pytest.raises(ValueError, match="more than 64 schemas inside of each other"):
        Guide.json_schema(schema)


def test_a_guide_is_plain_data():
    for guide in (Guide.json_schema({"type": "null"}), Guide.regex("a"), Guide.choices(["a"])):
        other = pickle.loads(pickle.dumps(guide))
        assert other == guide and hash(other) == hash(guide)


def test_without_llguidance_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"llguidance: pip install -e '.\[serve\]'"):
        GuideCompiler(PIECES, VOCAB_SIZE)


def test_a_matcher_that_goes_back_is_as_it_was():
    guide = Guide.choices(["yes sir", "yesterday"])
    matcher = reached(guide, b"yes")
    before = {name: getattr(matcher, name) for name in ("stops_are_text", "is_over", "is_stuck")}
    tokens = allowed_tokens(matcher)
    assert [token for token in range(VOCAB_SIZE) if matcher.allows(token)] == sorted(tokens)
    matcher.add(list(b"terday"))
    assert matcher.is_over
    matcher.go_back_to(3)
    assert allowed_tokens(matcher) == tokens and matcher.num_tokens == 3
    assert {name: getattr(matcher, name) for name in before} == before
    matcher.add(list(b" sir"))
    assert matcher.is_over
