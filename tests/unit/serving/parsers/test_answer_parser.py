"""Reasoning and calls are found in answers of all dialects, however these are cut."""

import json
import os
import re
import time
from itertools import pairwise

import pytest
from call_behaviours import MISSES, NONE, NOW, PAGE, PUT, ROWS, SEP, TAGGED, WAYS, page
from call_behaviours import TOOLS as CALLED
from dialects import NAMES, WITH_TEXT, message_of, template, turn
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from model_answers import CALL, TOOLS, function

from megatron_hybrid.serving.parsers.choice import TOOL_PARSERS, style_of
from megatron_hybrid.serving.parsers.dialect import Content, Reasoning, ToolCall

EXAMPLES = int(os.environ.get("PARSER_EXAMPLES", "40"))
"""Of each property; `make soak` asks for more."""
BEGINS, CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"  # noqa: RUF001
END, ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001


def parts(name, texts, tools=TOOLS, reasoning="qwen3", **options):
    """What a parser gives of texts: (reasoning, content, calls)."""
    style = style_of("", name, "openai_gptoss" if name == "openai" else reasoning)
    parser = style.parser(tools, **options)
    found = [part for text in texts for part in parser.add(text)] + parser.end()
    said = {
        kind: "".join(part.text for part in found if isinstance(part, kind))
        for kind in (Reasoning, Content)
    }
    calls = [part for part in found if isinstance(part, ToolCall)]
    assert [call.index for call in calls] == list(range(parser.num_calls))
    assert len({call.id for call in calls}) == len(calls)
    return said[Reasoning], said[Content], [(c.name, json.loads(c.arguments)) for c in calls]


@pytest.mark.parametrize("dialect", sorted({row.dialect for row in ROWS}))
def test_what_is_a_call_and_what_content_is_the_same_in_all_dialects(dialect):
    wrong = []
    for row in [*ROWS, *MISSES]:
        if row.dialect == dialect:
            right = row.reasoning.strip(), row.content.strip(), row.calls
            for texts in ([row.text], list(row.text)):
                *said, calls = parts(dialect, texts, CALLED, is_thinking=row.thinks)
                if (got := (*map(str.strip, said), calls)) != right:
                    wrong.append((row.behaviour, len(texts), row.text, got, right))
    assert not wrong


def test_each_dialect_has_its_rows():
    """Harmony, of which a call is a message, has its own."""
    shown = [TOOL_PARSERS[name] for name in (*WAYS, "openai")]
    assert all(any(dialect is each for each in shown) for dialect in TOOL_PARSERS.values())


def test_the_page_shows_all_rows():
    assert len(ROWS) >= 300
    assert PAGE.read_text(encoding="utf-8") == page()


def cut(text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


WEATHER, TIME = ("weather", {"city": "Łódź", "days": 3}), ("time", {})
JSON = '{"city": "Łódź", "days": 3}'


# https://cookbook.openai.com/articles/openai-harmony
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>a <b<|end|><|start|>assistant<|channel|>final<|message|>"
            "Hi\n",
            ("a <b", "Hi\n", []),
        ),
        (
            "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant to=functions.time"
            "<|channel|>commentary json<|message|>{}",
            ("", "Well.", [TIME]),
        ),
        ("No header.<|end|>", ("", "No header.", [])),
        ("<|channel|>fin", ("", "", [])),
        ("<|channel|>final<|mess|>{}", ("", "<|channel|>final<|mess|>{}", [])),
        ("Hi<|start|>assistant!", ("", "Hi<|start|>assistant!", [])),
        ("Hi<|end|><|start|>assistant", ("", "Hi", [])),
    ],
)
def test_harmony_is_messages_in_channels(text, expected):
    for texts in ([text], list(text)):
        assert parts("openai", texts) == expected


def xml(**values):
    tags = (f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in values.items())
    return f"<tool_call>\n<function=edit>\n{''.join(tags)}</function>\n</tool_call>"


