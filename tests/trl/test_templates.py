"""Published chat templates, as TRL's wheel has them: texts and masks next to those of transformers.

TRL has a second template of most models, which marks what is trained. Where it writes the same
text, answers are found in the model's own template as transformers finds them by these marks.
"""

import json
import re
from importlib.metadata import files

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_hybrid.text.answer_spans import is_marked, render_with_answers
from megatron_hybrid.text.chat_template import ChatTemplate

SOURCES = {
    path.stem: path.locate().read_text("utf-8") for path in files("trl") if path.suffix == ".jinja"
}
NAMES = sorted(name for name in SOURCES if not name.endswith("_training"))
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
HEADERS = {
    "deepseek_r1_distill": "<｜(Assistant|tool▁outputs▁end)｜>",  # noqa: RUF001
    "deepseekv3": "<｜Assistant｜>",  # noqa: RUF001
    "gptoss": r"<\|start\|>assistant",
    "muse_glimmer": r"<\|start\|>assistant",
}
"""What the prompt of an answer ends with, and TRL marks all the same."""
OF_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that write the content of a message only if it is a list of parts."""
REFUSE = "roles must alternate|Only user and assistant roles|System role not supported"
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}}
FUNCTION = {"name": "look", "description": "see", "parameters": PARAMETERS}


def said(text, role="assistant", **more):
    return {"role": role, "content": text, **more}


def call(text, arguments, number):
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": f"call0000{number}", "type": "function", "function": function}]
    return said(text, tool_calls=calls)


def result(text, number):
    return said(text, "tool", tool_call_id=f"call0000{number}", name="look")


HI, AND = said("Zebras?", "user"), said("Lions?", "user")
CHATS = {
    "one": [HI, said("yo")],
    "turns": [said("Be kind.", "system"), HI, said("yo"), AND, said("yo"), HI, said("hi")],
    "thoughts": [HI, said("yo", reasoning_content="hm"), AND, said("so", reasoning_content="well")],
    "greeting": [said("yo"), HI, said("hi")],
    "call and words": [HI, call("Aside!", {"q": "sea"}, 1), result("blue", 1), said("It is blue.")],
    "call": [HI, call("", {"q": "sea"}, 1), result("blue", 1), said("It is blue.")],
    "calls": [
        *(HI, call("", {"q": "sea"}, 1), result("blue", 1), said("It is blue."), AND),
        *(call("", {"q": "sky"}, 2), result("grey", 2), said("Grey.")),
    ],
}


def theirs(source, messages, tools):
    """The text, and [start, end) of what is marked in it."""
    (text,), (spans,) = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=source,
        return_assistant_tokens_mask=True,
        documents=None,
        **TOKENS,
    )
    return text, spans


def joined(text, spans, header=""):
    """Spans side by side as one, without a header at their start and spaces around."""
    found = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    begin = re.compile(rf"({header})?\s*")
    return [(begin.match(text, start).end(), len(text[:end].rstrip())) for start, end in found]


def to_text(found):
    return json.dumps(found[0])


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
def test_texts_and_masks_of_published_templates(name, chat):
    messages, source = CHATS[chat], SOURCES[name]
    tools = [{"type": "function", "function": FUNCTION}] if "call" in chat else None
    if name in OF_PARTS:
        given = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    elif name == "deepseekv3":  # writes arguments as they are
        given = json.loads(re.sub(r'(?<="arguments": )({[^}]*})', to_text, json.dumps(messages)))
    else:
        given = messages
    variables = {"tools": tools, **TOKENS}
    try:
        text, _ = theirs(source, given, tools)
    except jinja2.TemplateError:
        with pytest.raises(ValueError, match=REFUSE):
            render_with_answers(ChatTemplate(source), messages, variables)
        return
    ours, found, _ = render_with_answers(ChatTemplate(source), messages, variables)
    spans = [(start, end) for start, end, _ in found]
    assert ours == text
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    split = chat == "call and words" and "gemma" in name  # by what the tool said
    written = [text[start:end] for start, end in (spans if split else joined(text, spans))]
    answers = ["", *answers] if split and len(written) == 3 else answers
    assert len(written) == len(answers)
    for answer, content in zip(written, answers):
        assert content in answer or content not in text
        assert not any(other in answer for other in ("Zebras", "Lions", "Be kind", "call00"))
    marked = SOURCES.get(f"{name}_training", source)
    if not is_marked(ChatTemplate(marked)):
        return
    same, marks = theirs(marked, given, tools)
    if same != text:  # TRL keeps all thoughts, or ends GLM's turns by the next header
        return
    expected = joined(text, marks, HEADERS.get(name, ""))
    if name == "diffusion_gemma":  # a call ends with an end token, which TRL leaves out
        spans = [
            (a, b - len("<|tool_response>") * text.endswith("<|tool_response>", 0, b))
            for a, b in spans
        ]
    assert joined(text, spans) == expected
