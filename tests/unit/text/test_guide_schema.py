"""JSON Schema: each keyword is kept to, or refused by its name."""

import datetime
import ipaddress
import json
import uuid
from random import Random

import jsonschema
import pytest
from guided import accepts, walk

from megatron_hybrid.text.guide import Guide
from megatron_hybrid.text.guide_schema import FORMATS


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"type": "integer", "multipleOf": 99991}, "'multipleOf' whose common multiple is over"),
        ({"type": "integer", "multipleOf": 0}, "'multipleOf' is 0; it must be a number above 0"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"type": "object", "unevaluatedProperties": False}, "'unevaluatedProperties' is not"),
        ({"type": "object", "nullable": True}, "'nullable' is not supported"),
        ({"type": "string", "contentEncoding": "base64"}, "'contentEncoding' is not supported"),
        ({"type": "array", "contains": {}}, "'contains' is not supported"),
        ({"type": "array", "additionalItems": False}, "'additionalItems' is not supported"),
        ({"type": "array", "items": [{}]}, "'items' as a list"),
        ({"type": "object", "dependentRequired": {}}, "'dependentRequired' is not supported"),
        ({"if": {}, "then": {}}, "'if' is not supported"),
        ({"anyOf": [{"not": {}}]}, "'not' is not supported"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "'not' is not supported"),
        ({"type": "string", "format": "int64"}, "the format 'int64' .those held are date, time"),
        ({"type": "string", "pattern": "^(?!a).$"}, r"\(\?!...\) is not supported"),
        ({"type": "string", "pattern": r"\p{L}"}, r"bad escape \\p"),
        ({"patternProperties": {"a": {}, "b": {}}}, "'patternProperties' are supported only"),
        ({"propertyNames": {}}, "'propertyNames' is not supported"),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, "min/maxProperties only"),
        ({"minProperties": 2}, "'minProperties' above 1, the required ones and one more"),
        ({"items": {"$id": "x"}}, "'.id' in an inner schema"),
        ({"const": 9007199254740993}, "'const' with 9007199254740993, which has more digits"),
        ({"enum": [1, {"a": [123456789.12345679]}]}, "'enum' with 123456789.12345679, which"),
        ({"maximum": -(10**29), "minimum": -(10**30)}, "'maximum' with -1000"),
        ({"exclusiveMaximum": 0.30000000000000004}, "'exclusiveMaximum' with 0.30000000000000004"),
        ({"pattern": r"\x00"}, "NUL is not supported in a pattern"),
        ({"patternProperties": {}, "required": ["\0"]}, "NUL in a schema with 'patternProperties'"),
        ({"minimum": True}, "'minimum' is True; it must be a number"),
        ({"exclusiveMinimum": True}, "'exclusiveMinimum' is True; it must be a number"),
        ({"minLength": -1}, "'minLength' is -1; it must be a whole number from 0"),
        ({"enum": "a"}, "enum must be an array"),
        ({"required": [1]}, r"'required'\[0\] is 1; it must be text"),
        ({"properties": []}, r"'properties' is \[\]; it must be a mapping"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf' is supported only"),
        ({"oneOf": [{"properties": {"a": {}}}, {"type": "object"}]}, "'oneOf' is supported only"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "'oneOf' is supported only"),
    ],
)
def test_a_keyword_that_is_not_kept_to_is_refused_by_name(schema, what):
    with pytest.raises(ValueError, match=what):
        Guide.json_schema(schema)
    for outer in (
        {"items": schema},
        {"properties": {"p": schema}},
        {"anyOf": [schema, {"type": "null"}]},
    ):
        if "$ref" not in schema:
            with pytest.raises(ValueError, match=what):
                Guide.json_schema(outer)


def test_a_schema_that_no_answer_fits_is_refused():
    for schema in ({"anyOf": []}, {"type": "array", "items": {"anyOf": []}, "minItems": 1}):
        with pytest.raises(ValueError, match="no answer fits"):
            Guide.json_schema(schema)


TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["of"],
        },
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"minimum": 3}, ["3", "4.5"], ["1", "2.99", "-3"]),
        ({"type": "integer", "format": "int32"}, [f"{-(2**31)}"], [f"{2**31}", "1.5"]),
        ({"type": "number", "format": "double"}, ["1.5"], ['"1"']),
        ({"type": "string", "format": "path"}, ['"a/b"'], ["1"]),
        (
            {"type": ["integer", "null"], "format": "int64", "minimum": 7},
            [f"{2**63 - 1}", "null"],
            [f"{2**63}", "6"],
        ),
        ({"maxLength": 1}, ['"a"', '"😀"', r'"\ud83d\ude00"'], ['"ab"']),
        ({"enum": [1, "a", 2.0], "type": "string"}, ['"a"'], ["1"]),
        ({"enum": [1, "a", 2.0], "type": "integer", "minimum": 2}, ["2"], ["1"]),
        ({"maximum": 2**63 - 1, "type": "integer"}, [f"{2**63 - 1}"], [f"{2**63}"]),
        ({"enum": [2**53 - 1, 0.123456789012345]}, [f"{2**53 - 1}", "0.123456789012345"], ["0.1"]),
        ({"type": "integer", "multipleOf": 15}, ["30", "-45", "0"], ["31", "5"]),
        ({"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 0}, ["0.25"], ["0.255", "0"]),
        ({"type": "string", "pattern": "[A-Z]{2}[0-9]+", "maxLength": 3}, ['"AB1"'], ['"AB12"']),
        ({"format": "uri", "minLength": 9, "type": "string"}, ['"http://ab"'], ['"http://a"']),
        ({"format": "date", "pattern": "^2"}, ['"2024-02-29"', "1"], ['"1996-02-29"']),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, ["3"], ["2", '"a"']),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}], "minimum": 3}, ["null", "3"], ["2"]),
        ({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}}, ["3"], ["4"]),
        (
            {"type": "object", "required": ["x"], "additionalProperties": {"type": "integer"}},
            ['{"x": 1}', '{"x": 1, "y": 2}'],
            ["{}", '{"x": "a"}', r'{"x": 1, "\u0078": 2}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
            ["{}", '{"a": "x"}', '{"c": 1}'],
        ),
        ({"oneOf": [{"const": "b"}, {"const": "a"}]}, ['"a"'], ["1"]),
        ({"enum": [1, True, "ab"], "const": True}, ["true"], ["1"]),
        ({"type": ["integer", "null"], "maximum": 5}, ["5", "-7", "null"], ["6", "1.5"]),
        ({"type": "integer", "exclusiveMinimum": 9, "maximum": 120}, ["10", "120"], ["9", "121"]),
        ({"exclusiveMinimum": 0, "allOf": [{"maximum": 0.5}]}, ["0.5", "0.001"], ["0", "0.0"]),
        ({"exclusiveMaximum": -2, "minimum": -2.5}, ["-2.5", "-2.01"], ["-2", "-2.0"]),
        ({"type": "number", "exclusiveMinimum": 0.1}, ["0.2", "0.10001"], ["0.1", "0.10", "0"]),
        ({"type": "number", "minimum": -1.5, "maximum": 0}, ["-1.5", "0", "-0.7"], ["-1.51", "1"]),
        ({"type": "string", "minLength": 2}, [r'"\n\u00e9"', '"ab"'], ['"a"', r'"\ud800\ud800"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-30"', '"1900-02-29"']),
        ({"prefixItems": [{"type": "null"}, {}]}, ["[]", "[null, 1, 2]"], ["[1]"]),
        (
            {"prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2, "maxItems": 3},
            ["[1, 2]", "[1,2,2]"],
            ["[1]", "[1,1]", "[1,2,2,2]"],
        ),
        ({"items": False}, ["[]"], ["[1]"]),
        ({"uniqueItems": False, "maxItems": 1}, ["[1]"], ["[1,1]"]),
        ({"minItems": 1, "maxItems": 10**9, "items": {"const": 1}}, ["[1]", "[1,1]"], ["[]"]),
        ({"minLength": 1, "maxLength": 10**9}, ['"a"', '"aaa"'], ['""']),
        (
            {"properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
            ['{"a": 1, "b": 2}', '{"aa": 2, "": 2}', "{}"],
            ['{"a": 2}', '{"a": 1, "a": 2}', r'{"\u0061": 2}', '{"b": 1}'],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}
            | {"additionalProperties": False},
            ['{"a": 1, "b": 1}', '{"b": 1}'],
            ["{}"],
        ),
        ({"type": "object", "maxProperties": 1}, ["{}", '{"a": 1}'], ['{"a": 1, "b": 2}']),
        (
            {"properties": {"b": {"const": 1}}, "patternProperties": {"^a": {"const": 2}}}
            | {"type": "object", "additionalProperties": False},
            ['{"b": 1, "ab": 2}', '{"a": 2}'],
            ['{"b": 2}', '{"a": 1}', '{"c": 2}'],
        ),
        ({"patternProperties": {'[^"]': {"const": 1}}}, ['{"\\"": 2}'], [r'{"\u0061": 2}']),
        ({"allOf": [{"type": "null", "title": "n"}], "title": "o"}, ["null"], ["1"]),
        ({"oneOf": [{"type": "null"}, {"const": 3}]}, ["null", "3"], ["1"]),
        (
            {
                "oneOf": [
                    {"$ref": "#/$defs/a"},
                    {"type": "object", "properties": {"k": {"const": "b"}}}
                    | {"additionalProperties": False},
                ],
                "discriminator": {"propertyName": "k"},
                "$defs": {
                    "a": {"type": "object", "properties": {"k": {"const": "a"}, "v": {}}},
                },
            },
            ['{"k": "a", "v": 1}', '{"k": "b"}'],
            ["{}", '{"v": 1}', '{"k": "b", "v": 1}'],
        ),
        ({"$ref": "#/$defs/tree", **TREE}, ['{"of": []}', '{"of": [{"of": []}]}'], ["{}"]),
        ({"anyOf": [{"$ref": "#/$defs/a~1%25"}], "$defs": {"a/%": {"const": 1}}}, ["1"], ["2"]),
        ({"const": {"a": [1, {}], "b": "é"}}, ['{"a": [1, { }], "b": "é"}'], ['{"a": [1, {}]}']),
        (
            {"description": "d", "default": 1, "x-order": 3, "examples": [2], "type": "null"},
            ["null"],
            [],
        ),
        (True, ["1", "{}", '[{"a": null}]', '"a"', "-0.5e-7"], ["", "01", "nul", "Infinity"]),
        ({"items": {"type": "object", "properties": {"a": False}}}, ["[{}]"], ['[{"a": 1}]']),
    ],
)
def test_a_keyword_is_kept_to(schema, yes, no):
    guide = Guide.json_schema(schema)
    for answer in yes:
        jsonschema.validate(json.loads(answer), schema)
        assert accepts(guide, answer), answer
    for answer in no:
        assert not accepts(guide, answer), answer