EDIT = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "on": {"type": "boolean"},
    "days": {"$ref": "#/$defs/Days"},
    "many": {"type": ["array", "object"]},
    "any": True,
    "title": {"type": "str"},
}
TYPED = function("edit", **EDIT)
TYPED["function"]["parameters"]["$defs"] = {"Days": {"enum": [1, 2, None]}}
NESTED = f"Write:\n{xml(path='a')}\nDone"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"text": "line\n"}, "line\n"),
        ({"text": "\nline"}, "\nline"),
        ({"text": ' "12" '}, ' "12" '),
        ({"text": "a </parameter> b"}, "a </parameter> b"),
        ({"text": "a\n</parameter>\nb"}, "a\n</parameter>\nb"),
        ({"text": "</function>\n<tool_call>"}, "</function>\n<tool_call>"),
        ({"text": NESTED}, NESTED),
        ({"text": "null"}, "null"),
        ({"zip": "null"}, None),
        ({"zip": "None"}, None),
        ({"zip": "12"}, "12"),
        ({"on": "True"}, True),
        ({"on": "false"}, False),
        ({"on": "maybe"}, "maybe"),
        ({"days": "2"}, 2),
        ({"days": "None"}, None),
        ({"many": '[1, {"a": "b"}]'}, [1, {"a": "b"}]),
        ({"any": "1.5"}, 1.5),
        ({"any": "True"}, "True"),
        ({"any": '"a"'}, '"a"'),
        ({"any": "1e999"}, "1e999"),
        ({"unknown": "3"}, 3),
        ({"title": "12"}, "12"),
    ],
)
def test_a_tagged_value_keeps_every_byte_and_its_type(given, expected):
    ((_, found),) = parts("qwen3_coder", [xml(**given)], [TYPED])[2]
    assert list(found.values()) == [expected] and type(found.popitem()[1]) is type(expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("hermes", f"<tool_call>{call}</tool_call>")
            for call in (
                '{"name": "time", "arguments": {"a": "\\ud800"}}',
                '{"name": "time", "arguments": {"a": 1e999}}',
                '{"name": "time", "arguments": {}, "parameters": {"a": 1}}',
                '{"name": "time", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}",
            )
        ),
        ("qwen3_coder", xml(days="1</parameter>\n2")),  # no text, so it cannot hold a tag
        ("qwen3_coder", xml(path="a > b").replace("</parameter>", "")),
        ("qwen3_coder", xml(path="1", text="2").replace("<parameter=t", "parameter=t")),
        ("qwen3_coder", "<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</parameter>\n"),
        ("llama3_json", '{"name": "time", "parameters": {"a": 1'),
        ("llama3_json", '{"a": 1} is JSON'),
        ("llama4_pythonic", "[1, 2] is a list"),
        ("llama4_pythonic", "[link](time)"),
        ("llama4_pythonic", "[time(a=1"),
        ("llama4_pythonic", "[time(1)] [time(a=b)] [time(a=1, a=2)]"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("gemma4", '<|tool_call>call:time{a:<|"|>b}<tool_call|>'),
        ("deepseek_v31", f"{BEGINS}{CALLS}time{SEP}{{{END}{ENDS}"),
    ],
)
def test_an_odd_call_is_content(name, text):
    tools = [*TOOLS, TYPED]
    for texts in ([text], list(text)):
        assert parts(name, texts, tools) == ("", text, [])
        assert parts(name, ["Well.\n", *texts], tools) == ("", f"Well.\n{text}", [])
    assert parts(name, [text], tools, must_call=True) == ("", "", [])


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("  Hello \n", {}, ("", "  Hello \n", [])),
        ("<think>\nhm\n</think>\n\nYes", {}, ("hm", "Yes", [])),
        ("<think>hm", {"reasoning": "none"}, ("", "<think>hm", [])),
        ("hm, a < b\n</think>\n\nYes", {"is_thinking": True}, ("hm, a < b", "Yes", [])),
        ("never ends", {"is_thinking": True}, ("never ends", "", [])),
        (f"<think>a</think>{CALL} ok", {}, ("a", "ok", [WEATHER])),
        (CALL[:-12], {}, ("", "", [WEATHER])),  # the end mark was a stop
        ("a <tool_ca", {}, ("", "a <tool_ca", [])),
    ],
)
def test_the_parts_of_an_answer(text, options, expected):
    for texts in ([text], list(text)):
        assert parts("hermes", texts, **options) == expected


