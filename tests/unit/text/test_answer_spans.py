"""Where answers are in the text of each dialect's template, and which of them are trained."""

import pytest
from dialects import NAMES, TOKENS, compiled, message_of, turn

from megatron_hybrid.text.answer_spans import render_with_answers
from megatron_hybrid.text.chat_template import ChatTemplate

ASK, AGAIN = ({"role": "user", "content": text} for text in ("Zebras?", "And lions?"))
SO, NO = ({"role": "assistant", "content": text} for text in ("So they are.", "No."))
CITY = ("weather", {"city": "Łódź"})
TOOL = {"role": "tool", "tool_call_id": "call00000", "name": "weather", "content": "Qrain"}
MARKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = MARKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def answers(kind, messages, **options):
    text, spans, _ = render_with_answers(kind, messages, {"tools": None, **TOKENS}, **options)
    return [text[start:end] for start, end, _ in spans]


@pytest.mark.parametrize("name", NAMES)
def test_answers_of_every_dialect_are_what_its_model_writes(name):
    call = message_of(name, [CITY])
    chats = [[ASK, SO, AGAIN, NO], [ASK, call, TOOL, NO, AGAIN, SO]]
    for messages in chats:
        said = [message for message in messages if message["role"] == "assistant"]
        found = answers(compiled(name), messages)
        assert len(found) == len(said)
        for text, message in zip(found, said):
            # Its end differs: in the middle GPT-OSS ends turns by another mark.
            assert turn(name, message).strip() in text
            assert not any(words in text for words in ("Zebras", "lions", "Qrain", "<|im_start|>"))
    asked = answers(compiled(name), chats[0], train_on="user")
    assert [text.startswith(each["content"]) for text, each in zip(asked, (ASK, AGAIN))] == [1, 1]
    assert not any(words in text for text in asked for words in ("So they", "No."))


def test_an_answer_that_comes_first_has_nothing_of_what_is_written_before_it():
    for start in ("<s>You are kind.", ""):
        assert answers(ChatTemplate(start + PLAIN), [SO, ASK]) == ["So they are.</s>"]


def test_an_answer_may_begin_with_the_header_of_its_turn():
    named = {"role": "assistant", "content": "<assistant>is a header."}
    found = answers(ChatTemplate(PLAIN), [ASK, named, AGAIN, NO])
    assert found == ["<assistant>is a header.</s>", "No.</s>"]


def test_answers_in_a_row_are_apart():
    """Gemma 4 writes two without a mark between them."""
    source = ChatTemplate(
        "{% for m in messages %}{% if loop.changed(m.role) %}{{ '' if loop.first else '</s>' }}"
        "<{{ m.role }}>{% endif %}{{ m.content }}{% endfor %}</s>"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert answers(source, [ASK, SO, NO]) == ["So they are.", "No.</s>"]
    assert answers(source, [ASK, SO, {**NO, "train": False}]) == ["So they are."]
    assert answers(source, [ASK, {**NO, "train": False}, NO]) == ["No.</s>"]


def test_a_comment_marks_nothing():
    commented = ChatTemplate("{# {% generation %} #}" + PLAIN)
    assert answers(commented, [ASK, SO]) == ["So they are.</s>"]


@pytest.mark.parametrize("source", [MARKS, PLAIN])
@pytest.mark.parametrize(
    ("given", "train_on", "trained"),
    [
        ([{}, {}], "all", ["So they are.</s>", "No.</s>"]),
        ([{}, {}], "last", ["No.</s>"]),
        ([{"train": False}, {}], "all", ["No.</s>"]),
        ([{"weight": 1}, {"weight": 0}], "all", ["So they are.</s>"]),
        ([{"weight": 0.5}, {"weight": 2}], "all", ["So they are.</s>", "No.</s>"]),
        ([{}, {}], "user", ["Zebras?", "And lions?"]),
        ([{}, {"train": 0}], "user,assistant", ["Zebras?", "So they are.</s>", "And lions?"]),
    ],
)
def test_messages_are_chosen(source, given, train_on, trained):
    messages = [ASK, {**SO, **given[0]}, AGAIN, {**NO, **given[1]}]
    assert answers(ChatTemplate(source), messages, train_on=train_on) == trained
    _, spans, _ = render_with_answers(ChatTemplate(source), messages, TOKENS, train_on)
    assert [weight for *_, weight in spans] == (
        [0.5, 2] if given[1] == {"weight": 2} else [1] * len(spans)
    )


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ([{}, {"train": False}], "has no answer to train"),
        ([{}, {"weight": -1}], r"messages\[1\], of the role 'assistant', has weight=-1: true, or"),
        ([{"train": True}, {}], r"messages\[0\], of the role 'user', has train=True"),
    ],
)
def test_messages_that_cannot_be_chosen_are_refused(fields, match):
    messages = [{**ASK, **fields[0]}, {**SO, **fields[1]}]
    with pytest.raises(ValueError, match=match):
        answers(ChatTemplate(PLAIN), messages)


def test_a_template_for_training_writes_the_same_text():
    plain = ChatTemplate(PLAIN)
    assert answers(plain, [ASK, SO], marked=ChatTemplate(MARKS)) == ["So they are.</s>"]
    with pytest.raises(ValueError, match=r"writes another text .* from character 21 on '!</s>'"):
        other = ChatTemplate(MARKS.replace("{{ m.content }}</s>", "{{ m.content[:3] }}!</s>"))
        answers(plain, [{**ASK, "content": "x"}, SO], marked=other)
    with pytest.raises(ValueError, match=r"no {% generation %} blocks"):
        answers(plain, [ASK, SO], marked=plain)


def test_what_a_tool_says_inside_of_an_answer_is_never_trained():
    """Gemma 4 writes it before the content of the message that calls the tool."""
    source = (
        "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.arguments.city }}{% for t in messages if t.role == 'tool' %}"
        "[{{ t.content }}]{% endfor %}{% endif %}{% if m.content %}{{ m.content }}</s>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = message_of("gemma4", [CITY], content="I look.")
    assert answers(ChatTemplate(source), [ASK, call, TOOL, NO]) == [
        "Łódź",
        "I look.</s>",
        "No.</s>",
    ]
    text = ChatTemplate(source).render([ASK, call, TOOL, NO], False)
    assert text == "<user>Zebras?</s><assistant>Łódź[Qrain]I look.</s><assistant>No.</s>"
    with pytest.raises(ValueError, match=r"renders messages\[1\] among others"):
        answers(
            ChatTemplate(source.replace("e }}>", "e }}>{{ m.content }}")), [ASK, call, TOOL, NO]
        )


def test_a_greeting_has_its_place_where_the_template_asks_for_a_question():
    """Qwen 3.5 refuses messages without a user's."""
    source = (
        "{% if 'user' not in messages | map(attribute='role') %}{{ none.x }}{% endif %}" + PLAIN
    )
    assert answers(ChatTemplate(source), [SO, ASK, NO]) == ["So they are.</s>", "No.</s>"]
