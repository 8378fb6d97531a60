"""Answers that have to call a function are guided in the form of each dialect."""

import pytest
from call_behaviours import WAYS
from dialects import NAMES, message_of, turn
from guided import accepts
from model_answers import function

from megatron_hybrid.serving.parsers.choice import style_of
from megatron_hybrid.serving.parsers.dialect import ToolCall
from megatron_hybrid.serving.protocols.fields import ChatFields
from megatron_hybrid.serving.protocols.request_mapping import guide_of

EDIT = function(
    "edit",
    path={"type": "string"},
    days={"$ref": "#/$defs/Days"},
    unit={"enum": ["C", "F"]},
    on={"type": "object", "properties": {"default": {"$ref": "#/$defs/Days"}}},
)
EDIT["function"]["parameters"] |= {"required": ["path"], "$defs": {"Days": {"type": "integer"}}}
TIME = function("time", zone={"const": "UTC"})
TIME["function"]["parameters"]["additionalProperties"] = False
CALLS = [("edit", {"path": "/tmp/ä b", "days": 12}), ("time", {"zone": "UTC"}), ("time", {})]
USER = {"role": "user", "content": "?"}


def form_of(name, thinks=None, tools=(EDIT, TIME), choice="required", **more):
    style = style_of("", name, "openai_gptoss" if name == "openai" else "qwen3")
    fields = ChatFields(messages=[USER], tools=list(tools), tool_choice=choice, **more)
    guide, field = guide_of(fields, style, thinks)
    assert field == "tool_choice"
    return style, fields, guide


@pytest.mark.parametrize("name", NAMES)
def test_forced_calls_have_the_form_of_the_template(name):
    style, fields, guide = form_of(name)
    calls = CALLS[: 1 if name == "openai" else 3]
    text = turn(name, message_of(name, calls)).strip()
    text = text.replace(', "id": "call00000"', "").replace(', "id": "call00001"', "")
    text = text.replace(', "id": "call00002"', "").replace("'", '"').replace("},\n{", "}, {")
    text = text.replace("[\n{", "[{").replace("}\n]", "}]")
    assert accepts(guide, text), text
    found = style.parser(**fields.parsed_by).add(text) + style.parser(**fields.parsed_by).end()
    assert all(isinstance(part, ToolCall) for part in found)
    assert not accepts(guide, text.replace("edit", "edat")) and not accepts(guide, f"Well. {text}")
    assert not accepts(guide, text.replace("12", "twelve"))
    one = turn(name, message_of(name, CALLS[:1])).strip().replace(', "id": "call00000"', "")
    one = one.replace("'", '"').replace("[\n{", "[{").replace("}\n]", "}]")
    for more in (
        {"parallel_tool_calls": False},
        {"choice": {"type": "function", "function": {"name": "edit"}}},
    ):
        _, _, single = form_of(name, **more)
        assert accepts(single, one) and (len(calls) == 1 or not accepts(single, text))


def test_a_guide_begins_behind_the_thought():
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for thinks, good, bad in (
        (True, f"any { {} } text</think>\n\n{call}", call),
        (False, f"<think>any</think>{call}", f"any</think>{call}"),
        (False, call, f"<think>{call}"),
        (None, call, f"<think>any</think>{call}"),
    ):
        _, _, guide = form_of("hermes", thinks)
        assert accepts(guide, good) and not accepts(guide, bad)


@pytest.mark.parametrize("name", sorted(WAYS.keys() - {*NAMES}))
def test_forced_calls_of_dialects_whose_template_is_not_here(name):
    guide = form_of(name)[2]
    assert accepts(guide, WAYS[name](CALLS[:1]).strip())
    assert not accepts(guide, WAYS[name]([("other", {})]).strip())


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({"regex": "a+b"}, "aab"),
        ({"choice": ["yes", "no"]}, "no"),
        ({"json": {"type": "integer"}}, "12"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x1"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<a>", "end": "</a>"}],
                    "triggers": ["<a"],
                }
            },
            "b",
        ),
    ],
)
def test_any_guide_may_begin_behind_a_thought(wish, text):
    fields = ChatFields(messages=[USER], structured_outputs=wish)
    for name, before in (
        ("hermes", "hm</think>\n\n"),
        ("openai", "hm<|end|><|start|>assistant<|channel|>final<|message|>"),
    ):
        style = style_of("", name, "openai_gptoss" if name == "openai" else "qwen3")
        guide, _ = guide_of(fields, style, True)
        assert accepts(guide, before + text) and not accepts(guide, text)