def test_a_schema_that_refers_to_itself_costs_little():
    several = {"anyOf": [{"$ref": "#/$defs/a"}] * 2}
    names = [f"a{i}" for i in range(60)]
    definitions = {a: {"anyOf": [{"$ref": f"#/$defs/{b}"}] * 3} for a, b in pairwise(names)}
    tool = function("f", x=several, y={"$ref": "#/$defs/a0"}, z={"$ref": "#/$defs/z"})
    given = {"a": several, "z": {"$ref": "#/$defs/z"}, names[-1]: {"type": "null"}}
    tool["function"]["parameters"]["$defs"] = definitions | given
    text = "".join(f"<parameter={k}>\nnull\n</parameter>\n" for k in "xyz")
    text = f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"
    assert parts("qwen3_coder", [text], [tool])[2] == [("f", dict.fromkeys("xyz"))]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json", "gemma4", "openai"])
def test_a_long_call_is_looked_at_once(name):
    """A file full of marks, token by token: the time grows with its length."""
    written = "</tool_call> } ] <|call|> </parameter>x <tool_call|> 'a' \\" * 700
    text = turn(name, message_of(name, [("edit", {"path": written})]))
    began, style = time.process_time(), style_of("", name, "openai_gptoss")
    parser = style.parser([FUZZED])
    pieces = (text[start : start + 4] for start in range(0, len(text), 4))
    (call,) = [part for piece in pieces for part in parser.add(piece)] + parser.end()
    assert json.loads(call.arguments) == {"path": written}
    assert time.process_time() - began < 5  # 0.2 s alone


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "openai"])
def test_an_open_call_is_not_copied_at_each_token(name):
    begun = turn(name, message_of(name, [("edit", {"path": "x" * 8_000_000})]))[:8_000_000]
    parser, began = style_of("", name, "openai_gptoss").parser([FUZZED]), time.process_time()
    assert parser.add(begun) + [part for _ in range(10_000) for part in parser.add("x")] == []
    assert time.process_time() - began < 2  # 10 s, if it was