def test_a_reference_to_itself_ends():
    """Where jsonschema's own recursion does not."""
    guide = Guide.json_schema({"$ref": "#/$defs/loop", **TREE})
    assert accepts(guide, "null") and not accepts(guide, "1")


CHECKS = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
}
EXAMPLES = {
    "date": (["0001-01-01", "2000-02-29", "9999-12-31"], ["0000-01-01", "2100-02-29", "2024-4-1"]),
    "time": (
        ["23:59:59Z", "00:00:00.123+05:30", "08:30:06z"],
        ["24:00:00Z", "12:00:00", "12:00:60Z"],
    ),
    "date-time": (["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29 10:00:00Z"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT1M", "P2W", "P3D"], ["P", "PT", "P1Y2D", "P1S", "1D"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
    "ipv4": (["0.0.0.0", "255.10.99.1"], ["256.1.1.1", "01.1.1.1", "1.1.1"]),
    "ipv6": (
        ["1:2:3:4:5:6:7:abcd", "::", "::1", "1::", "1:2:3:4:5:6:7::", "::ffff:192.168.0.1"],
        ["1:2:3", "g:2:3:4:5:6:7:8", "1::2::3", "1:2:3:4:5:6:7:8::", "1:2:3:4:5:6::1.2.3.4", ":1"],
    ),
    "hostname": (["a", "example.com", "a-b.c"], ["-a", "a..b", "a_b", "a-"]),
    "email": (
        ["a.b+c@example.com", r"\"a b\"@c", "a@[1.2.3.4]", "a@[IPv6:::1]"],
        ["a", "@b", "a..b@c", "a b@c", "a@[1.2.3]"],
    ),
    "uri": (["https://a.b:80/c?d=e#f", "ftp://x"], ["a", "https://a b", "http://a/%g"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_kept_to(name):
    guide, random = Guide.json_schema({"type": "string", "format": name}), Random(1)
    yes, no = EXAMPLES[name]
    assert all(accepts(guide, f'"{text}"') for text in yes)
    assert not any(accepts(guide, f'"{text}"') for text in no)
    walks = [walk(guide, random, b"0129-:.TZ") for _ in range(40)]
    texts = yes + [json.loads(answer) for answer in walks if answer]
    for text in texts:
        jsonschema.Draft202012Validator.FORMAT_CHECKER.check(text, name)
        CHECKS.get(name, str)(text.upper())  # of times Python reads no small letters


def test_the_rules_of_a_shared_schema_are_made_once():
    """A ladder of references, each with two ways down, has as many rules as rungs."""
    for name, begin, end in (("prefixItems", "[", "]"), ("anyOf", "", "")):
        rungs = {f"r{i}": {name: [{"$ref": f"#/$defs/r{i + 1}"}] * 2} for i in range(60)}
        schema = {"$ref": "#/$defs/r0", "$defs": {**rungs, "r60": {"type": "null"}}}
        assert accepts(Guide.json_schema(schema), begin * 60 + "null" + end * 60)


def test_a_one_of_takes_no_long_time():
    assert accepts(Guide.json_schema({"oneOf": [{"const": f"{i}"} for i in range(1000)]}), '"99"')
    rungs = {f"r{i}": {"oneOf": [{"$ref": f"#/$defs/r{i + 1}"}] * 2} for i in range(60)}
    with pytest.raises(ValueError, match="more than 64 schemas inside of each other"):
        Guide.json_schema({"$ref": "#/$defs/r0", "$defs": {**rungs, "r60": {"type": "null"}}})


def test_an_object_may_have_many_properties():
    properties = {f"p{i}": {"type": "integer"} for i in range(500)}
    guide = Guide.json_schema({"properties": properties, "additionalProperties": False})
    assert accepts(guide, '{"p0": 1, "p499": 2}') and not accepts(guide, '{"p9": 1, "p8": 2}')
    schema = {"properties": {**properties, "p500": {}}, "required": ["p7"]}
    assert accepts(Guide.json_schema(schema | {"type": "object"}), '{"p7": 1}')
    with pytest.raises(ValueError, match="'properties' with more than 500 that are not required"):
        Guide.json_schema({"properties": schema["properties"]})
