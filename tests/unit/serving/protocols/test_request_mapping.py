"""Requests become the prompts that their template writes."""

import pytest
from http_server import DEMO
from model_answers import TOOLS

from megatron_hybrid.serving.http.errors import ApiError
from megatron_hybrid.serving.parsers.choice import REASONING_PARSERS
from megatron_hybrid.serving.protocols.fields import ChatFields, CompletionFields
from megatron_hybrid.serving.protocols.request_mapping import (
    chat_prompt,
    completion_prompts,
    is_thinking,
)
from megatron_hybrid.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinks %}<think>\n{% endif %}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer.from_folder(DEMO)
    tokenizer.set_chat_template(TEMPLATE)
    return tokenizer


def text_of(tokenizer, messages, **options):
    fields = ChatFields(messages=messages, **options)
    return tokenizer.detokenize(chat_prompt(tokenizer, fields).tokens)


def test_tools_and_past_calls_reach_the_template(tokenizer):
    function = {"name": "weather", "arguments": '{"city": "Kyoto"}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}
    result = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    assert text_of(tokenizer, [USER, call, result], tools=TOOLS) == (
        "[weather][time]<user>Hi|<assistant>(Kyoto)|<tool>rain|<assistant>"
    )
    assert function["arguments"] == '{"city": "Kyoto"}'  # the caller's stays as it is
    for empty in ("", "{}"):
        function["arguments"] = empty
        assert text_of(tokenizer, [USER, call, result]).startswith("<user>Hi|<assistant>()|")


def test_an_answer_may_begin_in_thought(tokenizer):
    for thinks in (False, True):
        fields = ChatFields(messages=[USER], chat_template_kwargs={"thinks": thinks})
        prompt = chat_prompt(tokenizer, fields)
        assert is_thinking(tokenizer, fields, REASONING_PARSERS["qwen3"], prompt) is thinks
        assert is_thinking(tokenizer, fields, REASONING_PARSERS["deepseek_r1"], prompt) is True
    said = {"role": "assistant", "content": "<think>hm</think>"}
    fields = ChatFields(messages=[USER, said], continue_final_message=True)
    assert (
        is_thinking(tokenizer, fields, REASONING_PARSERS["qwen3"], chat_prompt(tokenizer, fields))
        is None
    )


def test_a_last_message_is_continued(tokenizer):
    messages = [USER, {"role": "assistant", "content": "Well, I "}]
    text = text_of(tokenizer, messages, continue_final_message=True)
    assert text == "<user>Hi|<assistant>Well, I"


def test_what_the_template_writes_is_measured_not_the_messages():
    tokenizer = Tokenizer.from_folder(DEMO).limited_to(64)
    tokenizer.set_chat_template("{{ messages[-1].content }}")
    assert len(chat_prompt(tokenizer, ChatFields(messages=[USER] * 2000)).tokens) < 10


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"content": "Hi"}],
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
    ],
)
def test_a_bad_message_is_refused_by_name(tokenizer, messages):
    with pytest.raises(ApiError) as raised:
        chat_prompt(tokenizer, ChatFields(messages=messages))
    assert raised.value.status == 400 and raised.value.param == "messages"


@pytest.mark.parametrize("prompt", ["", [], ["a", ""], "\ud800"])
def test_an_impossible_prompt_is_refused(tokenizer, prompt):
    with pytest.raises(ApiError) as raised:
        completion_prompts(
            tokenizer, CompletionFields.model_construct(prompt=prompt, add_special_tokens=True)
        )
    assert raised.value.param == "prompt"