@pytest.mark.parametrize("name", WAYS)
def test_marks_that_begin_no_call_cost_what_their_bytes_do(name):
    """CPU seconds as the input grows to ten times."""
    one, costs = WAYS[name].write(*PUT), []
    unit = WAYS[name].begin + one[: len(one) // 2]
    for size in (15_000, 150_000):
        parser, began = style_of("", name).parser(CALLED), time.process_time()
        parser.add(unit * (size // len(unit)))
        parser.end()
        costs.append(time.process_time() - began)
    assert costs[1] < 12 * costs[0] + 0.3, costs


@pytest.mark.parametrize("name", [each for each in TAGGED if each != "glm45"])
def test_space_in_a_tag_is_read_once(name):
    tag = WAYS[name].begin + WAYS[name].write(*PUT).partition("put")[0].rstrip('"')
    parser, began = style_of("", name).parser(CALLED), time.process_time()
    parser.add(tag + " " * 20_000 + WAYS[name].end), parser.end()
    assert time.process_time() - began < 2  # 20 s, if each place was tried with each other


def test_a_reading_parser_holds_nothing_back_without_reason():
    parser = style_of("<think>", "hermes").parser(TOOLS)
    assert parser.add("Once") == [Content("Once")]
    assert parser.add(" upon <") == [Content(" upon")]
    assert parser.add("b") == [Content(" <b")]
    assert [type(part) for part in parser.add(f"{CALL}")] == [ToolCall]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "openai"])
def test_calls_come_with_their_last_token(name):
    """Not at the end of the answer. Of harmony the token that ends a call ends the answer."""
    text = turn(name, message_of(name, [WEATHER, TIME]))
    for texts in ([text], list(text)):
        parser = style_of("", name).parser(TOOLS)
        found = [part for each in texts for part in parser.add(each)]
        assert [part.name for part in found] == ["weather", "time"] and parser.end() == []


@pytest.mark.parametrize("name", NAMES)
def test_calls_go_back_into_the_template_by_their_ids(name):
    given = [TIME] if name == "openai" else [WEATHER, TIME]
    parser = style_of("", name).parser(TOOLS)
    text = turn(name, message_of(name, given))
    found = [part.to_json() for part in parser.add(text) + parser.end()]
    if name not in WITH_TEXT:
        for call in found:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    again = turn(name, {"role": "assistant", "content": "", "tool_calls": found})
    if name == "mistral":  # whose model writes no ids
        text, again = (re.sub('"id": "[^"]*"', '"id"', each) for each in (text, again))
    assert again == text


def test_arguments_are_the_model_s_own_json():
    written = '{"b": 1.50, "a":  [1e2, 12345678901234567890.123456789]}'
    parser = style_of("", "hermes").parser([function("time")])
    (call,) = parser.add(f'<tool_call>{{"arguments": {written}, "name": "time"}}</tool_call>')
    assert call.arguments == written


@pytest.mark.parametrize("name", NAMES)
def test_the_chat_template_shows_its_dialect(name):
    shown = style_of(template(name))
    assert shown.dialect is style_of("", name).dialect


# Fuzz ---------------------------------------------------------------------------------------------

MARKS = (
    *("<tool_call>", "</tool_call>", "</parameter>", "</function>", "<parameter=", "<think>"),
    *("[TOOL_CALLS]", "</arg_value>", "</invoke>", "[", "]", "{", "}", '"', "'", "\\", ";", ","),
    *("<|call|>", "<tool_call|>", "</TOOLCALL>", "\n", " ", "(", ")", "=", "</", "é", "🙂"),
)
PLAIN = st.text("abż ", min_size=1, max_size=6).map(str.strip).filter(bool)
HARD = st.lists(st.one_of(st.sampled_from(MARKS), PLAIN), max_size=6).map("".join)
FUZZED = function(
    "edit",
    path={"type": "string"},
    count={"type": "integer"},
    ratio={"type": "number"},
    on={"type": "boolean"},
    note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    more={"type": "object"},
    tags={"type": "array"},
)
FUZZED_TOOLS = [FUZZED, function("time")]


def arguments(texts):
    fields = {
        "path": texts,
        "count": st.integers(-9, 10**20),
        "ratio": st.floats(0.5, 9).map(lambda value: round(value, 3)),
        "on": st.booleans(),
        "note": st.one_of(
            st.none(), texts.filter(lambda t: t.strip().lower() not in ("null", "none"))
        ),
        "more": st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 9), max_size=2),
        "tags": st.lists(st.integers(0, 9), max_size=2),
    }
    return st.fixed_dictionaries({}, optional=fields)


BARE = ("llama3_json", "llama4_json", "pythonic", "llama4_pythonic")
"""Whose calls stand alone."""


def calls(texts):
    edit = arguments(texts).map(lambda given: ("edit", given))
    return st.lists(st.one_of(edit, st.just(("time", {}))), min_size=1, max_size=3)


def alone(name, given):
    """Harmony writes one call in an answer."""
    return given[:1] if name == "openai" else given


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_calls_that_a_template_writes_are_read_back(name, data):
    """However many, whatever the cuts, and each as soon as it is whole."""
    given = alone(name, data.draw(calls(PLAIN)))
    content = "" if name in ("openai", "mistral", *BARE) else data.draw(PLAIN)
    text = turn(name, message_of(name, given, content))
    found = parts(name, cut(text, data), FUZZED_TOOLS)
    assert found == ("", content.strip(), [tuple(call) for call in given]), text


HARMONY_PIECES = (
    *("<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|message|>", "<|channel|>", "<|", "|>"),
    *("assistant", "analysis", "final", " to=functions.put", "<|constrain|>json"),
    *("{}", "x, y", "!"),
)


