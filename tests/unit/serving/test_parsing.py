"""Reasoning and tool calls are found in answers, however these are cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_answers import CALL, TOOLS, function

from megatron_hybrid.serving.parsing import AnswerParser, Content, Reasoning, ToolCall

XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def parts(texts, **options):
    """What a parser gives of texts: (reasoning, content, calls)."""
    parser = AnswerParser(**options)
    found = [part for text in texts for part in parser.add(text)] + parser.end()
    said = {
        kind: "".join(part.text for part in found if isinstance(part, kind))
        for kind in (Reasoning, Content)
    }
    calls = [part for part in found if isinstance(part, ToolCall)]
    assert [call.index for call in calls] == list(range(parser.num_calls))
    return said[Reasoning], said[Content], [(c.name, json.loads(c.arguments)) for c in calls]


XML_CALL = ("weather", {"city": "12", "days": 3})
NUMBERS = ("weather", {"city": 12, "days": 3})
WEATHER = ("weather", {"city": "Łódź", "days": 3})
CASES = [
    ("Hello", {}, ("", "Hello", [])),
    ("  Hello \n", {"has_thoughts": True}, ("", "  Hello \n", [])),
    ("<think>\nhm\n</think>\n\nYes", {"has_thoughts": True}, ("hm", "Yes", [])),
    ("<think>\nhm\n</think>\n\nYes", {}, ("", "<think>\nhm\n</think>\n\nYes", [])),
    ("hm, a < b\n</think>\n\nYes", {"is_thinking": True}, ("hm, a < b", "Yes", [])),
    ("never ends", {"is_thinking": True}, ("never ends", "", [])),
    (CALL, {"tools": TOOLS}, ("", "", [WEATHER])),
    (CALL, {}, ("", CALL, [])),
    (f"Let me see.\n{CALL}\n{CALL}", {"tools": TOOLS}, ("", "Let me see.", [WEATHER, WEATHER])),
    (f"<think>a</think>{CALL} ok", {"tools": TOOLS, "has_thoughts": True}, ("a", "ok", [WEATHER])),
    (CALL[:-12], {"tools": TOOLS}, ("", "", [WEATHER])),  # the end mark was a stop
    (XML, {"tools": TOOLS}, ("", "", [XML_CALL])),
    ('{"name": "time", "parameters": {}}', {"tools": TOOLS}, ("", "", [("time", {})])),
    ('{"name": "time", "arguments": "{}"}', {"tools": TOOLS}, ("", "", [("time", {})])),
    ('{"name": "other"}', {"tools": TOOLS}, ("", '{"name": "other"}', [])),
    ('{"a": 1} is JSON', {"tools": TOOLS}, ("", '{"a": 1} is JSON', [])),
    ("<tool_call>no</tool_call>", {"tools": TOOLS}, ("", "<tool_call>no</tool_call>", [])),
    ("a <tool_ca", {"tools": TOOLS}, ("", "a <tool_ca", [])),
    # What is no call of a function, or no JSON, is content.
    *(
        (
            f"<tool_call>{call}</tool_call>",
            {"tools": TOOLS},
            ("", f"<tool_call>{call}</tool_call>", []),
        )
        for call in (
            '{"name": ["time"], "arguments": {}}',
            '{"name": "time", "arguments": {"a": "\\ud800"}}',
            '{"name": "time", "arguments": {"a": NaN}}',
            '{"name": "time", "arguments": {"a": 1e999}}',
        )
    ),
    (XML.replace("</parameter>", ""), {"tools": TOOLS}, ("", "", [XML_CALL])),
    (XML, {"tools": [function("weather", city=True, days={})]}, ("", "", [NUMBERS])),
    (f"{CALL}\n{CALL}", {"tools": TOOLS, "max_calls": 1}, ("", "", [WEATHER])),
    # A call that has to come, and was cut.
    ('{"name": "time", "argu', {"tools": TOOLS, "must_call": True}, ("", "", [])),
    (
        ' {"name": "time", "arguments": {}}',
        {"tools": TOOLS, "must_call": True},
        ("", "", [("time", {})]),
    ),
]


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
def test_the_parts_of_an_answer(text, options, expected):
    assert parts([text], **options) == expected


@settings(max_examples=300, deadline=None)
@given(case=st.sampled_from(CASES), data=st.data())
def test_parts_do_not_depend_on_how_the_answer_is_cut(case, data):
    text, options, expected = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    texts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert parts(texts, **options) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="<>/think_tool_call{} \na", max_size=60), st.data())
def test_any_text_is_parsed_alike_in_one_and_in_letters(text, data):
    options = {
        "tools": data.draw(st.sampled_from([(), TOOLS])),
        "has_thoughts": data.draw(st.booleans()),
        "is_thinking": data.draw(st.booleans()),
    }
    assert parts([text], **options) == parts(text, **options)


def test_content_is_not_held_back_without_reason():
    parser = AnswerParser(tools=TOOLS, has_thoughts=True)
    assert parser.add("Once") == [Content("Once")]
    assert parser.add(" upon <") == [Content(" upon")]
    assert parser.add("b") == [Content(" <b")]
