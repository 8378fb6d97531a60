"""Regular expressions: each construct is that of Python, or refused by its name."""

import json
import re

import pytest
from guided import COMPILER, accepts

from megatron_hybrid.text.guide import Guide


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("(?=a)b", r"\(\?=...\)"),
        ("(?!a)b", r"\(\?!...\)"),
        ("a(?<=a)b", r"\(\?<=...\)"),
        ("a(?<!b)b", r"\(\?<!...\)"),
        (r"(a)\1", "a backreference"),
        ("(?P<n>a)(?P=n)", r"\(\?P[<=]"),
        ("(a)?(?(1)b|c)", r"\(\?\("),
        ("a*+", "a possessive repetition"),
        ("(?>a|ab)c", r"\(\?>"),
        (r"\bab", r"\\b"),
        (r"a\Bb", r"\\B"),
        ("(?i)a", "a flag"),
        ("(?m:a)", r"\(\?m"),
        ("(?x: a)", r"\(\?x"),
        ("a^b", r"'\^' inside of 'a\^b'"),
        ("a$b", r"'\$' inside of 'a\$b'"),
        (r"a\Zb", r"'\$' inside"),
        ("x?^a", r"'\^' inside"),
        ("(^a)*", r"'\^' inside"),
    ],
)
def test_what_no_grammar_holds_is_refused_by_name(pattern, what):
    re.compile(pattern, re.DOTALL | re.ASCII)
    with pytest.raises(ValueError, match=f"{what}.* is not supported in a pattern"):
        COMPILER.compile(Guide.regex(pattern))
    with pytest.raises(ValueError, match="is not supported in a pattern"):
        Guide.json_schema({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (r"a\sb", ["a b", "a\nb"], ["a\u00a0b", "ab"]),
        ("^a$", ["a"], ["a\n", "^a$"]),
        ("^ac$|^bc$", ["ac", "bc"], ["abc"]),
        (r"\Aa\Z", ["a"], ["a\n"]),
        (r"[^\W\d]+", ["ab_"], ["a1", "é", ""]),
        (r"(?P<x>a)(?:b)??", ["a", "ab"], ["b"]),
        ("[]a]{,2}", ["", "]a", "a"], ["aaa"]),
        ("a.[^a]", ["a\nb", "aéé"], ["ab", "a\na"]),
        (r"\W\D\S", ["- a", "éé."], ["a-a", "-1-", "-- "]),
    ],
)
def test_a_regex_holds_from_end_to_end(pattern, yes, no):
    compiled = re.compile(pattern, re.DOTALL | re.ASCII)
    assert all(map(compiled.fullmatch, yes)) and not any(map(compiled.fullmatch, no))
    guide = Guide.regex(pattern)
    assert [accepts(guide, text) for text in (*yes, *no)] == [True] * len(yes) + [False] * len(no)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("b", ["b", "abc", 'é"b\n'], ["", "ac"]),
        ("^b", ["b", "bc"], ["ab"]),
        ("b$", ["b", "ab"], ["bc"]),
        ("^a|b$", ["ac", "cb"], ["ca", "bc"]),
        ("^a$|^b$", ["a", "b"], ["ab"]),
        (r"^[^\s]$", ["é", "\\"], [" ", "\u00a0", "\ufeff", "\x1c"]),
        (r"^\w$", ["a", "_"], ["é", "-"]),
        (r"^\W$", ["-", "☃"], ["é", "a"]),
        (r"^\D$", ["é"], ["٣", "3"]),
        ("^.$", ["a", "\t"], ["\n", "\u2028"]),
        (r'^["\\/\n]$', ['"', "\\", "/", "\n"], ["a"]),
        (r'^[^\\/:*?"<>|]+$', ["a b.c", "\x01\n"], ['a"', "a\\", '"', "a/b"]),
        (r'^([^"\n]|\n)[\x00-\x1f]$', ["\n\x1f"], ['"\n', '\n"', "\n\\"]),
    ],
)
def test_a_pattern_of_a_schema_is_searched_by_the_rules_of_ecmascript_and_python(pattern, yes, no):
    guide = Guide.json_schema({"type": "string", "pattern": pattern})
    assert all(re.search(pattern, text) for text in yes)
    for text in (*yes, *no):
        assert accepts(guide, json.dumps(text, ensure_ascii=False)) == (text in yes), text


@pytest.mark.parametrize(
    "pattern",
    [r"\Aa", r"a\Z", r"\101", r"\a", "(?P<n>a)", "(?#c)a", "[]a]", "[^]a]", "a{,2}", "a{", "[[a]"],
)
def test_what_ecmascript_reads_otherwise_is_refused_in_a_schema(pattern):
    with pytest.raises(ValueError, match="is not supported in a pattern"):
        Guide.json_schema({"type": "string", "pattern": pattern})


def test_a_regex_nested_too_deeply_is_refused():
    with pytest.raises(ValueError, match=r"flatten it|nested too deeply"):
        COMPILER.compile(Guide.regex("(a|" * 300 + "b" + ")" * 300))
    with pytest.raises(ValueError, match="nested too deeply"):
        COMPILER.compile(Guide.regex("(" * 30_000 + ")" * 30_000))