def pieces_of(name):
    """Marks of a dialect, calls, and parts of both."""
    if (way := WAYS.get(name)) is None:
        return HARMONY_PIECES
    whole = [way([PUT]), way([NOW]), way([NONE]), way.write(*PUT), way.begin, way.end]
    dialect, more = TOOL_PARSERS[name], ("</think>", "<think>", "text ", " ", "\n")
    whole += [*dialect.inner, *dialect.unsaid, *more, *"\"'{}[](),;\\"]
    return [*whole, *(half for each in whole for half in (each[: len(each) // 2], each[-3:]))]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from([*WAYS, "openai", "openai"]), st.data())
def test_any_pieces_of_marks_are_read_to_the_end_alike(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from(pieces_of(name)), max_size=9)))
    options = {"tools": CALLED, "is_thinking": data.draw(st.booleans())}
    assert parts(name, cut(text, data), **options) == parts(name, [text], **options)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_hard_values_are_read_back_or_content(name, data):
    given = alone(name, data.draw(calls(HARD)))
    texts = [v for _, each in given for v in each.values() if isinstance(v, str)]
    if name == "lfm2":  # writes texts without escapes
        assume(not any(re.search(r"['\\]", text) for text in texts))
    text = turn(name, message_of(name, given))
    _, content, found = parts(name, cut(text, data), FUZZED_TOOLS)
    if not content:
        assert found == given, text
    is_json = name not in ("qwen3_coder", "glm45", "minimax_m2", "lfm2", "gemma4", "functiongemma")
    assert not (is_json and content), text
    assert all(call in given for call in found), text


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_damage_gives_content_or_the_call(name, data):
    given = alone(name, data.draw(calls(PLAIN)))
    text = turn(name, message_of(name, given))
    fixed = {"edit", "time", "function"}  # a damaged name or value is another call
    for _, each in given:
        for key, value in each.items():
            fixed |= {key, str(value), json.dumps(value, ensure_ascii=False).strip('"{}[]')}
            fixed |= set(map(str, value.values() if isinstance(value, dict) else ()))
    spans = [
        (found.start(), found.end())
        for each in fixed - {""}
        for found in re.finditer(re.escape(each), text)
    ]
    free = [i for i in range(len(text)) if not any(a - 2 <= i <= b + 1 for a, b in spans)]
    assume(free)
    at, by = data.draw(st.sampled_from(free)), data.draw(st.sampled_from('<>/"{}[]:,=|x1 '))
    kind = data.draw(st.sampled_from(["delete", "replace", "insert", "cut"]))
    end = len(text) if kind == "cut" else at + (kind != "insert")
    damaged = text[:at] + ("" if kind in ("delete", "cut") else by) + text[end:]
    _, content, found = parts(name, cut(damaged, data), FUZZED_TOOLS)
    whole = parts(name, [damaged], FUZZED_TOOLS)
    assert (content, found) == whole[1:], damaged
    # The next parameter of GLM is like the end of one without a mark, and "10" like "1,0".
    unseen = {"glm45": kind == "cut", "functiongemma": text[at] == ","}.get(name, False)
    assert unseen or all(call in given for call in found), damaged
    assert found or content or kind == "cut", damaged


WORDS = ("type", "properties", "required", "enum", "const", "anyOf", "allOf", "$ref", "#", "string")
LEAVES = [None, True, 1, "#/properties/a", *WORDS]
SCHEMAS = st.deferred(
    lambda: st.one_of(
        st.sampled_from(LEAVES),
        st.lists(SCHEMAS, max_size=2),
        st.dictionaries(st.sampled_from([*WORDS, "a", "0"]), SCHEMAS, max_size=3),
    )
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(SCHEMAS, SCHEMAS)
def test_no_schema_breaks_an_answer(parameters, inner):
    """Those of requests are not checked, unless a call is forced."""
    for whole in (parameters, {"type": "object", "properties": {"a": inner, "b": parameters}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": whole}}
        text = xml(a="1", b="None").replace("function=edit", "function=f")
        ((_, found),) = parts("qwen3_coder", [text], [tool])[2]
        assert found.keys() == {"a", "b"}
        try:
            style_of("", "qwen3_coder").dialect.form([tool["function"]], True)
            style_of("", "pythonic").dialect.form([tool["function"]], True)
        except (TypeError, ValueError):
            pass
